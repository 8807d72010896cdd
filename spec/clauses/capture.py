"""
Capture memory: graphs that share a memory pool replay in the order of their capture.
"""

from __future__ import annotations

from .model import Clause, Part

PART = Part(
    name="capture",
    title="Capture memory",
    hidden="scratch memory in the pool of captured graphs",
    without="a later graph's scratch overwrites what an earlier graph still needs",
    holder="each graph's place in the order of capture, and the place of each pool's latest "
    "replay; with one pool per slot, ownership alone suffices",
    intro="""\
While graphs are captured into one memory pool, a later graph takes memory that an earlier graph
freed, and uses that memory as scratch. Such graphs compute right values only if they are replayed
in the order of their capture. Holding references to the tensors does not help. The paper does not
name this relation.

With one pool per slot, a pool holds only the slot's own graphs of F, dI and dW, and ownership
already forces their order. This part then refuses nothing that ownership accepts. If several slots
share a pool, the schedule must keep the capture order while a tape is live in the pool. ZB-V does
not keep this order.

By default, the graph of a stage's refresh has a pool of its own. A stage may declare that this
graph was captured in a pool of slots (`StageConfig.refresh_pool`). A refresh keeps no tape, but its
replay can overwrite a live tape: the tape's F may have taken memory that the refresh freed, or the
refresh may have taken memory that the tape's dI or dW freed. The declared refresh therefore has a
place in the pool's order of capture. If all refreshes were captured first, no stage can be
refreshed while a tape is live in the pool. The cache that a refresh fills must lie outside the
pool.""",
    clauses=(
        Clause(
            id="capture.out-of-order",
            number="5.1",
            title="A shared pool replays in capture order",
            invariant="While a tape is live in a memory pool, each graph replayed in the pool was "
            "captured after the graph that was replayed there before it.",
            transitions=(
                "check_refresh",
                "check_forward",
                "check_dgrad",
                "check_wgrad",
                "group_wgrad",
            ),
            argument="key",
            unchanged="The pool's record of its latest replay, and the tapes that keep memory in "
            "the pool.",
            section="design",
            cause="Slots share a capture pool (one `graph_pool_handle` for all), perhaps with "
            "refreshes, and the schedule replays their graphs in another order than the order of "
            "capture.",
            remedy="Capture F, dI and dW of each slot into a memory pool of its own, and likewise "
            "the graph of each refresh.",
        ),
    ),
)
