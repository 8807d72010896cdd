"""
Public failures of schedules: a table cannot run, or a runtime runs it in another order.
"""

from __future__ import annotations

from .failure import Rows
from .history import History

ROWS = Rows("schedule")


@ROWS.enacted(
    "pytorch-172668",
    "pytorch/pytorch#172668",
    "pytorch/pytorch#178815",
    state="open; an option of torch 2.13",
    what="receives at the start of a row block computation, but deferring all of them deadlocks",
    cause="If every receive is moved to the action that uses it, both ranks wait for their send to "
    "end before either rank has posted the matching receive.",
    consequence="a hang",
    fix="one of the two ranks receives first",
    clause="schedule.deadlock",
    at="check rank 0 step 5 0WAIT_SEND_F1",
    shown="tests/failures/test_torch_deferred_receives.py",
)
def both_ranks_send_first(h: History) -> None:
    own = "0F0,0SEND_F0,0WAIT_SEND_F0,0F1,0SEND_F1,0WAIT_SEND_F1,"
    own += "0RECV_B0,0I0,0W0,0RECV_B1,0I1,0W1"
    first = "1SEND_B0,1WAIT_SEND_B0,1RECV_F1" if h.faulty else "1RECV_F1,1SEND_B0,1WAIT_SEND_B0"
    other = f"1RECV_F0,1F0,1I0,1W0,{first},1F1,1I1,1W1,1SEND_B1,1WAIT_SEND_B1"
    h.table(f"{own}\n{other}")


ROWS.untold(
    "zero-bubble-54197a6a",
    "sail-sg/zero-bubble@54197a6a",
    state="fixed 2024-09",
    what="a runtime stuck in communication",
    cause="Fused and single messages use different communicators, and one communicator was not set "
    "up on every rank.",
    consequence="a hang",
    fix="set up the global communicator first",
    kind="transport",
    why="Every message is posted at the right place of the schedule; the hang is inside a "
    "communicator.",
)


@ROWS.enacted(
    "pytorch-194121",
    "pytorch/pytorch#194121",
    "pytorch/pytorch#193903",
    state="in torch 2.15",
    what="missing or misplaced waits for the sends of a captured schedule",
    cause="Without waits, every sent activation stays allocated to the end of the step. A "
    "misplaced wait comes before the receive that it depends on.",
    consequence="a hang at replay, or more memory",
    fix="a pass over the table that inserts the waits",
    clause="schedule.deadlock",
    at="check rank 0 step 5 0WAIT_SEND_F1",
)
def a_send_awaited_too_early(h: History) -> None:
    early, late = ("0WAIT_SEND_F1,", "") if h.faulty else ("", "0WAIT_SEND_F1,")
    own = f"0F0,0SEND_F0,0F1,0SEND_F1,0WAIT_SEND_F0,{early}0RECV_B0,0I0,0W0,{late}"
    own += "0RECV_B1,0I1,0W1"
    other = "1RECV_F0,1F0,1I0,1W0,1SEND_B0,1WAIT_SEND_B0,1RECV_F1,1F1,1I1,1W1,"
    other += "1SEND_B1,1WAIT_SEND_B1"
    h.table(f"{own}\n{other}")


@ROWS.enacted(
    "torchtitan-774",
    "pytorch/torchtitan#774",
    state="reported 2025-01",
    what="ZB-V on four ranks ends in a missing key",
    cause="The stages of a V-shaped schedule were mapped to ranks as in a looped schedule.",
    consequence="a crash",
    fix="map the stages as a V",
    clause="schedule.stage-on-wrong-rank",
    at="check rank 0 step 1 3F0",
)
def a_v_mapped_as_a_loop(h: History) -> None:
    h.table(
        "0F0,3F0,3I0,3W0,0I0,0W0\n1F0,2F0,2I0,2W0,1I0,1W0",
        stage_to_rank={0: 0, 1: 1, 2: 0, 3: 1} if h.faulty else {0: 0, 1: 1, 2: 1, 3: 0},
    )


ROWS.untold(
    "torchtitan-4143",
    "pytorch/torchtitan#4143",
    state="fixed 2026-08",
    what="capture fails with sharded parameters that are always resharded",
    cause="The captured code waits for an event that was recorded outside the capture.",
    consequence="a crash (stream capture isolation)",
    fix="gather the parameters before the capture",
    kind="transport",
    why="CUDA itself refuses the capture, before anything is replayed.",
)


@ROWS.enacted(
    "megatron-lm-1450",
    "NVIDIA/Megatron-LM#1450",
    "NVIDIA/Megatron-LM#5271",
    state="open 2025-03",
    what="batched messages of interleaved stages are swapped on two ranks",
    cause="With two ranks the previous and the next rank are the same. A batch posts a send and "
    "a receive for each direction in one fixed order, and messages between the same two ranks are "
    "matched by order. So a receive of an activation gets a gradient.",
    consequence="silent wrong numbers; with other shapes a crash or a hang",
    fix="separate messages instead of batches",
    clause="schedule.message-order",
    at="check rank 1 step 8 1RECV_F1",
)
def a_gradient_received_as_an_activation(h: History) -> None:
    sends = "2SEND_B0,0SEND_F1" if h.faulty else "0SEND_F1,2SEND_B0"
    own = f"0F0,0SEND_F0,2RECV_F0,2F0,2SEND_F0,2RECV_B0,2I0,2W0,0F1,{sends},0RECV_B0,0I0,0W0,"
    own += "2RECV_F1,2F1,2SEND_F1,2RECV_B1,2I1,2W1,2SEND_B1,0RECV_B1,0I1,0W1"
    other = "1RECV_F0,1F0,1SEND_F0,3RECV_F0,3F0,3I0,3W0,3SEND_B0,1RECV_F1,1RECV_B0,1I0,1W0,"
    other += "1SEND_B0,1F1,1SEND_F1,3RECV_F1,3F1,3I1,3W1,3SEND_B1,1RECV_B1,1I1,1W1,1SEND_B1"
    h.table(f"{own}\n{other}")
