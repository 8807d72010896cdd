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
    holder="each graph's place in the order of capture, and the place of the graph that each pool "
    "replayed last; with one pool per slot, the ownership part alone suffices",
    intro="""\
If several graphs are captured into one memory pool, a later graph may take memory that an earlier
graph freed, and use it as scratch. Such graphs compute right values only if they are replayed in
the order of their capture. Holding references to the tensors does not help. The paper does not
mention this problem.

With one pool per slot, a pool holds only the slot's own graphs of F, dI and dW. The ownership part
already forces their order, so this part refuses nothing more. If several slots share a pool, the
schedule must keep the capture order while a tape is live in the pool. The schedule ZB-V does not
keep this order.

By default, the graph of a stage's refresh has a pool of its own. A stage may declare that this
graph was captured in a pool of slots (`StageConfig.refresh_pool`). A refresh leaves no tape, but
its replay can overwrite a live tape, in two ways. The tape's F may have taken memory that the
refresh freed, or the refresh may have taken memory that the tape's dI or dW freed. A refresh in a
pool of slots therefore has a place in the pool's order of capture. If all refreshes were captured
first, no stage can be refreshed while a tape is live in the pool. The cache that a refresh fills
must lie outside the pool.""",
    clauses=(
        Clause(
            id="capture.out-of-order",
            number="5.1",
            title="A shared pool replays in capture order",
            invariant="While a tape is live in a memory pool, the pool's graphs are replayed in "
            "the order of their capture. Each replayed graph was captured after the graph that "
            "was replayed before it.",
            transitions=(
                "check_refresh",
                "check_forward",
                "check_dgrad",
                "check_wgrad",
                "group_wgrad",
            ),
            argument="key",
            unchanged="The pool's record of its latest replay, and the tapes with memory in the "
            "pool.",
            section="design",
            cause="Several slots, and perhaps refreshes, share a capture pool (one "
            "`graph_pool_handle` for all). The schedule replays their graphs in another order "
            "than the order of capture.",
            remedy="Capture F, dI and dW of each slot into a memory pool of its own. Capture the "
            "graph of each refresh into a separate pool, too.",
        ),
    ),
)
