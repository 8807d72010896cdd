"""
Scenarios whose event logs are the valid example logs. Each scenario exercises one part of the
contract.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from qeffect import Bucket, Destination, StageConfig, TapeKey, TapeRef
from qeffect.schedule.tables import read_fixture

from .recorded import MATRICES, RecordedCaller, placed

__all__ = ["SCENARIOS"]


def zbv_rank() -> list[str]:
    """Rank 1 of ZB-V at PP=2, M=4: two chunks in one domain, a destination per microbatch."""
    d = RecordedCaller(
        [StageConfig(s, 4, 3, matrices=MATRICES, destinations=placed(4, 4096 * s)) for s in (1, 2)],
        incarnation=0x5EED_0001,
    )
    row = read_fixture("ScheduleZBVZeroBubble_pp2_vpp2_m4.compute.csv").rows[1]
    left = {1: 4, 2: 4}
    for action in filter(None, row):
        stage, microbatch = action.stage, action.microbatch
        if action.kind == "F":
            d.contract.submit()
            d.contract.join()
            if microbatch == 0:
                d.refresh(stage)
            d.forward(stage, microbatch, token=d.contract.token(stage))
        elif action.kind == "I":
            d.dgrad(stage, microbatch, token=d.contract.token(stage))
        else:
            d.wgrad(stage, microbatch)
            left[stage] -= 1
            if left[stage] == 0:
                d.finalize(stage)
    d.commit()
    d.contract.drain()
    d.contract.checkpoint()
    return d.log.close()


def aborts_and_restores() -> list[str]:
    """Actions fail in every possible way; after each failure the same checkpoint is restored."""
    d = RecordedCaller(
        [StageConfig(0, 2, 2, matrices=MATRICES, destinations=placed(None, 4096))],
        incarnation=0x5EED_0100,
    )
    start = d.contract.checkpoint()
    d.fail(d.contract.refresh(0))
    d.restart(start, 0x5EED_0101)
    d.fail(d.contract.forward(d.key(0, 0), refresh=True))
    d.restart(start, 0x5EED_0102)
    d.forward(0, 0, refresh=True)
    d.forward(0, 1)
    d.contract.bind(d.key(0, 0))
    d.contract.wait()
    d.fail(d.contract.dgrad(d.key(0, 0), d.ref(0, 0)))
    d.restart(start, 0x5EED_0103)
    d.refresh(0)
    d.whole(0, 0)
    d.forward(0, 1)
    d.dgrad(0, 1)
    d.fail(d.contract.wgrad(d.key(0, 1), d.ref(0, 1)))
    d.restart(start, 0x5EED_0104)
    d.refresh(0)
    d.whole(0, 1)
    d.whole(0, 0)
    d.finalize(0)
    d.commit()
    d.contract.drain()
    d.contract.checkpoint()
    return d.log.close()


def reductions_and_checkpoint() -> list[str]:
    """Two domains with data-parallel reductions; one reduction fails, and the epoch is rebuilt."""
    d = RecordedCaller(
        [
            StageConfig(
                0,
                1,
                1,
                matrices=MATRICES,
                domain="a",
                reduces=True,
                buckets=(Bucket(0, ("fc1",)), Bucket("later", ("fc2",))),
            ),
            StageConfig(1, 1, 1, matrices=MATRICES, domain="b", reduces=True),
        ],
        incarnation=0x5EED_0200,
    )
    start = d.contract.checkpoint()
    for stage in (0, 1):
        d.refresh(stage)
        d.whole(stage, 0)
        d.finalize(stage)
    d.contract.start_reduction(0)
    d.contract.fail_reduction(0)
    d.contract.start_reduction(1)
    d.contract.fail_reduction(1)
    d.restart(start, 0x5EED_0201)
    tickets = [d.contract.check_refresh(stage, d.link(stage)) for stage in (0, 1)]
    for ticket in tickets:
        d.contract.commit(ticket)
    for stage in (0, 1):
        d.whole(stage, 0)
    d.finalize(0)
    for bucket in (0, "later"):
        d.contract.start_reduction(bucket)
        d.contract.finish_reduction(bucket)
    d.finalize(1)
    d.contract.start_reduction(1)
    d.contract.finish_reduction(1)
    d.commit()
    d.contract.drain()
    done = d.contract.checkpoint()
    d.contract.restore(done, incarnation=0x5EED_0202)
    d.fail(d.contract.refresh(0, d.link(0)))
    d.refresh(1)
    d.forward(1, 0)
    d.contract.drop(d.key(1, 0), d.ref(1, 0))
    return d.log.close()


def buckets() -> list[str]:
    """
    Two stages that share one bucket and each have one separate bucket, reduced on another stream.
    """
    stages = [
        StageConfig(
            stage,
            1,
            1,
            matrices=MATRICES,
            reduces=True,
            buckets=(Bucket("tied", ("fc1",)), Bucket(name, ("fc2",))),
        )
        for stage, name in enumerate(("first", "last"))
    ]
    d = RecordedCaller(
        stages,
        incarnation=0x5EED_0A00,
        callers=("main", "communication"),
        reductions=("last", "tied", "first"),
    )
    main, communication = d.link(0), d.link(0, "communication")
    for _ in range(2):
        for stage, ready in ((1, ("last",)), (0, ("tied", "first"))):
            d.refresh(stage)
            d.whole(stage, 0)
            d.contract.wait(communication)
            for bucket in ready:
                d.contract.start_reduction(bucket, communication)
        d.contract.finish_reduction("last", main)
        d.contract.wait(main)
        for stage in (1, 0):
            d.contract.finalize(stage, main)
        for bucket in ("tied", "first"):
            d.contract.finish_reduction(bucket, main)
        d.commit()
    d.contract.drain()
    d.contract.checkpoint()
    return d.log.close()


def tied_weight() -> list[str]:
    """An embedding and a head that share one gradient: the first dW of an epoch, of either stage,
    overwrites the gradient, and all later dW add to it."""
    stages = [
        StageConfig(
            stage,
            2,
            2,
            matrices=(tied, "fc1"),
            destinations=(
                Destination(tied, None, (4, 8), "float32", "cuda:0", 4096, 128),
                Destination("fc1", None, (4, 8), "float32", "cuda:0", 8192 + 128 * stage, 128),
            ),
            buffers={tied: "table"},
            tied=(tied,),
        )
        for stage, tied in ((0, "embedding"), (3, "head"))
    ]
    d = RecordedCaller(stages, incarnation=0x5EED_0B00)
    for order in (((3, 0), (0, 0), (3, 1), (0, 1)), ((0, 1), (0, 0), (3, 0), (3, 1))):
        for stage in (0, 3):
            d.refresh(stage)
            for microbatch in (0, 1):
                d.forward(stage, microbatch)
        for stage in (3, 0):
            for microbatch in (0, 1):
                d.dgrad(stage, microbatch)
        for stage, microbatch in order:
            d.wgrad(stage, microbatch)
        d.finalize(0)
        d.contract.finalize(3, d.link(3))
        d.commit()
    return d.log.close()


def readers() -> list[str]:
    """Outputs and input gradients are sent; a slot is reserved; two callers; a tape is dropped."""
    d = RecordedCaller(
        [
            StageConfig(0, 2, 2, matrices=MATRICES, sends_output=True, sends_gradient=True),
            StageConfig(1, 2, 2, matrices=MATRICES),
        ],
        incarnation=0x5EED_0300,
        callers=("main", "send"),
    )
    send = d.link(0, "send")
    d.refresh(0)
    d.contract.reserve(d.key(0, 0))
    d.contract.submit("send")
    d.contract.join(send)
    d.forward(0, 0)
    d.forward(0, 1, link=send)
    d.contract.wait(send)
    for microbatch in (0, 1):
        key, ref = d.key(0, microbatch), d.ref(0, microbatch)
        d.contract.read(key, ref, link=send)
        d.contract.finish_read(key, ref, link=send)
        d.dgrad(0, microbatch)
        d.contract.wait(send)
        d.contract.read(key, ref, gradient=True, link=send)
        d.wgrad(0, microbatch)
        d.contract.finish_read(key, ref, gradient=True, link=send)
    d.contract.join(send)
    d.finalize(0)
    d.refresh(1)
    d.forward(1, 0)
    d.forward(1, 1)
    d.contract.bind(d.key(1, 1))
    d.contract.drop(d.key(1, 0), d.ref(1, 0))
    d.contract.purge(0)
    return d.log.close()


def messages() -> list[str]:
    """Receives and sends use one slot on their own stream; a tape is lost while it is read."""
    d = RecordedCaller(
        [
            StageConfig(
                0,
                3,
                2,
                matrices=MATRICES,
                sends_output=True,
                sends_gradient=True,
                receives_input=True,
                receives_gradient=True,
            )
        ],
        incarnation=0x5EED_0A00,
        callers=("main", "wire"),
    )
    wire = d.link(0, "wire")
    start = d.contract.checkpoint()
    d.refresh(0)
    key = d.key(0, 0)
    ref = d.contract.reserve(key, link=wire)
    d.contract.post_receive(key, ref, link=wire)
    d.contract.finish_receive(key, ref, link=wire)
    d.contract.join(wire)
    d.forward(0, 0)
    d.contract.wait(wire)
    d.contract.read(key, ref, link=wire)
    d.contract.post_receive(key, ref, gradient=True, link=wire)
    d.contract.finish_receive(key, ref, gradient=True, link=wire)
    d.contract.join(wire)
    d.dgrad(0, 0)
    d.contract.wait(wire)
    d.contract.read(key, ref, gradient=True, link=wire)
    d.wgrad(0, 0)
    d.contract.finish_read(key, ref, gradient=True, link=wire)
    d.contract.finish_read(key, ref, link=wire)
    d.contract.join(wire)
    d.contract.wait(wire)
    key = d.key(0, 1)
    ref = d.contract.reserve(key, link=wire)
    d.contract.post_receive(key, ref, link=wire)
    d.contract.finish_receive(key, ref, link=wire)
    d.contract.join(wire)
    d.forward(0, 1)
    d.contract.wait(wire)
    d.contract.read(key, ref, link=wire)
    d.contract.drop(key, ref)
    d.contract.reserve(d.key(0, 2), link=wire)
    d.contract.finish_read(key, ref, link=wire)
    d.restart(start, 0x5EED_0A01)
    ref = d.contract.reserve(key, link=wire)
    d.contract.post_receive(key, ref, link=wire)
    return d.log.close()


def copied_inputs() -> list[str]:
    """A loader's stream copies inputs into one slot; each copy is awaited before its F."""
    d = RecordedCaller(
        [StageConfig(0, 2, 1, matrices=MATRICES, sends_output=True, copies_input=True)],
        incarnation=0x5EED_0C00,
        callers=("main", "loader"),
    )
    main, loader = d.link(0), d.link(0, "loader")
    d.refresh(0)
    for microbatch in (0, 1):
        d.contract.wait(loader)
        d.contract.reserve(d.key(0, microbatch), link=loader)
        d.contract.join(loader)
        d.forward(0, microbatch)
        d.contract.wait(main)
        key, ref = d.key(0, microbatch), d.ref(0, microbatch)
        d.contract.read(key, ref, link=main)
        d.dgrad(0, microbatch)
        d.wgrad(0, microbatch)
        d.contract.finish_read(key, ref, link=main)
        d.contract.join(main)
    d.finalize(0)
    d.commit()
    return d.log.close()


def chunks() -> list[str]:
    """Three chunks of one process; the first feeds the second, the third has no neighbour."""
    d = RecordedCaller(
        [StageConfig(s, 2, 2, matrices=MATRICES, feeds=1 if s == 0 else None) for s in range(3)],
        incarnation=0x5EED_0D00,
    )
    for microbatch in (0, 1):
        for stage in (0, 1, 2):
            if microbatch == 0:
                d.refresh(stage)
            d.forward(stage, microbatch)
    for stage in (1, 0, 2):
        for microbatch in (0, 1):
            d.dgrad(stage, microbatch)
            d.wgrad(stage, microbatch)
        d.finalize(stage)
    d.commit()
    return d.log.close()


def chunks_with_messages() -> list[str]:
    """Two chunks of one process exchange messages; another rank feeds a third chunk."""
    sends: dict[str, Any] = {"sends_output": True, "receives_gradient": True, "feeds": 1}
    takes: dict[str, Any] = {"receives_input": True, "sends_gradient": True}
    d = RecordedCaller(
        [
            StageConfig(0, 1, 1, matrices=MATRICES, **sends),
            StageConfig(1, 1, 1, matrices=MATRICES, **takes),
            StageConfig(2, 1, 1, matrices=MATRICES, **takes),
        ],
        incarnation=0x5EED_0D01,
    )

    def receive(stage: int, ref: TapeRef, *, gradient: bool = False) -> None:
        d.contract.post_receive(d.key(stage, 0), ref, gradient=gradient)
        d.contract.finish_receive(d.key(stage, 0), ref, gradient=gradient)
        d.contract.join()

    def send(stage: int, *, gradient: bool = False) -> None:
        d.contract.wait()
        d.contract.read(d.key(stage, 0), d.ref(stage, 0), gradient=gradient)

    elsewhere = d.contract.reserve(d.key(2, 0))
    receive(2, elsewhere)
    d.refresh(0)
    d.forward(0, 0)
    send(0)
    for stage in (1, 2):
        d.refresh(stage)
        if stage == 1:
            receive(1, d.contract.reserve(d.key(1, 0)))
        d.forward(stage, 0)
        d.dgrad(stage, 0)
        send(stage, gradient=True)
    receive(0, d.ref(0, 0), gradient=True)
    d.dgrad(0, 0)
    d.contract.finish_read(d.key(0, 0), d.ref(0, 0))
    for stage in (1, 2):
        d.contract.finish_read(d.key(stage, 0), d.ref(stage, 0), gradient=True)
    d.contract.join()
    for stage in (0, 1, 2):
        d.wgrad(stage, 0)
        d.finalize(stage)
    d.commit()
    return d.log.close()


def shared_pool_in_declared_order() -> list[str]:
    """Slots share a capture pool and are replayed in capture order, in a declared order."""
    cells = [(0, m, 0, 0) for m in (0, 1)]
    d = RecordedCaller(
        [StageConfig(0, 2, 2, matrices=MATRICES, pool="graphs")],
        incarnation=0x5EED_0400,
        capture_order=[(0, slot, kind) for kind in ("F", "dI", "dW") for slot in (0, 1)],
        declared={0: [(kind, cell) for kind in ("F", "dI") for cell in cells]},
    )
    for _ in range(2):
        d.refresh(0)
        for microbatch in (0, 1):
            d.forward(0, microbatch, slot=microbatch)
        for microbatch in (0, 1):
            d.dgrad(0, microbatch)
        for microbatch in (0, 1):
            d.wgrad(0, microbatch)
        d.finalize(0)
        d.commit()
    return d.log.close()


def refreshes_in_a_shared_pool() -> list[str]:
    """Chunks share a capture pool with their refreshes, and are replayed in capture order."""
    d = RecordedCaller(
        [
            StageConfig(s, 1, 1, matrices=MATRICES, pool="graphs", refresh_pool="graphs")
            for s in (0, 1)
        ],
        incarnation=0x5EED_2200,
        capture_order=[
            *(graph for s in (0, 1) for graph in ((s, "refresh"), (s, 0, "F"))),
            *((s, 0, kind) for kind in ("dI", "dW") for s in (1, 0)),
        ],
    )
    for _ in range(2):
        for stage in (0, 1):
            d.refresh(stage)
            d.forward(stage, 0)
        for stage in (1, 0):
            d.dgrad(stage, 0)
        for stage in (1, 0):
            d.wgrad(stage, 0)
        for stage in (0, 1):
            d.finalize(stage)
        d.commit()
    return d.log.close()


def last_generation() -> list[str]:
    """A small generation counter is used up; the stage has two blocks, and dW runs beside F."""
    d = RecordedCaller(
        [StageConfig(0, 1, 2, blocks=2, matrices=MATRICES)],
        incarnation=0x5EED_0500,
        generation_max=2,
    )
    for _ in range(2):
        d.refresh(0)
        d.forward(0, 0, block=0, slot=0)
        d.dgrad(0, 0, block=0)
        outstanding = d.contract.check_wgrad(d.key(0, 0, 0), d.ref(0, 0, 0))
        d.forward(0, 0, block=1, slot=1)
        d.contract.commit(outstanding, MATRICES)
        d.dgrad(0, 0, block=1)
        d.wgrad(0, 0, block=1)
        d.finalize(0)
        d.commit()
    return d.log.close()


def lost_cache() -> list[str]:
    """Caches are lost before and after the first F; a refresh runs while another domain is busy."""
    d = RecordedCaller(
        [StageConfig(s, 2, 2, matrices=MATRICES, domain="b" if s == 3 else "a") for s in range(4)],
        incarnation=0x5EED_0600,
    )
    outstanding = d.contract.check_forward(d.key(2, 0), refresh=True)
    d.refresh(3)
    d.contract.commit(outstanding)
    d.refresh(1)
    d.contract.invalidate(1)
    d.refresh(1)
    d.forward(1, 0)
    d.contract.invalidate(1)
    d.refresh(0)
    d.forward(0, 0)
    d.dgrad(0, 0)
    d.wgrad(0, 0)
    return d.log.close()


def without_version_order_arena() -> list[str]:
    """Static scales and copied gradients: the contract omits version, order, arena and capture."""
    d = RecordedCaller(
        [StageConfig(s, 1, 1, matrices=MATRICES, reduces=s == 0) for s in (0, 1)],
        incarnation=0x5EED_0700,
        omit=("version", "order", "arena", "capture"),
    )
    start = d.contract.checkpoint()
    d.forward(0, 0)
    d.dgrad(0, 0)
    d.wgrad(0, 0, destination=placed(None, 8192))
    d.finalize(0)
    d.contract.start_reduction(0)
    d.contract.finish_reduction(0)
    d.whole(1, 0)
    d.finalize(1)
    d.commit()
    d.whole(0, 0)
    d.forward(1, 0)
    d.contract.drop(d.key(1, 0), d.ref(1, 0))
    d.finalize(0)
    d.restart(start, 0x5EED_0701)
    return d.log.close()


def reported_evidence() -> list[str]:
    """
    Two stages report fills and scaling updates. The tapes of one stage carry copies of the scales;
    the other stage's dI reads the live scales.
    """
    d = RecordedCaller(
        [
            StageConfig(
                s,
                2,
                2,
                domain=scales,
                matrices=MATRICES,
                reports_fills=True,
                reports_updates=True,
                tape_scales=scales,
            )
            for s, scales in ((0, "carried"), (1, "live"))
        ],
        incarnation=0x5EED_0A00,
    )
    for _ in range(2):
        d.refresh(0)
        d.forward(0, 0)
        d.forward(0, 1)
        d.dgrad(0, 0)
        d.dgrad(0, 1)
        d.wgrad(0, 0)
        d.wgrad(0, 1)
        d.finalize(0)
        d.forward(1, 0, refresh=True)
        d.dgrad(1, 0)
        d.forward(1, 1)
        d.wgrad(1, 0)
        d.dgrad(1, 1)
        d.wgrad(1, 1)
        d.finalize(1)
        d.commit()
    return d.log.close()


def reported_draws() -> list[str]:
    """Two stages of one domain report where F drew random numbers; dI draws them again."""
    d = RecordedCaller(
        [
            StageConfig(s, 1, 1, matrices=MATRICES, reports_draws=True, recomputes_draws=True)
            for s in (0, 1)
        ],
        incarnation=0x5EED_1300,
    )
    for _ in range(2):
        for s in (0, 1):
            d.forward(s, 0, refresh=True)
        for s in (1, 0):
            d.dgrad(s, 0)
            d.wgrad(s, 0)
            d.finalize(s)
        d.commit()
    return d.log.close()


def reported_weights() -> list[str]:
    """
    A stage reports gradient weights that add up over the two walks of an epoch, then over one walk;
    another stage reports no weights.
    """
    d = RecordedCaller(
        [
            StageConfig(0, 2, 1, matrices=MATRICES, weights_sum=(1, 2)),
            StageConfig(1, 1, 1, matrices=MATRICES),
        ],
        incarnation=0x5EED_1500,
    )
    for walks in (2, 1):
        d.walks = walks
        for walk in range(walks):
            if walk:
                d.contract.next_walk()
            for stage, microbatches in ((0, 2), (1, 1)):
                for microbatch in range(microbatches):
                    d.forward(stage, microbatch, refresh=walk == microbatch == 0)
                    d.dgrad(stage, microbatch)
                    d.wgrad(stage, microbatch)
                d.finalize(stage)
        d.commit()
    return d.log.close()


def updates() -> list[str]:
    """One update is checked and committed in two calls; another update fails halfway."""
    d = RecordedCaller([StageConfig(0, 1, 1, matrices=MATRICES)], incarnation=0x5EED_0C00)
    d.refresh(0)
    d.whole(0, 0)
    d.finalize(0)
    with d.contract.update():
        pass
    d.contract.drain()
    d.contract.checkpoint()
    d.refresh(0)
    d.whole(0, 0)
    d.finalize(0)
    d.fail(d.contract.update())
    return d.log.close()


def late_faults() -> list[str]:
    """A fault of the current epoch is found late, then a fault of a committed epoch."""
    d = RecordedCaller([StageConfig(0, 2, 2, matrices=MATRICES)], incarnation=0x5EED_1200)
    d.refresh(0)
    d.whole(0, 0)
    d.whole(0, 1)
    d.finalize(0)
    d.commit()
    d.contract.drain()
    start = d.contract.checkpoint()
    d.refresh(0)
    d.forward(0, 0)
    d.contract.fail(0)
    d.forward(0, 1)
    d.restart(start, 0x5EED_1201)
    d.refresh(0)
    d.contract.fail(0, epoch=0)
    d.contract.drain()
    d.contract.restore(start, incarnation=0x5EED_1202)
    return d.log.close()


def weights_readers() -> list[str]:
    """A save reads the weights on a separate stream; another caller starts a broadcast."""
    d = RecordedCaller(
        [StageConfig(0, 1, 1, matrices=MATRICES)],
        incarnation=0x5EED_0E00,
        callers=("main", "save"),
    )
    save = d.contract.link("save")
    for _ in range(2):
        d.refresh(0)
        d.contract.wait(save)
        d.contract.start_weights_read(0, save)
        d.whole(0, 0)
        d.contract.finish_weights_read(0)
        d.finalize(0)
        d.commit()
    d.contract.start_weights_read(0)
    d.contract.finish_weights_read(0)
    d.contract.drain()
    d.contract.checkpoint()
    return d.log.close()


def gradients_readers() -> list[str]:
    """A norm reads reduced gradients on a separate stream, also beside another reader."""
    d = RecordedCaller(
        [StageConfig(s, 1, 1, matrices=MATRICES, reduces=True) for s in (0, 1)],
        incarnation=0x5EED_1300,
        callers=("main", "norm"),
    )
    for _ in range(2):
        for stage in (0, 1):
            d.refresh(stage)
            d.whole(stage, 0)
        for stage in (0, 1):
            d.finalize(stage)
        for stage in (0, 1):
            d.contract.start_reduction(stage)
            d.contract.finish_reduction(stage)
        for stage in (0, 1):
            d.contract.start_gradients_read(stage)
        for stage in (0, 1):
            d.contract.finish_gradients_read(stage)
        d.commit()
    return d.log.close()


def evaluations() -> list[str]:
    """Evaluations run between microbatches, before and after the update; one evaluation fails."""
    d = RecordedCaller(
        [StageConfig(0, 2, 1, matrices=MATRICES, reports_fills=True, reports_updates=True)],
        incarnation=0x5EED_1000,
    )
    start = d.contract.checkpoint()

    def evaluate(cached: bool) -> None:
        with d.contract.evaluation(0, cached=cached) as block:
            block.updates = 0

    evaluate(cached=False)
    d.refresh(0)
    d.whole(0, 0)
    evaluate(cached=True)
    d.whole(0, 1)
    d.finalize(0)
    evaluate(cached=True)
    d.contract.wait()
    d.commit()
    evaluate(cached=False)
    d.fail(d.contract.evaluation(0, cached=False))
    d.restart(start, 0x5EED_1001)
    evaluate(cached=False)
    return d.log.close()


def evaluations_side_by_side() -> list[str]:
    """Two stages without scaling state are evaluated at the same time."""
    stages = [StageConfig(s, 1, 1, matrices=MATRICES) for s in (0, 1)]
    d = RecordedCaller(stages, incarnation=0x5EED_1100, omit=("order", "version"))
    tickets = [d.contract.check_evaluation(s) for s in (0, 1)]
    for ticket in tickets:
        d.contract.commit(ticket)
    return d.log.close()


def accumulated_walks() -> list[str]:
    """An epoch has two walks (passes over the microbatches) in a declared order; gradients are
    reduced after the second walk."""
    actions = [(what, (0, m, 0, 0)) for m in (0, 1) for what in ("F", "dI")]
    d = RecordedCaller(
        [StageConfig(0, 2, 2, matrices=MATRICES, destinations=placed(None, 4096), reduces=True)],
        incarnation=0x5EED_0F00,
        declared={0: actions},
    )
    d.refresh(0)
    for walk in range(2):
        if walk:
            d.contract.next_walk()
        for microbatch in (0, 1):
            d.whole(0, microbatch)
        d.finalize(0)
    d.contract.start_reduction(0)
    d.contract.finish_reduction(0)
    d.commit()
    return d.log.close()


def short_walk() -> list[str]:
    """
    A walk (a pass over the microbatches) that leaves microbatches out: one domain with a declared
    order runs all three, the other domain runs two of three.

    The next walk runs all three in both domains.
    """
    actions = [(what, (0, m, 0, 0)) for m in range(3) for what in ("F", "dI")]
    stages = [
        StageConfig(s, 3, 1, domain=s, matrices=MATRICES, destinations=placed(None, base))
        for s, base in ((0, 4096), (1, 8192))
    ]
    d = RecordedCaller(stages, incarnation=0x5EED_1200, declared={0: actions})
    for taken in (2, 3):
        if taken == 2:
            d.contract.skip(d.key(1, 2))
            for stage in (0, 1):
                d.refresh(stage)
        else:
            d.contract.next_walk()
        for stage, most in ((0, 3), (1, taken)):
            for microbatch in range(most):
                d.whole(stage, microbatch)
            d.finalize(stage)
    d.commit()
    return d.log.close()


def scales_of_an_epoch() -> list[str]:
    """
    Two chunks in one domain and one chunk in another; the scales of all chunks are updated once per
    epoch.

    The first epoch has two walks. The update of the second epoch fails after one domain has moved
    its scales.
    """
    reports: dict[str, Any] = {"reports_updates": True, "tape_scales": "live"}
    own: tuple[dict[str, Any], ...] = (reports, reports, {"domain": 1})
    stages = [
        StageConfig(s, 1, 1, matrices=MATRICES, scales="epoch", **options)
        for s, options in enumerate(own)
    ]
    d = RecordedCaller(stages, incarnation=0x5EED_1500)
    start = d.contract.checkpoint()

    def walk(refresh: bool = True) -> None:
        for stage in range(3):
            d.forward(stage, 0, refresh=refresh)
            d.dgrad(stage, 0)
            d.wgrad(stage, 0)
            d.finalize(stage)

    walk()
    d.contract.next_walk()
    walk(refresh=False)
    d.commit()
    walk()
    ticket = d.contract.check_update()
    d.contract.move_scales(2)
    d.contract.abort(ticket)
    d.restart(start, 0x5EED_1501)
    d.forward(0, 0, refresh=True)
    return d.log.close()


def grouped_wgrads() -> list[str]:
    """
    One dW takes three tapes (computes the gradients of three microbatches), and a tape is still
    read when the dW ends; in the next epoch such a dW fails.
    """
    d = RecordedCaller(
        [
            StageConfig(
                0,
                3,
                3,
                matrices=MATRICES,
                destinations=placed(None, 4096),
                sends_output=True,
                scales="epoch",
            )
        ],
        incarnation=0x5EED_1600,
    )
    start = d.contract.checkpoint()

    def tape(microbatch: int) -> tuple[TapeKey, TapeRef]:
        return d.key(0, microbatch), d.ref(0, microbatch)

    def before_wgrad() -> None:
        for microbatch in range(3):
            d.forward(0, microbatch, refresh=microbatch == 0)
            d.contract.wait()
            d.contract.read(*tape(microbatch))
            d.dgrad(0, microbatch)
        for microbatch in (0, 1):
            d.contract.finish_read(*tape(microbatch))
        d.contract.join()

    before_wgrad()
    d.wgrad(0, 0, group=[tape(1), tape(2)])
    d.contract.finish_read(*tape(2))
    d.finalize(0)
    d.commit()
    before_wgrad()
    d.fail(d.contract.wgrad(*tape(1), group=[tape(0), tape(2)]))
    d.restart(start, 0x5EED_1601)
    d.forward(0, 0, refresh=True)
    return d.log.close()


def recurring_steps() -> list[str]:
    """A step is recorded, then committed twice, each time in one call, with a drain in between."""
    d = RecordedCaller(
        [StageConfig(0, 2, 2, matrices=MATRICES, destinations=placed(None, 4096))],
        incarnation=0x5EED_0B00,
    )

    def step() -> None:
        d.refresh(0)
        d.forward(0, 0)
        d.forward(0, 1)
        d.dgrad(0, 0)
        d.dgrad(0, 1)
        d.wgrad(0, 1)
        d.wgrad(0, 0)
        d.finalize(0)
        d.commit()

    step()
    d.contract.record_step().drop()
    recording = d.contract.record_step()
    step()
    recorded = recording.end()
    d.contract.commit_step(recorded)
    d.contract.drain()
    d.contract.commit_step(recorded)
    return d.log.close()


#: Every scenario by the name of its log.
SCENARIOS: Final[Mapping[str, Callable[[], list[str]]]] = {
    scenario.__name__.replace("_", "-"): scenario
    for scenario in (
        zbv_rank,
        aborts_and_restores,
        reductions_and_checkpoint,
        buckets,
        tied_weight,
        readers,
        messages,
        copied_inputs,
        chunks,
        chunks_with_messages,
        shared_pool_in_declared_order,
        refreshes_in_a_shared_pool,
        last_generation,
        lost_cache,
        without_version_order_arena,
        reported_evidence,
        reported_draws,
        reported_weights,
        updates,
        late_faults,
        weights_readers,
        gradients_readers,
        evaluations,
        evaluations_side_by_side,
        accumulated_walks,
        short_walk,
        scales_of_an_epoch,
        grouped_wgrads,
        recurring_steps,
    )
}
