"""
The lint: the relation modules pass it, and every rule fires on a module that breaks it.
"""

from __future__ import annotations

import pytest

from qeffect.engine.stage import RELATIONS
from qeffect.verification.lint import BOUNDARY, RULES, LintFinding, lint, lint_source, main

_DRAIN = "def drain_writes(st, domain):"
_RESTORE = "def restore_writes(st, epoch, incarnation):"
_HEADER = """\
STATE = {"mine": Column("stage"), "consumers": Column("slot")}
"""


def _rules(body: str, header: str = _HEADER) -> set[str]:
    return {finding.rule for finding in lint_source(header + body, "bad")}


class TestTree:
    def test_every_relation_stays_inside_what_all_readings_understand(self) -> None:
        """Every relation module uses only constructs that all readings understand."""
        assert lint() == []

    def test_every_half_is_looked_at(self) -> None:
        """The lint checks as many halves as the composition joins."""
        halves = sum(
            name.endswith(("_guards", "_writes")) for m in RELATIONS.values() for name in vars(m)
        )

        assert halves > 60

    def test_the_command_says_how_much_it_saw(self, capsys: pytest.CaptureFixture[str]) -> None:
        """``python -m qeffect.verification.lint`` exits with 0 and prints how much it checked."""
        assert main() == 0
        assert capsys.readouterr().out == f"{len(RELATIONS)} relation modules, 0 findings\n"


_BAD = {
    "is": """
def drain_writes(st, domain):
    if st.mine[domain] is None:
        st.mine[domain] = 0
""",
    "isinstance": """
def drain_guards(st, domain):
    if isinstance(st.mine[domain], int):
        raise Refused("order.token")
""",
    "try": """
def drain_writes(st, domain):
    try:
        st.mine[domain] = 0
    except KeyError:
        pass
""",
    "loop": """
def drain_writes(st, domain):
    for d in domain:
        st.mine[d] = 0
""",
    "comprehension": """
def drain_guards(st, domain):
    busy = [m for m in st.mine]
    if busy:
        raise Refused("order.token")
""",
    "lambda": """
def drain_guards(st, domain):
    f = lambda d: d
    if st.mine[domain] != f:
        raise Refused("order.token")
""",
    "attribute-write": """
def drain_writes(st, domain):
    st.mine = 0
""",
    "call": """
def drain_guards(st, domain):
    if max(st.mine[domain], 0) == 0:
        raise Refused("order.token")
""",
    "nested-call": """
def checkpoint_guards(st):
    if not st.every(st.mine, abs(0)):
        raise Refused("order.token")
""",
    "guard": """
def drain_guards(st, domain):
    st.mine[domain] = 0
""",
    "write": """
def drain_writes(st, domain):
    st.mine[domain] = 0
    if st.mine[domain] != 0:
        raise Refused("order.token")
""",
    "own-columns": """
def drain_writes(st, domain):
    st.token[domain] = 0
""",
    "column": """
def drain_guards(st, domain):
    if st.nobody[domain] != 0:
        raise Refused("order.token")
""",
    "clause-literal": """
def drain_guards(st, domain):
    if st.mine[domain] != 0:
        raise Refused(CLAUSE)
""",
    "clause": """
def drain_guards(st, domain):
    if st.mine[domain] != 0:
        raise Refused("order.no-such-clause")
""",
    "every": """
def drain_guards(st, domain):
    if not st.every(st.mine, 0):
        raise Refused("order.token")
""",
    "fill": """
def checkpoint_guards(st):
    st.fill(st.mine, 0)
""",
    "half": """
def drain_guards(st, stage):
    if st.mine[stage] != 0:
        raise Refused("order.token")
""",
    "plain": """
def drain_guards(st, domain):
    return st.mine[domain]
""",
}


class TestRules:
    def test_all_are_seeded(self) -> None:
        """For every rule, a module in this file breaks it."""
        assert set(RULES) == set(_BAD)

    @pytest.mark.parametrize("rule", sorted(_BAD))
    def test_a_half_that_breaks_a_rule_is_found_by_that_rule(self, rule: str) -> None:
        """A half that breaks a rule is found by that rule."""
        assert rule in _rules(_BAD[rule])

    def test_a_good_half(self) -> None:
        """Guards that refuse, writes to the relation's own columns, and a helper pass."""
        assert (
            _rules(
                '''
def free(st, bucket):
    """Helper."""
    st.mine[bucket] = 0


def start_reduction_guards(st, bucket, link):
    d = st.domain_of[bucket]
    if st.busy[d] != 0 or not (st.mine[bucket] & 1 == 0):
        raise Refused("order.in-flight")


def start_reduction_writes(st, bucket, link):
    left = st.mine[bucket] & ~1
    if left == 0:
        free(st, bucket)
    else:
        st.mine[bucket] = left


def checkpoint_guards(st):
    if not st.every(st.mine, 0):
        raise Refused("order.in-flight")


def restore_writes(st, epoch, incarnation):
    st.fill(st.mine, 0)
'''
            )
            == set()
        )

    @pytest.mark.parametrize(
        ("lines", "rule"),
        [
            ((_DRAIN, "    st.fill(st.token, 0)"), "own-columns"),
            ((_DRAIN, "    st.fill(st.nobody, 0)"), "column"),
            ((_DRAIN, "    other(st, domain)"), "call"),
            ((_DRAIN, "    st.mine[domain] = x if domain else 1"), "plain"),
            ((_DRAIN, "    st.mine[domain] += 1"), "plain"),
            ((_DRAIN, "    import os"), "plain"),
            ((_DRAIN, "    st.mine[domain] = other.thing"), "plain"),
            (("def drain_writes(st, domain, extra=1):", "    st.mine[domain] = 0"), "plain"),
            (("def nothing_guards(st):", "    pass"), "half"),
            (("def stray(st):", "    pass"), "half"),
            ((_DRAIN, "    while domain:", "        pass"), "loop"),
            ((_DRAIN, "    if (m := domain) == 0:", "        st.mine[domain] = m"), "plain"),
            ((_DRAIN, "    if st.every(st.mine, 0):", "        st.mine[domain] = 1"), "every"),
            ((_RESTORE, "    if st.every(st.mine, 0):", "        st.mine[0] = 1"), "every"),
            (
                ("def free(st, slot):", "    st.token[slot] = 0", _DRAIN, "    free(st, domain)"),
                "own-columns",
            ),
        ],
    )
    def test_a_rule_holds_in_expressions_and_helpers_too(
        self, lines: tuple[str, ...], rule: str
    ) -> None:
        """A rule applies to statements, expressions and helpers."""
        assert rule in _rules("\n".join(lines))

    def test_findings_name_the_place(self) -> None:
        """A finding names module, function, line, rule, source and reason in one line."""
        (finding,) = lint_source(_HEADER + _BAD["clause"], "order")

        assert finding == LintFinding(
            "clause", "order.drain_guards:5", "raise Refused('order.no-such-clause')"
        )
        assert str(finding).startswith("order.drain_guards:5: clause: ")
        assert "\n" not in str(finding)

    def test_only_the_ends_of_an_epoch_quantify_over_a_column(self) -> None:
        """Only transitions that end an epoch may quantify over a column."""
        updates = {"check_update", "commit_update", "abort_update"}
        ends = {"finalize", "start_gradients_read", "next_walk", "skip", "checkpoint", "restore"}
        assert ends | updates == BOUNDARY
