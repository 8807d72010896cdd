"""
Real contracts under the protocol: N of them in one process, crashes and refusals drawn at random.

Each rank of the protocol has a `Contract`. The contract must accept every move that the protocol
allows. The contract's state must agree with the protocol's state. A checkpoint of all ranks must
restore all ranks to one epoch.
"""

from __future__ import annotations

from collections import Counter
from itertools import product
from random import Random

import attrs
import pytest
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st

from qeffect import Contract, Refused, StageConfig, TapeKey, TapeRef
from qeffect.checkpoint import Checkpoint
from qeffect.spec.ranks import AGREED, NOBODY, RANK_PROMISES
from qeffect.verification.ranks.concrete_state import ConcreteState, Impossible, Size, broken
from qeffect.verification.ranks.kernel import seen
from qeffect.verification.ranks.protocol import TRANSITIONS

_MATRICES = ("w",)
_MESSAGES = {"post_send", "post_receive", "transfer", "release", "disagree"}
_MOVES = [t for t in TRANSITIONS.values() if t.name not in _MESSAGES]


class Job:
    """
    The ranks of a job, their contracts and their checkpoints.

    Args:
        ranks: Number of ranks.
    """

    def __init__(self, ranks: int) -> None:
        self.state = ConcreteState(Size(ranks, attempts=64))
        self.contracts = [self._fresh(rank) for rank in range(ranks)]
        self.tapes: list[tuple[TapeKey, TapeRef] | None] = [None] * ranks
        self.kept: list[Checkpoint] = [contract.checkpoint() for contract in self.contracts]
        self.shards: list[Checkpoint] = list(self.kept)
        self.taken: Counter[str] = Counter()
        members = self.state.members
        self.moves = [
            (t, given)
            for t in _MOVES
            for given in product(*(members[sort] for sort in t.arguments))
        ]

    @staticmethod
    def _fresh(rank: int) -> Contract:
        return Contract([StageConfig(rank, microbatches=1, slots=1, matrices=_MATRICES)])

    def enabled(self) -> list[int]:
        """The moves that the protocol allows here; a contract takes each key once per epoch."""
        before = list(self.state.buffer)
        found = []
        names = self._names()
        for number, (transition, given) in enumerate(self.moves):
            if "name" in transition.arguments and given[1] not in names:
                continue
            try:
                transition.run(self.state, *given)
            except (Impossible, Refused):
                continue
            finally:
                self.state.buffer[:] = before
            if transition.name == "act" and self._forwarded(given[0]):
                continue
            if transition.name == "finish" and not self._can_finish(given[0]):
                continue
            found.append(number)
        return found

    def _names(self) -> tuple[int, int]:
        """The offered name, and a name that no rank has drawn."""
        drawn_in = self.state.drawn_in
        new = next(a for a in self.state.members["name"] if drawn_in[a] == NOBODY)
        return self.state.offered[0], new

    def _forwarded(self, rank: int) -> bool:
        return bool(self.contracts[rank].memory.forwards[rank])

    def _can_finish(self, rank: int) -> bool:
        memory = self.contracts[rank].memory
        whole = memory.final[rank] == memory.weight_epoch[rank]
        return bool(memory.wgrads[rank] == 1 and not whole)

    def take(self, number: int) -> None:
        """Let the protocol and the contract take a move."""
        transition, given = self.moves[number]
        rank = given[0] if given else -1
        self._with_contract(transition.name, rank)
        transition.run(self.state, *given)
        self.taken[transition.name] += 1
        if transition.name == "publish":
            self.kept = list(self.shards)
            assert 1 == len({checkpoint.epoch for checkpoint in self.kept})

    def _with_contract(self, name: str, rank: int) -> None:
        contract = self.contracts[rank]
        if name == "start":
            contract = self.contracts[rank] = self._fresh(rank)
            contract.restore(self.kept[rank])
        elif name == "start_again":  # from its own weights, which are those of its last commit
            kept = self._fresh(rank).checkpoint()
            self.contracts[rank] = self._fresh(rank)
            self.contracts[rank].restore(attrs.evolve(kept, epoch=contract.epoch))
        elif name == "act":
            self.tapes[rank] = self._forward(contract, rank)
        elif name == "end_act":
            self._backward(contract, rank)
        elif name == "fail":
            tape = self.tapes[rank]
            assert tape is not None
            contract.drop(*tape)
        elif name == "finish":
            contract.finalize(rank)
        elif name == "consent":
            contract.check_commit()
        elif name == "refuse":
            with pytest.raises(Refused):
                contract.check_commit()
        elif name == "commit":
            contract.commit_epoch(contract.epoch)
        elif name == "write_shard":
            contract.submit()
            contract.join()
            contract.drain()
            contract.check_checkpoint()
            self.shards[rank] = contract.checkpoint()

    def _forward(self, contract: Contract, rank: int) -> tuple[TapeKey, TapeRef]:
        key = TapeKey(contract.epoch, rank, 0)
        contract.submit()
        contract.join()
        with contract.refresh(rank):
            pass
        contract.wait()
        with contract.forward(key) as forward:
            pass
        contract.wait()
        return key, forward.ref

    def _backward(self, contract: Contract, rank: int) -> None:
        tape = self.tapes[rank]
        assert tape is not None
        contract.bind(tape[0])
        contract.submit()
        contract.join()
        with contract.dgrad(*tape) as dgrad:
            dgrad.queued = _MATRICES
        with contract.wgrad(*tape) as wgrad:
            wgrad.covered = _MATRICES
        contract.wait()

    def agrees(self) -> None:
        """Assert that every running contract agrees with the protocol's state."""
        state = self.state
        for rank, contract in enumerate(self.contracts):
            if state.up[rank] != 1:
                continue
            found = seen(contract.memory)

            assert state.epoch[rank] == found.epoch == contract.epoch
            assert (state.live[rank] > 0) is found.live
            assert (state.spoiled[rank] == 1) is found.spoiled
            assert (state.whole[rank] == 1) is found.whole
            if state.phase[rank] == AGREED and state.leaving[rank] == 0:
                contract.check_commit()
        assert [] == list(broken(RANK_PROMISES, state))


def run(ranks: int, draws: list[int]) -> Job:
    """Run a job from a list of random draws; faults are as likely as any other move."""
    job = Job(ranks)
    for draw in draws:
        enabled = job.enabled()
        # Without this, half of all moves would be crashes.
        calm = [n for n in enabled if not job.moves[n][0].fault and job.moves[n][0].name != "wake"]
        chosen = enabled if draw % 8 == 0 or not calm else calm
        job.take(chosen[draw // 8 % len(chosen)])
        job.agrees()
    return job


@settings(max_examples=25, deadline=None)
@drawn(st.sampled_from([2, 3]), st.lists(st.integers(0, 10_000), max_size=150))
def test_contracts_follow_the_protocol(ranks: int, draws: list[int]) -> None:
    """A contract accepts every move that the protocol allows, and its state agrees."""
    run(ranks, draws)


def test_everything_happens() -> None:
    """Long runs take every move of the protocol, including restarts from later epochs."""
    taken: Counter[str] = Counter()
    epochs = set()
    for seed in range(6):
        rng = Random(seed)
        job = run(2, [rng.randrange(10_000) for _ in range(500)])
        taken += job.taken
        epochs.add(job.kept[0].epoch)

    assert {t.name for t in _MOVES} == set(taken)
    assert max(epochs) > 0
