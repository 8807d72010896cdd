"""
Device counts over every short history: these calls have no proof, so all of them are tried.

The ledger of counts is separate from the composed transitions. Its counts are compared with the
sums of an oracle over the list of committed actions, and with the columns that the proved
transitions write. The ledger must refuse exactly if two lists differ. Each of its refusals and
updates is then deleted in turn; the comparisons must notice each deletion.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from itertools import product
from typing import Any, Final

import pytest

from qeffect import Contract, DeviceCounts, Refused, StageConfig, TapeKey, TapeRef
from qeffect.counts import COUNTED, MULTIPLIER, advance, fold, mark
from qeffect.ledgers import expected_counts as module
from qeffect.ledgers.expected_counts import ExpectedCounts
from qeffect.relations.constants import ADDS, OVERWRITES

#: An action that ran: its kind, its stage, its slot or, for a refresh, its stage again, and how it
#: writes.
Ran = tuple[str, int, int, int]
#: A move of a history: what is done, on which stage and microbatch.
Move = tuple[str, int, int]

WORD: Final = 1 << 64


def counts(stages: Sequence[int], ran: Sequence[Ran]) -> DeviceCounts:
    """
    Count a list of actions as a device does, each place of a digest on its own.

    A mark followed by n actions is multiplied n times; all are added, modulo 2**64.
    """
    marks = [mark(action, place, writes) for action, _, place, writes in ran]
    total = sum(n * pow(MULTIPLIER, at, WORD) for at, n in enumerate(reversed(marks))) % WORD
    numbers = {s: tuple(sum(r[:2] == (a, s) for r in ran) for a in COUNTED) for s in stages}
    return DeviceCounts(total - WORD if total >= WORD // 2 else total, numbers)


# Every order of an epoch's actions


class Process:
    """
    A contract that counts, and the list of what was committed on it.

    Args:
        stages: Its stages.
        omit: Relations that are left out.
    """

    def __init__(self, stages: Sequence[StageConfig], omit: Sequence[str]) -> None:
        self.contract = Contract(stages, omit=omit, counted=True)
        self.base = self.contract.checkpoint()
        self.refs: dict[TapeKey, TapeRef] = {}
        self.ran: list[Ran] = []
        self.opened: dict[int, int] = {}
        self.domains: dict[Any, list[int]] = {}
        for config in stages:
            self.domains.setdefault(config.domain, []).append(config.stage)

    def expected(self) -> dict[Any, DeviceCounts]:
        """What a device that ran the list has counted."""
        return {
            domain: counts(stages, [r for r in self.ran if r[1] in stages])
            for domain, stages in self.domains.items()
        }

    def make(self, move: str, s: int, m: int) -> None:
        """
        Make a move: an action, an action that fails, or the end of the epoch.

        Raises:
            Refused: It cannot be made here.
        """
        if move == "end":
            self._end()
            return
        contract, action = self.contract, move.split()[-1]
        config = next(c for c in contract.stages if c.stage == s)
        link, key = contract.link("main", config.domain), TapeKey(contract.epoch, s, m)
        contract.wait(link)
        evidence: tuple[str, ...] = config.matrices
        if action == "refresh":
            ticket, place = contract.check_refresh(s, link), s
        elif action == "F":
            ticket = contract.check_forward(key, link=link)
            place = ticket.slot
        else:
            ref = self.refs[key]
            place = ref.slot
            if action == "dI":
                contract.bind(key)
                ticket = contract.check_dgrad(key, ref, link=link)
            else:
                ticket = contract.check_wgrad(key, ref, link=link)
        if move.startswith("failed"):
            contract.abort(ticket)
            return
        made = contract.commit(ticket, evidence if action in ("dI", "dW") else ())
        if made is not None:
            self.refs[key] = made
        # The microbatches of a stage have one destination: the epoch's first dW overwrites it.
        opens = action != "dW" or self.opened.get(s) != contract.epoch
        if action == "dW":
            self.opened[s] = contract.epoch
        self.ran.append((action, s, place, OVERWRITES if opens else ADDS))

    def _end(self) -> None:
        for config in self.contract.stages:
            link = self.contract.link("main", config.domain)
            self.contract.wait(link)
            self.contract.finalize(config.stage, link)
        self.contract.commit_epoch(counted=self.expected())
        for domain in self.domains:
            self.contract.join(self.contract.link("main", domain))

    def back(self) -> None:
        """Restore the beginning."""
        self.contract.drain()
        self.contract.restore(self.base)
        self.ran.clear()
        self.opened.clear()

    def difference(self) -> str:
        """Say where the ledger differs from the list, or from the proved columns; else nothing."""
        own, st = self.contract.committed_counts(), self.contract.memory
        if own != self.expected():
            return f"{own} is not {self.expected()}"
        ordered = "order" in self.contract.transitions.relations
        for stages in self.domains.values():
            of = next(d for d in self.domains if self.domains[d] == stages)
            for s in stages:
                _, forwards, dgrads, wgrads = own[of].stages[s]
                before = st.cells[s] * st.weight_epoch[s]
                if wgrads != before + st.wgrads[s]:
                    return f"stage {s}: {wgrads} dW are not those of the columns"
                if ordered and (forwards, dgrads) != (
                    before + st.forwards[s],
                    before + st.dgrads[s],
                ):
                    return f"stage {s}: {forwards} F and {dgrads} dI are not those of the columns"
            updates = sum(sum(own[of].stages[s][1:3]) for s in stages)
            if ordered and updates != st.token[st.domain_of[stages[0]]]:
                return f"domain {of}: {updates} F and dI, of which the token counts another number"
        return ""


def orders(*chains: Sequence[Move]) -> Iterator[list[Move]]:
    """Yield every order of some moves that keeps each chain's own."""
    if not any(chains):
        yield []
    for number, chain in enumerate(chains):
        if chain:
            rest = [*chains[:number], chain[1:], *chains[number + 1 :]]
            yield from ([chain[0], *order] for order in orders(*rest))


def epoch_of(stages: Sequence[StageConfig]) -> Iterator[list[Move]]:
    """Yield every order of an epoch: F, dI, dW per microbatch; microbatch 0 also refreshes."""
    found = []
    for config in stages:
        for m in range(config.microbatches):
            first = [("refresh", config.stage, 0)] if m == 0 else []
            found.append([*first, *((kind, config.stage, m) for kind in ("F", "dI", "dW"))])
    yield from orders(*found)


def small(stage: int, **options: Any) -> StageConfig:
    """A stage of one microbatch, one slot and one matrix, unless said otherwise."""
    return StageConfig(
        stage, **{"microbatches": 1, "slots": 1, "matrices": (f"w{stage}",), **options}
    )


#: Stages, what they leave out, and how many orders are legal: behind the refresh one microbatch
#: after the other, or each order of three and three; of two stages in one domain those in which
#: nothing but the other's dW comes between a refresh and its F; of two domains each order of four
#: and four.
CASES: Final = [
    pytest.param([small(0, microbatches=2)], (), 2, id="one slot"),
    pytest.param([small(0, microbatches=2, slots=2)], (), 20, id="two slots"),
    pytest.param([small(0, microbatches=2, slots=2)], ("order",), 20, id="without order"),
    pytest.param([small(0), small(1)], (), 22, id="two stages of a domain"),
    pytest.param([small(0, domain="a"), small(1, domain="b")], (), 70, id="two domains"),
]


@pytest.mark.parametrize(("stages", "omit", "legal"), CASES)
def test_the_ledger_says_what_was_committed(
    stages: list[StageConfig], omit: tuple[str, ...], legal: int
) -> None:
    """In every order of two epochs, the ledger agrees with list and columns after each action."""
    whole = 0
    for order in epoch_of(stages):
        process = Process(stages, omit)
        try:
            for move in (*order, ("end", 0, 0)) * 2:
                process.make(*move)
                assert "" == process.difference(), (order, move)
        except Refused:
            continue
        whole += 1

    assert legal == whole


@pytest.mark.parametrize(("stages", "omit", "legal"), CASES)
def test_what_failed_is_not_counted(
    stages: list[StageConfig], omit: tuple[str, ...], legal: int
) -> None:
    """After a failed action the ledger has the actions before it; after a restore it is empty."""
    seen: set[tuple[Move, ...]] = set()
    for order in epoch_of(stages):
        for number, (kind, s, m) in enumerate(order):
            path = (*order[:number], (f"failed {kind}", s, m))
            if path in seen:
                continue
            process = Process(stages, omit)
            try:
                for move in path:
                    process.make(*move)
            except Refused:
                break
            seen.add(path)
            assert "" == process.difference(), path
            process.back()
            assert "" == process.difference(), path

    assert len(seen) > legal


# Every pair of short lists, and every short life of a ledger


def difference(
    committed: Sequence[Ran], ran: Sequence[Ran], stages: Mapping[Any, Sequence[int]]
) -> str:
    """The clause by which a commit must be refused, with what it must name; empty for none."""
    for own in stages.values():
        for s, kind in product(own, COUNTED):
            ours, theirs = (sum(r[:2] == (kind, s) for r in x) for x in (committed, ran))
            if ours != theirs:
                return f"epoch.device-count: stage {s}: the device ran {theirs} {kind}"
    for own in stages.values():
        if [r for r in committed if r[1] in own] != [r for r in ran if r[1] in own]:
            return "epoch.device-order: digest"
    return ""


def answer(ledger: Any, call: str, counted: Any, *, now: bool = False) -> str:
    """A ledger's answer: the clause and the beginning of the finding; empty if accepted."""
    try:
        getattr(ledger, call)(counted, **({"now": True} if now else {}))
    except Refused as refused:
        found = refused.record().found or ""
        return f"{refused.clause}: {found.split(' of the order')[0].split(' digest')[0]}"
    return ""


def short(length: int, alphabet: Sequence[Ran]) -> Iterator[tuple[Ran, ...]]:
    """Every list of at most this many actions."""
    for n in range(length + 1):
        yield from product(alphabet, repeat=n)


#: Three slots: two of stage 0, one of stage 1; stages of one domain, or of two.
SLOT_STAGE: Final = (0, 0, 1)
ALPHABET: Final[tuple[Ran, ...]] = (
    ("refresh", 0, 0, OVERWRITES),
    ("F", 0, 0, OVERWRITES),
    ("dW", 0, 1, ADDS),
    ("dW", 0, 1, OVERWRITES),
    ("F", 1, 2, OVERWRITES),
)


def tell(ledger: ExpectedCounts, *each: Ran) -> None:
    """Report committed actions to a ledger."""
    for action, _, place, writes in each:
        if action == "dW":
            ledger.writes[place] = writes, 0
        ledger.ran(action, place)


def misjudged(ledger: type[ExpectedCounts], length: int) -> str:
    """Return a pair of short lists on which the ledger and the oracle disagree; empty if none."""
    for stages in ({"a": (0, 1)}, {"a": (0,), "b": (1,)}):
        domains = {s: d for d, own in stages.items() for s in own}
        device = [
            (ran, {d: counts(own, [r for r in ran if r[1] in own]) for d, own in stages.items()})
            for ran in short(length, ALPHABET)
        ]
        for committed in short(length, ALPHABET):
            made = ledger(domains, SLOT_STAGE)
            tell(made, *committed)
            if answer(made, "require_commit", None) != "epoch.uncounted: no counts":
                return f"{committed} committed, nothing presented"
            for ran, given in device:
                found = answer(made, "require_commit", given)
                wanted = difference(committed, ran, stages)
                if not found.startswith(wanted) or bool(found) != bool(wanted):
                    return f"{committed} committed, {ran} ran: {found!r}, expected {wanted!r}"
    return ""


def misadded(ledger: type[ExpectedCounts], length: int) -> str:
    """Return a list that counts differently as a whole than action by action; empty if none."""
    lists = [*short(length, ALPHABET)]
    for domains in ({0: "a", 1: "a"}, {0: "a", 1: "b"}):
        for before, ran in product(lists, lists):
            one, each, again = (ledger(domains, SLOT_STAGE) for _ in range(3))
            tell(one, *before)
            tell(each, *before, *ran)
            tell(again, *ran)
            folds, added = {}, {}
            for domain, now in again.own().items():
                numbers = [n for own in now.stages.values() for n in own]
                factors, terms = advance([0] * (1 + len(numbers)), [now.digest, *numbers])
                folds[domain] = factors[0], terms[0]
                added.update(now.stages)
            one.ran_step(folds, added)
            if one.own() != each.own():
                return f"{ran} behind {before}"
    return ""


#: What may befall a ledger whose counts come late.
LIFE: Final = (
    "runs",
    "commits",
    "saves",
    "asks, right",
    "asks, wrong",
    "presents right",
    "presents wrong",
    "restores",
)


def mislived(ledger: type[ExpectedCounts], length: int) -> str:
    """Return a short history on which a late ledger and the oracle disagree; empty if none."""
    for life in product(LIFE, repeat=length):
        made, ran, awaited = ledger({0: "a"}, (0,), late=True), 0, None
        for event in life:
            right = {
                "a": counts((0,), [("F", 0, 0, OVERWRITES)] * (ran if awaited is None else awaited))
            }
            wrong = {"a": DeviceCounts(0, {0: (9, 9, 9, 9)})}
            wanted = ""
            if event == "runs":
                made.ran("F", 0)
                ran += 1
                found = ""
            elif event == "commits":
                found = answer(made, "require_commit", None)
                wanted = "" if awaited is None else "epoch.uncounted"
                if awaited is None:
                    made.committed()
                    awaited = ran
            elif event.startswith("asks"):
                now = (
                    {"a": counts((0,), [("F", 0, 0, OVERWRITES)] * ran)}
                    if event == "asks, right"
                    else wrong
                )
                found = answer(made, "require_commit", now, now=True)
                wanted = "" if awaited is None else "epoch.uncounted"
                wanted = "epoch.device-count" if now is wrong else wanted
            elif event == "saves":
                found = answer(made, "require_compared", "checkpoint")
                wanted = "" if awaited is None else "epoch.uncounted"
            elif event == "restores":
                made.reset()
                found, ran, awaited = "", 0, None
            elif awaited is None:
                continue
            elif event == "presents right":
                found, awaited = answer(made, "present", right), None
            else:
                found, wanted = answer(made, "present", wrong), "epoch.device-count"
            if not found.startswith(wanted) or bool(found) != bool(wanted):
                return f"{life}: {event} gives {found!r}, expected {wanted!r}"
            if made.awaited != (None if awaited is None else {"a": right["a"]}) and (
                awaited is None or event != "commits"
            ):
                return f"{life}: {event} leaves {made.awaited} awaited"
    return ""


def test_a_commit_is_refused_exactly_where_the_lists_differ() -> None:
    """For any two lists of up to three actions, in one domain and in two, the clause is right."""
    assert "" == misjudged(ExpectedCounts, 3)


def test_a_list_that_is_told_at_once_counts_as_one_by_one() -> None:
    """After any other list, in one domain and in two."""
    assert "" == misadded(ExpectedCounts, 2)


def test_late_counts_are_awaited_exactly_between_commit_and_comparison() -> None:
    """In every history of four events: no commit or checkpoint before the counts agree."""
    assert "" == mislived(ExpectedCounts, 4)


# That they can fail


def _broken() -> Iterator[tuple[str, type[ExpectedCounts]]]:
    """Yield ledgers without one refusal, or without one update of their state."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(ExpectedCounts)))
    lines = [
        node
        for node in ast.walk(tree)
        if (isinstance(node, ast.Raise) and "refused(" in ast.unparse(node))
        or isinstance(node, ast.AugAssign)
        or (isinstance(node, ast.Assign) and "_digests[domain]" in ast.unparse(node.targets[0]))
        or (isinstance(node, ast.Assign) and "_numbers[stage]" in ast.unparse(node.targets[0]))
        or (isinstance(node, ast.Assign) and "self.awaited" in ast.unparse(node.targets[0]))
        or (isinstance(node, ast.Expr) and "self._require" in ast.unparse(node))
        or (isinstance(node, ast.Expr) and "self.require_compared" in ast.unparse(node))
    ]
    places = [number for number, node in enumerate(ast.walk(tree)) if node in lines]
    for place in places:
        copy = deepcopy(tree)
        line = [*ast.walk(copy)][place]
        for parent in ast.walk(copy):
            for name in ("body", "orelse"):
                body = getattr(parent, name, None)
                if isinstance(body, list) and line in body:
                    body[body.index(line)] = ast.Pass()
        space = dict(vars(module))
        exec(compile(ast.fix_missing_locations(copy), f"without {place}", "exec"), space)
        yield ast.unparse(line).splitlines()[0], space["ExpectedCounts"]


def test_a_ledger_that_lacks_a_line_is_found_out() -> None:
    """Each refusal and each update, deleted from the ledger, is noticed."""
    broken = list(_broken())

    assert 15 == len(broken)
    for line, ledger in broken:
        try:
            noticed = misjudged(ledger, 2) or mislived(ledger, 4) or misadded(ledger, 1)
        except (TypeError, ValueError) as error:
            noticed = str(error)
        assert noticed, line


# What a digest cannot miss


def twos(number: int) -> int:
    """How often a number can be halved."""
    return (number & -number).bit_length() - 1


def test_no_two_short_lists_have_one_digest() -> None:
    """All lists of up to five of nine marks with the same length have different digests."""
    digests = {0}
    for length in range(1, 6):
        digests = {fold(digest, number) for digest in digests for number in range(1, 10)}

        assert 9**length == len(digests)


def test_two_exchanged_are_always_seen() -> None:
    """
    Two swapped actions change the digest, whatever ran between them.

    Marks a and b that stand k actions apart change it by (a - b)(M^k - 1) times a power of the odd
    M. M is 1 modulo 4, so that M^k - 1 has two factors 2 and those of k (lifting the exponent), and
    64 of them want a - b or k beyond a billion.
    """
    assert (1, 2) == (MULTIPLIER % 4, twos(MULTIPLIER - 1))
    for k in [*range(1, 2000), *(1 << n for n in range(11, 40))]:
        assert 2 + twos(k) == twos(pow(MULTIPLIER, k, 1 << 80) - 1)
    apart = 1 << 30
    assert twos(apart) + 2 + twos(apart) < 64
