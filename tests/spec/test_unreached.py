"""
The chapter on clauses without a rejected log lists the clauses that the example logs leave out.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from qeffect import Destination, DeviceCounts
from qeffect.spec.clauses import CLAUSES
from qeffect.spec.document import contract
from qeffect.verification.logs.examples import UNREACHED
from tests.kernel.helpers import Rig, refused, stage

HEADING = "Clauses without a rejected log"


def listed() -> list[str]:
    """The clauses at the head of the chapter's items, before each item's reason."""
    _, _, chapter = contract().partition(f". {HEADING}\n")
    items = re.findall(r"^- (.*?):\s", chapter.split("\n## ")[0], re.MULTILINE | re.DOTALL)
    return [clause for item in items for clause in re.findall(r"`([a-z]+\.[a-z-]+)`", item)]


def test_the_chapter_lists_every_clause_without_a_rejected_log() -> None:
    """Each stands there once, no other does, and all are clauses."""
    assert sorted(UNREACHED) == sorted(listed())
    assert set(SHOWN) >= UNREACHED
    assert set(CLAUSES) > UNREACHED


def _reserved(rig: Rig) -> Callable[[], Any]:
    """A tape that is claimed, and its dI."""
    ref = rig.contract.reserve(rig.key(0))
    rig.contract.bind(rig.key(0))
    return lambda: rig.contract.check_dgrad(rig.key(0), ref)


def _after(*actions: str, then: str) -> Callable[[Rig], Callable[[], Any]]:
    """A tape on which some actions ran, and the check of one more."""

    def prepare(rig: Rig) -> Callable[[], Any]:
        ref = rig.forward(0)
        for action in actions:
            getattr(rig, action)(ref, 0)
        return lambda: getattr(rig.contract, f"check_{then}")(rig.key(0), ref)

    return prepare


def _refreshing(rig: Rig) -> Callable[[], Any]:
    """A refresh in flight, and a checkpoint."""
    rig.contract.check_refresh(0)
    return rig.contract.checkpoint


def _reducing(rig: Rig) -> Callable[[], Any]:
    """A reduction in flight, and a checkpoint."""
    for microbatch in (0, 1):
        rig.microbatch(microbatch)
    rig.contract.wait()
    rig.contract.finalize(0)
    rig.contract.start_reduction(0)
    rig.contract.drain()
    return rig.contract.checkpoint


def _another(rig: Rig) -> Callable[[], Any]:
    """A checkpoint of another configuration."""
    return lambda: rig.contract.restore(Rig(stage(slots=7)).contract.checkpoint())


def _counting(digest: int, forwards: int | None) -> Callable[[Rig], Callable[[], Any]]:
    """A whole epoch, and a commit with other counts than its own, or with none."""

    def prepare(rig: Rig) -> Callable[[], Any]:
        rig.contract = Rig(stage(), counted=True).contract
        for microbatch in (0, 1):
            rig.microbatch(microbatch)
        rig.contract.wait()
        rig.contract.finalize(0)
        if forwards is None:
            return rig.contract.commit_epoch
        counts = DeviceCounts(digest, {0: (0, forwards, 2, 2)})
        return lambda: rig.contract.commit_epoch(counted={0: counts})

    return prepare


def _overtaken(rig: Rig) -> Callable[[], Any]:
    """Another F after a tape's own, and its dI."""
    ref = rig.forward(0)
    rig.forward(1)
    rig.contract.bind(rig.key(0))
    rig.contract.wait()
    return lambda: rig.contract.check_dgrad(rig.key(0), ref)


def _live(rig: Rig) -> Callable[[], Any]:
    """A live tape, and a checkpoint."""
    rig.forward(0)
    return rig.contract.checkpoint


def _refreshed(rig: Rig) -> Callable[[], Any]:
    """A refresh whose forward is to come, and a checkpoint."""
    rig.contract.commit(rig.contract.check_refresh(0))
    return rig.contract.checkpoint


def _whole(rig: Rig) -> None:
    """A whole epoch, ready for its update."""
    rig.contract = Rig(stage()).contract
    for microbatch in (0, 1):
        rig.microbatch(microbatch)
    rig.contract.wait()
    rig.contract.finalize(0)


def _updating(rig: Rig) -> Callable[[], Any]:
    """An update in flight, and another."""
    _whole(rig)
    rig.contract.check_update()
    return rig.contract.check_update


def _gradients(rig: Rig) -> Callable[[], Any]:
    """A whole epoch whose gradients a stream of its own reads, and an update."""
    _whole(rig)
    rig.contract.start_gradients_read(0)
    return rig.contract.check_update


def _reduced(rig: Rig) -> Callable[[], Any]:
    """A whole walk whose gradients are reduced, and another walk."""
    rig.contract = Rig(stage(reduces=True)).contract
    for microbatch in (0, 1):
        rig.microbatch(microbatch)
    rig.contract.wait()
    rig.contract.finalize(0)
    rig.contract.start_reduction(0)
    return rig.contract.next_walk


def _begun(rig: Rig) -> Callable[[], Any]:
    """A walk whose first F ran."""
    rig.microbatch(0)
    return lambda: rig.contract.shorten_walk(1)


def _moving(rig: Rig) -> Callable[[], Any]:
    """A movement of scales in the middle of an epoch."""
    rig.contract = Rig(stage(scales="epoch")).contract
    rig.microbatch(0)
    return lambda: rig.contract.move_scales(0)


def _apart(rig: Rig) -> Callable[[], Any]:
    """Two tapes whose gradients go to a destination each, and one dW of both."""
    apart = tuple(
        Destination(matrix, m, (2,), "bf16", "cpu", 4096 + 64 * (2 * n + m), 4)
        for n, matrix in enumerate(rig.matrices())
        for m in (0, 1)
    )
    rig.contract = Rig(stage(scales="epoch", destinations=apart)).contract
    refs = [rig.forward(microbatch) for microbatch in (0, 1)]
    for microbatch, ref in enumerate(refs):
        rig.dgrad(ref, microbatch)
    other = rig.key(1), refs[1]
    return lambda: rig.contract.check_wgrad(rig.key(0), refs[0], group=[other])


#: For each clause without a rejected log, and for some others, how to come before a call that it
#: refuses.
SHOWN: dict[str, Callable[[Rig], Callable[[], Any]]] = {
    "epoch.device-count": _counting(0, 3),
    "epoch.device-order": _counting(0, 2),
    "epoch.uncounted": _counting(0, None),
    "epoch.in-flight": _updating,
    "arena.other-destination": _apart,
    "reduction.begun": _reduced,
    "ownership.walk-begun": _begun,
    "completion.gradients-in-use": _gradients,
    "order.scales-moved": _overtaken,
    "order.moves-outside-update": _moving,
    "persistence.live-tape": _live,
    "persistence.mid-epoch": _refreshed,
    "ownership.duplicate-dgrad": _after("dgrad", then="dgrad"),
    "ownership.duplicate-wgrad": _after("dgrad", "wgrad", then="wgrad"),
    "ownership.not-forwarded": _reserved,
    "ownership.wgrad-before-dgrad": _after(then="wgrad"),
    "persistence.action-in-flight": _refreshing,
    "persistence.configuration": _another,
    "persistence.reduction-in-flight": _reducing,
    "version.left-out": lambda rig: lambda: Rig(omit={"version"}).contract.invalidate(0),
}


@pytest.mark.parametrize("clause", sorted(SHOWN))
def test_a_call_shows_it_instead(clause: str) -> None:
    """A call of the contract is refused by the clause, and changes nothing."""
    rig = Rig(stage(sends_output=True, reduces=True, tape_scales="live"))
    call = SHOWN[clause](rig)
    with refused(rig, clause):
        call()
