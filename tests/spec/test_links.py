"""
The contract links each clause to its code, its tests and its promises, and each promise to the
functions and lemmas that prove it.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from qeffect import spec
from qeffect.spec.clauses import CLAUSES, SCHEDULE_CLAUSES
from qeffect.spec.document import contract
from qeffect.spec.launches import LAUNCH_PROMISES, LAUNCH_STEPS
from qeffect.spec.predicates import Predicate
from qeffect.spec.promises import CHANGES, LEGAL, MEMORY, STEPS, WORLD
from qeffect.spec.ranks import RANK_PROMISES, RANK_STEPS
from qeffect.spec.recorded import STEP_PROMISES
from tests.docs.links import anchors, broken

#: The folder whose page is checked, without the links through which the package finds it.
FOLDER = Path(spec.__file__).resolve().parent
TEXT = contract()
REGISTERS = (MEMORY, WORLD, STEPS, CHANGES, LEGAL)
PROMISES = [promise for register in REGISTERS for promise in register]
OF_RANKS = (RANK_PROMISES, RANK_STEPS, LAUNCH_PROMISES, LAUNCH_STEPS)
PROVED = [*PROMISES, *(promise for register in OF_RANKS for promise in register)]


def lines_of(clause: str) -> list[str]:
    """The lines of a clause's entry that say where its code, promises and tests are."""
    entry = TEXT.partition(f"\n`{clause}` (")[2].partition("\n#")[0]
    lines = re.findall(r"^- \*(?:Checked|Raised|Also raised|Mutation|Shown) .*$", entry, re.M)
    assert len(lines) >= 3, clause
    return lines


def entry_of(promise: str) -> str:
    """The line of a promise."""
    anchor = f'<a id="promise-{promise}"></a>'
    (line,) = re.findall(rf"^- {re.escape(anchor)}`{re.escape(promise)}`.*$", TEXT, re.M)
    return str(line)


def test_every_link_of_the_contract_resolves() -> None:
    """Each leads to a file, heading or entry, and a named symbol is in the linked file."""
    assert [] == broken(TEXT, FOLDER)


def test_each_entry_has_an_anchor_of_its_own() -> None:
    """No two entries share an anchor, and every promise has one."""
    found = Counter(anchors(TEXT))

    assert {1} == {*found.values()}
    names = {promise.name for promise in (*PROVED, *STEP_PROMISES)}
    assert {f"promise-{name}" for name in names} <= found.keys()


@pytest.mark.parametrize("clause", [*CLAUSES, *SCHEDULE_CLAUSES])
def test_a_clause_leads_to_its_code_its_tests_and_its_promises(clause: str) -> None:
    """In its entry every file and every promise is a link; so is every transition."""
    promised = {promise.name for promise in PROMISES}
    for line in lines_of(clause):
        bare = re.findall(r"`([^`]+)`", re.sub(r"\[`[^`]*`\]\([^)]*\)", "", line))
        assert [] == [code for code in bare if code in promised or ".py" in code]
        for code, target in re.findall(r"\[`([^`]+)`\]\(([^)]*)\)", line):
            if target.startswith("#promise-"):
                assert f"#promise-{code}" == target
            elif target.startswith("../") and code.endswith(".py"):
                assert target.endswith(f"/{code}")
        if line.startswith("- *Checked by*"):
            said = re.split(r"[;.]( |$)", re.sub(r"\]\([^)]*\)", "]", line))[0]
            names = re.findall(r"(?<!\[)`(\w+)`", said)
            assert {*names} <= {"configure"}, "only the configuration is no function"


@pytest.mark.parametrize("promise", PROVED, ids=lambda promise: promise.name)
def test_a_promise_leads_to_its_proof(promise: Predicate) -> None:
    """
    Its entry names the functions that make its obligations, each with a link to its module, and
    the command that proves it alone, unless it is about several ranks. A condition of a legal check
    is not proved, but used.
    """
    entry = entry_of(promise.name)
    how = "Used by" if promise.name in {legal.name for legal in LEGAL} else "Proved by"
    _, found, proof = entry.partition(f" *{how}* ")

    assert found
    made = r"`\w+` in \[`(?:proofs|ranks)/\w+\.py`\]\(\.\./verification/\w+/\w+\.py\) \([a-z, :]+\)"
    assert re.match(rf"{made}(?:; {made})*\.", proof)
    repeated = f" *Repeated by* `qeffect prove --promise {promise.name}`."
    of_ranks = promise.name.startswith(("ranks.", "launches."))
    assert proof.endswith(repeated) == (how == "Proved by" and not of_ranks)


def test_the_proved_promise_of_a_step_leads_to_its_proof() -> None:
    """Tests alone show the other promises of a step."""
    proved = [p.name for p in STEP_PROMISES if " *Proved by* " in entry_of(p.name)]

    assert [p.name for p in STEP_PROMISES if p.proof] == proved


@pytest.mark.parametrize(
    ("there", "instead", "lost"),
    [
        ("(../qeffect/relations/order.py)", "(../qeffect/relations/gone.py)", "gone.py"),
        ("(../tests/kernel/test_grouped.py)", "(../tests/kernel/test_gone.py)", "test_gone.py"),
        ('<a id="promise-order.one-set-of-scales">', "", "#promise-order.one-set-of-scales"),
        ("`group_wgrad_guards` in", "`group_gone_guards` in", "group_gone_guards in ../qeffect"),
        ("[`group_wgrad`](", "[`group_gone`](", "group_gone in ../qeffect/engine/composed"),
        ("`order.scaled-by` in", "`order.gone` in", "order.gone in ../verification/induction"),
        ("`obligations` in", "`gone` in", "gone in ../verification/proofs"),
    ],
)
def test_a_link_that_does_not_resolve_is_found(there: str, instead: str, lost: str) -> None:
    """A file, an anchor or a symbol that is gone is named."""
    assert there in TEXT
    found = broken(TEXT.replace(there, instead), FOLDER)

    assert found
    assert all(lost in one for one in found)
