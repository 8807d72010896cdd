"""
Stops in a replay of rank logs: a rank's reason to stop, the cause that all ranks report, and the
end of the rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from qeffect.spec.ranks import AGREED, STEP

from .concrete_state import Impossible
from .launches import LAUNCHES
from .order_search import LoggedStep
from .protocol import TRANSITIONS
from .replayed_launches import LaunchesOfRank
from .replayed_state import ReplayedState, UnlikeError, same

__all__ = ["ReplayedStops"]


class ReplayedStops:
    """
    The stops of one attempt.

    Args:
        state: The state of all ranks.
        launches: For each rank, its launched steps.
        tally: Counts for the report; this class counts the ranks that stopped without a crash.
    """

    def __init__(
        self, state: ReplayedState, launches: Mapping[int, LaunchesOfRank], tally: Counter[str]
    ) -> None:
        self.state, self.launches, self.tally = state, launches, tally

    def stop(
        self, r: int, event: Mapping[str, Any], op: Callable[..., LoggedStep]
    ) -> Iterator[LoggedStep]:
        """Yield the steps of a rank that stops; they depend on the kind of its reason."""
        kind = event["kind"]
        if kind in ("late", "ended"):
            yield op(event, "run_late")
        elif kind == "lost":
            yield op(event, "wake", lambda: self._wake(r, event))
        elif kind != "disagreed":
            yield op(event, "give_up", lambda: self._give_up(r, event))
        elif self.launches[r].takes_part:  # it read the reason in the votes
            yield op(event, "disagree", lambda: TRANSITIONS["give_up"].run(self.state, r))
        else:
            yield op(event, "disagree", lambda: self._disagree(r))

    def _give_up(self, r: int, event: Mapping[str, Any]) -> None:
        st = self.state
        at_commit = st.phase[r] == STEP and not event["in_row"]
        if event["kind"] == "refused" and at_commit and not st.whole[r]:
            TRANSITIONS["refuse"].run(st, r)
            return
        if st.live[r] and st.phase[r] == STEP:
            TRANSITIONS["fail"].run(st, r)
        TRANSITIONS["give_up"].run(st, r)

    def _wake(self, r: int, event: Mapping[str, Any]) -> None:
        st, peer = self.state, event["peer"]
        others = [peer] if peer in st.ranks else [q for q in st.ranks if q != r]
        for q in others:
            try:
                TRANSITIONS["wake"].run(st, r, q)
            except Impossible:
                continue
            return
        raise Impossible

    def _disagree(self, r: int) -> None:
        """
        Record that a rank found a difference between ranks. The model knows whether messages
        differ; a difference of epochs or gradients counts as the rank's own reason.
        """
        st = self.state
        for q, p in st.total.messages:
            for k in range(st.sent_before[q, p], st.sent[q, p]):
                try:
                    TRANSITIONS["disagree"].run(st, r, q, p, k)
                except Impossible:
                    continue
                return
        if st.phase[r] != AGREED:
            raise Impossible
        TRANSITIONS["give_up"].run(st, r)

    def end(self, r: int, event: Mapping[str, Any], launches: bool) -> None:
        """End a rank with the cause that the first stopping rank chose."""
        st, cause = self.state, event["cause"]
        if cause not in st.ranks:
            raise UnlikeError(f"the number of a rank, below {len(st.ranks)}", f"rank {cause}")
        n = st.life[r]
        if not st.halted[n]:
            (LAUNCHES["choose_cause"] if launches else TRANSITIONS["decide"]).run(st, r, cause)
        TRANSITIONS["end"].run(st, r)
        same("cause", f"rank {st.told[r]}", f"rank {cause}")
        self.tally["stops"] += 1

    def gone(self, r: int, launches: bool) -> None:
        """Record that a rank's process has died, because its log ends without a stop."""
        if launches:
            self.launches[r].die()
        if self.state.up[r]:
            TRANSITIONS["crash"].run(self.state, r)
