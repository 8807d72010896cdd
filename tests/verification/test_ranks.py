"""
Ranks: the protocol is proved for any number, explored for a few, and needs each of its guards.
"""

from __future__ import annotations

import json
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from attrs import evolve

from qeffect.cli import main
from qeffect.schedule.index import index_of
from qeffect.schedule.infer import from_actions
from qeffect.schedule.ranks import check_ranks
from qeffect.schedule.rendezvous import rendezvous
from qeffect.schedule.torch_tables import torch_schedule
from qeffect.schedule.transport import QUEUES, RENDEZVOUS, Transport
from qeffect.spec.launches import LAUNCH_COLUMNS, LAUNCH_PROMISES, LAUNCH_STEPS
from qeffect.spec.ranks import RANK_COLUMNS, RANK_PROMISES, RANK_STEPS
from qeffect.verification.proofs.goals import Obligation
from qeffect.verification.proofs.report import Agreement, ProofReport
from qeffect.verification.proofs.second_solver import ATTEMPTS
from qeffect.verification.ranks import command, kernel
from qeffect.verification.ranks import explore as ranks_explore
from qeffect.verification.ranks import prove as ranks_prove
from qeffect.verification.ranks.concrete_state import ConcreteState, Size, broken
from qeffect.verification.ranks.explore import SCOPES, explore
from qeffect.verification.ranks.interleavings import interleavings
from qeffect.verification.ranks.kernel import KERNEL_SCOPES, RankView, match
from qeffect.verification.ranks.launch_lemmas import LAUNCH_LEMMAS
from qeffect.verification.ranks.launches import LAUNCHES
from qeffect.verification.ranks.lemmas import CONFIGURATION, LEMMAS
from qeffect.verification.ranks.mutants import WRITES, ProtocolMutant, caught, mutants
from qeffect.verification.ranks.protocol import TRANSITIONS
from qeffect.verification.ranks.prove import PROTOCOLS, again, prove, run_proofs
from tests.torch_release import NEEDS_DEFERRED

#: States and steps of each scope, exactly.
COUNTS = {
    "two-ranks": (28_063, 81_811),
    "three-ranks": (67_828, 182_710),
    "messages": (696, 1_916),
    "messages-and-faults": (19_342, 43_211),
    "messages-both-ways": (744, 2_602),
    "two-messages": (536, 1_658),
    "exchanged-messages": (1_256, 3_230),
    "in-place": (4_577, 8_361),
    "two-steps": (48_253, 119_043),
    "two-launches": (50_703, 129_824),
    "stopped-launches": (45_301, 116_202),
    "saved-launches": (21_784, 52_340),
    "saved-and-rebuilt": (21_176, 67_320),
    "launched-messages": (48_799, 131_960),
    "exchanged-in-launches": (8_125, 19_196),
    "launched-through-three": (7_829, 42_942),
}
#: States and steps of two scopes with lemmas, with fewer faults and all stops in their own steps.
LEMMA_COUNTS = {"exchanged-in-launches": (1_241, 2_806), "launched-messages": (737, 2_316)}
QUICK = ("messages", "messages-both-ways", "two-messages", "exchanged-messages", "in-place")
#: Scopes that end in seconds, with stops in one step each, so that lemmas about stops do not hold.
QUICK_AT_ONCE = ("exchanged-in-launches", "launched-through-three")
#: Progress alone suffers from these: no promise of safety rests on them.
FOR_PROGRESS = {
    "post_send without planned-sends",
    "post_receive without planned-receives",
    "close without open =",
    "disagree_captured without quits =",
}
#: Obligations of one transition: proved, kept since nothing that it reads is written, unproved.
PROVED = Obligation("ranks.lives", "inductive", "hosts", "start", "", "z3", "unsat", 0.1)
KEPT = evolve(PROVED, solver="syntax", seconds=0.0)
OPEN = evolve(PROVED, name="ranks.one-name", verdict="unknown")
BY_NAME = {mutant.name: mutant for mutant in mutants()}


class TestProofs:
    @pytest.mark.ci  # `make check` proves them too
    def test_everything_is_proved(self) -> None:
        """Promises and lemmas hold initially and are kept by every transition; none is unknown."""
        answers = list(prove())
        solvers = Counter(answer.solver for answer in answers)

        assert [] == [answer for answer in answers if not answer.proved]
        wanted = [len(p.invariants) * (1 + len(p.transitions)) + len(p.steps) for p in PROTOCOLS]
        assert sum(wanted) == len(answers)
        # An obligation needs no solver if the transition writes nothing that it reads.
        assert {"z3": 667, "syntax": 2_705} == solvers
        promised = (*RANK_PROMISES, *RANK_STEPS, *LAUNCH_PROMISES, *LAUNCH_STEPS)
        assert {p.name for p in promised} <= {a.name for a in answers}

    def test_a_false_promise_is_not_proved(self) -> None:
        """A commit without the consent of all ranks leaves promises unproved."""
        left = {
            answer.name
            for answer in prove(
                transition="commit", without=frozenset({"consent-of-all"}), thorough=False
            )
            if not answer.proved
        }

        assert {"ranks.refusal-holds-all", "ranks.all-consented"} <= left

    @pytest.mark.nightly
    def test_other_solvers_agree(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Another seed and cvc5 prove the same goals; cvc5 needs lemmas for a goal's members."""
        monkeypatch.setattr(ranks_prove, "PROTOCOLS", PROTOCOLS[1:])
        asked = [o for o in prove() if o.solver == "z3"]
        seeded, second = again([1], ("z3", "cvc5"))

        assert [] == [*seeded.open, *second.open]
        assert len(asked) == seeded.goals == seeded.unsat == second.goals == second.unsat
        assert ("z3", 1, "cvc5") == (seeded.solver, seeded.seed, second.solver)
        assert ATTEMPTS[-1].name in second.attempts

    def test_the_first_finding_is_told_at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Of two open obligations the first is printed at once, and both are reported."""
        told: list[str] = []
        monkeypatch.setattr(ranks_prove, "prove", lambda **_: iter([PROVED, OPEN, OPEN]))
        report = run_proofs(note=told.append)

        assert ["First finding: start: ranks.one-name: unknown"] == told
        assert [OPEN, OPEN] == report.open


class TestExplorer:
    @pytest.mark.parametrize(
        "name",
        [
            pytest.param(
                name,
                marks=pytest.mark.slow
                if name not in QUICK + QUICK_AT_ONCE
                else pytest.mark.ci
                if name in QUICK[3:] + QUICK_AT_ONCE
                else (),
            )
            for name in SCOPES
        ],
    )
    def test_scope(self, name: str) -> None:
        """No promise breaks, and the end of the protocol is reachable from every state."""
        found = explore(SCOPES[name], lemmas=name in QUICK)

        assert ("", ()) == (found.violation, found.trace)
        assert COUNTS[name] == (found.states, found.steps)

    @pytest.mark.slow
    def test_everything_happens(self) -> None:
        """Every transition is taken, and every guard refuses somewhere."""
        found = [explore(scope, lemmas=False) for scope in SCOPES.values()]
        taken = {name for one in found for name in one.taken}
        refused = {name.removeprefix("ranks.") for one in found for name in one.refused}

        assert {*TRANSITIONS, *LAUNCHES} == taken
        asked = {m.without for m in mutants() if "=" not in m.without and not m.instead}
        assert asked == refused

    def test_configurations_are_what_is_assumed(self) -> None:
        """The explored configurations satisfy the assumptions of the proofs."""
        for scope in SCOPES.values():
            state = ConcreteState(scope.size)
            state.members = {**state.members, "count": range(scope.size.steps + 2)}

            assert [] == list(broken(CONFIGURATION, state))


class TestMutants:
    def test_everything_asked_is_left_out_in_turn(self) -> None:
        """Each guard of a transition has a mutant, and so has each listed write."""
        assert 52 + len(WRITES) + 1 == len(BY_NAME)
        for name, column in WRITES:
            assert name in {**TRANSITIONS, **LAUNCHES}
            assert column in (RANK_COLUMNS if name in TRANSITIONS else LAUNCH_COLUMNS)

    @pytest.mark.parametrize(
        ("name", "violation", "ends"),
        [
            pytest.param(
                "commit without consent-of-all",
                "ranks.all-consented",
                ("consent(rank 0)", "commit(rank 0)"),
                marks=pytest.mark.slow,
            ),
            (
                "publish without part-of-this-epoch",
                "ranks.checkpoint-of-one-epoch",
                ("publish(rank 0)",),
            ),
            (
                "publish without part-of-this-attempt",
                "ranks.checkpoint-of-one-attempt",
                ("connect(rank 0, name 0)", "publish(rank 0)"),
            ),
            (
                "move without yes-of-all",
                "launches.moved-by-all",
                ("launch(rank 0)", "vote_yes(rank 0)", "move(rank 0)"),
            ),
            (
                "commit_launched without votes-first",
                "launches.commit-confirmed",
                ("commit_launched(rank 0)", "launch(rank 0)", "commit_launched(rank 0)"),
            ),
            (
                "leave_launches without votes-first",
                "launches.part-is-settled",
                ("leave_launches(rank 0)", "write_part(rank 0)"),
            ),
            (
                "launch without resumed-first",
                "launches.part-is-settled",
                ("leave_launches(rank 0)", "launch(rank 0)", "write_part(rank 0)"),
            ),
            (
                "launch without captured-by-all",
                "launches.messages-before-vote",
                ("launch(rank 0)", "vote_yes(rank 0)"),
            ),
            (
                "launch without same-order",
                "launches.message-meets-its-own",
                ("launch(rank 0)", "launch(rank 1)", "transfer_launched(rank 0, rank 1)"),
            ),
            (
                "vote_yes without messages-ended",
                "launches.messages-before-vote",
                ("launch(rank 0)", "vote_yes(rank 0)"),
            ),
            pytest.param(
                "vote_after_skip without messages-ended",
                "launches.messages-before-vote",
                ("skip(rank 0)", "vote_after_skip(rank 0)"),
                marks=pytest.mark.ci,
            ),
            (
                "publish_parts without part-of-this-round",
                "launches.checkpoint-of-one-round",
                ("write_part(rank 0)", "publish_parts(rank 0)"),
            ),
            (
                "begin_anew without fence",
                "launches.one-attempt",
                ("die(rank 0)", "begin_anew()", "start_anew(rank 0)"),
            ),
            (
                "choose_cause without failure-before-no",
                "launches.cause-before-no",
                ("read_a_no(rank 0)", "publish_why(rank 0)", "choose_cause(rank 1, rank 0)"),
            ),
            (
                "end without cause-first",
                "ranks.tells-the-cause",
                ("give_up(rank 0)", "say(rank 0)", "close(rank 0)", "end(rank 0)"),
            ),
            pytest.param(
                "decide without precedence",
                "ranks.cause-before-loss",
                (
                    "give_up(rank 0)",
                    "say(rank 0)",
                    "close(rank 0)",
                    "wake(rank 1, rank 0)",
                    "say(rank 1)",
                    "decide(rank 0, rank 1)",
                ),
                marks=pytest.mark.nightly,
            ),
            pytest.param(
                "commit without same-messages",
                "ranks.messages-in-place",
                ("consent(rank 1)", "commit(rank 0)"),
                marks=pytest.mark.slow,
            ),
            ("begin_attempt without fence", "ranks.one-attempt", ("start(rank 1)",)),
            pytest.param(
                "connect by count",
                "ranks.one-name",
                (
                    "crash(rank 0)",
                    "begin_attempt()",
                    "start(rank 0)",
                    "start(rank 1)",
                    "connect(rank 0, name 1)",
                    "connect(rank 1, name 0)",
                ),
                marks=pytest.mark.nightly,
            ),
            pytest.param(
                "offer without drawn-name",
                "ranks.all-came",
                ("start(rank 0)", "offer(rank 0, name 0)", "connect(rank 0, name 0)"),
                marks=pytest.mark.nightly,
            ),
            pytest.param(
                "connect without own-seat",
                "ranks.all-came",
                ("begin_attempt()", "start(rank 0)", "connect(rank 0, name 0)"),
                marks=pytest.mark.nightly,
            ),
            (
                "release without release-after-send",
                "ranks.sender-keeps-buffer",
                ("post_send(rank 0, rank 1, slot 0, message 0)", "release(rank 0, slot 0)"),
            ),
        ],
    )
    def test_caught_with_a_trace(self, name: str, violation: str, ends: tuple[str, ...]) -> None:
        """For the worst mutants a proof fails, and a shortest trace shows the fault."""
        found = caught(BY_NAME[name])

        assert found.open
        assert violation == found.violation
        assert ends == found.trace[-len(ends) :]

    @pytest.mark.slow
    @pytest.mark.parametrize("mutant", BY_NAME.values(), ids=BY_NAME)
    def test_every_one_is_caught(self, mutant: ProtocolMutant) -> None:
        """With any mutant, ranks break a promise or cannot reach the end."""
        found = caught(mutant)

        assert found.killed
        assert bool(found.open) is (mutant.name not in FOR_PROGRESS)


class TestMessagesOfLaunches:
    """Messages inside a launch: their identity, and launches that lack one end of a message."""

    @pytest.mark.parametrize("name", ["exchanged-in-launches", "launched-messages"])
    def test_lemmas(self, name: str) -> None:
        """The lemmas of the proofs hold in every state, with all stops in their own steps."""
        left_out = {"fail_host", "vote_no", "die"}
        scope = SCOPES[name]
        scope = evolve(scope, at_once=False, leave_out=scope.leave_out | left_out)
        found = explore(scope, lemmas=True)

        assert "" == found.violation
        assert LEMMA_COUNTS[name] == (found.states, found.steps)
        assert bool(found.taken["disagree_captured"]) is (scope.size.kinds > 1)

    def test_a_graph_without_one_of_its_sends_blocks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """
        Rank 0 launches a graph that lacks a send. The other rank's receive never ends, and no order
        of the ranks' steps leads to the end. The promise that such a launch breaks is left out.
        """

        def launch(st: Any, r: Any) -> None:
            captured = st.graph_sends[0, 1]
            if st.launched[0] == 1:
                st.graph_sends[0, 1] = 1  # as rank 0 told the others
            LAUNCHES["launch"].run(st, r)
            st.graph_sends[0, 1] = 0 if r == 0 else captured

        kept = [p for p in LAUNCH_PROMISES if p.name != "launches.messages-before-vote"]
        monkeypatch.setattr(ranks_explore, "LAUNCH_PROMISES", kept)
        size = Size(2, attempts=1, messages={(0, 1): 1}, launches=True)
        scope = evolve(SCOPES["exchanged-in-launches"], size=size, faults=0)
        short = {"launch": evolve(LAUNCHES["launch"], run=launch)}
        found = explore(scope, lemmas=False, instead=short)

        assert "deadlock" == found.violation
        assert "launch(rank 1)" in found.trace
        assert "transfer_launched" not in found.taken
        assert found.refused["ranks.messages-ended"] > 0
        assert "" == explore(scope, lemmas=False).violation


class TestApart:
    """A stop between a consent and its update leaves some ranks one step ahead of others."""

    @pytest.mark.ci
    def test_a_launch(self) -> None:
        """One device has updated; another stopped before its update, one step behind."""
        found = explore(SCOPES["two-launches"], lemmas=False)

        assert 4_776 == found.apart

    def test_a_launch_without_faults(self) -> None:
        """Without faults no rank stops a step behind another."""
        found = explore(evolve(SCOPES["two-launches"], faults=0), lemmas=False)

        assert ("", 0) == (found.violation, found.apart)

    @pytest.mark.slow
    def test_two_hosts(self) -> None:
        """Ranks can also stop a step apart if hosts exchange their consent."""
        assert explore(SCOPES["two-ranks"], lemmas=False).apart == 176


class TestKernel:
    @pytest.mark.parametrize(
        "name", [*KERNEL_SCOPES, pytest.param("stages-two", marks=pytest.mark.slow)]
    )
    def test_a_contract_is_what_the_protocol_takes_it_for(self, name: str) -> None:
        """Every move of the composed kernel changes the four numbers as the protocol says."""
        found = match(name=name)

        assert "" == found.difference
        assert found.commits > 10

    def test_without_reductions_it_would_not_be(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """If unreduced buckets counted as whole, the comparison would find a difference."""
        monkeypatch.setattr(kernel, "_WHOLE", ("final",))

        assert "a commit must be accepted exactly if" in match(name="stage-readers").difference

    def test_nor_if_all_were_whole(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """If every epoch counted as whole, the comparison would find a difference."""
        right = kernel.seen
        monkeypatch.setattr(kernel, "seen", lambda st: evolve(right(st), whole=True))

        assert "a commit must be accepted exactly if" in match(name="stage-epochs").difference

    @pytest.mark.slow
    def test_nor_if_an_update_in_flight_were_not_live(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Between its check and its commit, the update counts as live work."""
        monkeypatch.setattr(kernel, "_LIVE", tuple(n for n in kernel._LIVE if n != "optimizing"))

        assert "the check of an update must add live work" in match(name="stages-two").difference

    def test_a_commit_of_its_own_ends_an_update_in_flight(self) -> None:
        """If check and commit are two moves, the commit needs the check first."""
        whole, flying = RankView(0, False, False, True), RankView(0, True, False, True)
        after = RankView(1, False, False, False)

        assert "" == kernel._wrong(("commit_update",), True, None, flying, after)
        assert "an update ended without its check" in kernel._wrong(
            ("commit_update",), True, None, whole, after
        )


class TestTables:
    """One dry run of a table, as in `qeffect check`, predicts all of its interleavings."""

    @pytest.mark.parametrize(
        ("cls", "options"),
        [
            ("1F1B", {}),
            pytest.param("Interleaved1F1B", {"defer_receives": True}, marks=NEEDS_DEFERRED),
            pytest.param("InterleavedZeroBubble", {"defer_receives": True}, marks=NEEDS_DEFERRED),
            ("ZBVZeroBubble", {}),
            pytest.param("ZBVZeroBubble", {"defer_receives": True}, marks=NEEDS_DEFERRED),
        ],
    )
    def test_one_run_tells_all(self, cls: str, options: dict[str, Any]) -> None:
        """
        If the dry run blocks, every order of moves blocks in the same place; else none does.

        With buffered sends, every order of an accepted table runs to the end.
        """
        schedule = torch_schedule(cls, pp=2, microbatches=2, comms=True, **options)
        for queues in QUEUES:
            for held in RENDEZVOUS:
                transport = Transport(queues, rendezvous=held)
                found = interleavings(schedule, transport)
                stuck = bool(rendezvous(index_of(schedule, transport), transport))

                assert int(stuck) == found.stuck
                assert (found.states if stuck else 0) == found.lost
            buffered = Transport(queues)
            if not check_ranks(schedule, buffered):
                found = interleavings(schedule, buffered)
                assert (0, 0) == (found.stuck, found.lost)

    def test_a_circle(self) -> None:
        """Two ranks that each receive before they send block under every transport."""
        rows = [
            ["0F0", "2RECV_F0", "0SEND_F0", "2F0", "2B0", "2SEND_B0", "0RECV_B0", "0B0"],
            ["1RECV_F0", "1F0", "1SEND_F0", "1RECV_B0", "1B0", "1SEND_B0"],
        ]
        schedule = from_actions(rows)

        assert 0 == interleavings(schedule, Transport()).stuck
        rows[0].remove("0SEND_F0")
        rows[0].insert(rows[0].index("2B0"), "0SEND_F0")

        assert 1 == interleavings(from_actions(rows), Transport()).stuck


def test_an_open_obligation_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`qeffect ranks` counts proved obligations, names unproved ones, and reports who agrees."""
    agreement = Agreement("cvc5", 0, 2, 1, 0.5, [OPEN], {"every lemma": 1})
    analysis = SimpleNamespace(
        run_proofs=lambda **_: ProofReport([PROVED, KEPT, OPEN], agreements=[agreement]),
        SCOPES={},
        KERNEL_SCOPES=(),
    )
    monkeypatch.setattr(command, "_analysis", lambda: analysis)

    assert 1 == main(["ranks", "--cvc5", "--quiet"])
    said = capsys.readouterr().out
    assert 1 == main(["ranks", "--json", "--quiet"])
    record = json.loads(capsys.readouterr().out)

    assert "1 of 2 obligations proved, 1 unknown; 1 more need no solver" in said
    assert "cvc5, seed 0: 1 of 2 agree, 1 from every lemma" in said
    assert 2 == said.count("  unknown  start: ranks.one-name")
    assert (3, 2, 1) == (record["obligations"], record["asked"], record["unknown"])
    assert OPEN.asdict() == record["open"][0]
    assert agreement.asdict() == record["agreements"][0]


@pytest.mark.slow
def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    """`qeffect ranks` proves, explores and compares, and prints the counts."""
    assert 0 == main(["ranks", "--json", "--quiet"])
    record = json.loads(capsys.readouterr().out)

    assert ("accepted", 0, []) == (record["verdict"], record["unknown"], record["open"])
    assert list(SCOPES) == [scope["scope"] for scope in record["scopes"]]
    assert list(KERNEL_SCOPES) == [scope["scope"] for scope in record["kernel"]]


def test_a_mutant_prints_as_a_trace(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`qeffect ranks --mutants` prints what was deleted, what breaks, and the trace."""
    analysis = SimpleNamespace(
        run_proofs=lambda **_: ProofReport(),
        SCOPES={},
        explore=explore,
        KERNEL_SCOPES=(),
        match=match,
        mutants=lambda: [BY_NAME["end without cause-first"]],
        caught=caught,
    )
    monkeypatch.setattr(command, "_analysis", lambda: analysis)
    assert 0 == main(["ranks", "--mutants", "--quiet"])
    said = capsys.readouterr().out

    assert "end without cause-first: `end` does not check cause-first" in said
    assert "two-ranks: ranks.tells-the-cause" in said
    assert said.rstrip().endswith("end(rank 0)")


def test_names_are_distinct() -> None:
    """No promise, step or lemma shares its name with another."""
    hosts = (*RANK_PROMISES, *RANK_STEPS, *LEMMAS, *CONFIGURATION)
    names = [p.name for p in (*hosts, *LAUNCH_PROMISES, *LAUNCH_STEPS, *LAUNCH_LEMMAS)]

    assert len(set(names)) == len(names)
