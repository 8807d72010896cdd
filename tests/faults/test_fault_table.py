"""
The fault table: seven injections in six families; each is refused, and each guard is shown to be
needed.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable, Iterable
from importlib import import_module

import pytest

from qeffect import Refused, faults
from qeffect.cli import main
from qeffect.engine.compose import half_source
from qeffect.engine.stage import RELATIONS, transitions
from qeffect.faults import _INJECTIONS, FaultRow, run
from qeffect.spec.clauses import CLAUSES
from qeffect.spec.document import fault_rows

ROWS = {row["id"]: row for row in fault_rows()}

#: For each injection the guards that refuse it; the first guard names the clause. The others stand
#: behind it in the full composition, because they protect something of their own.
GUARDS: dict[str, list[tuple[str, str]]] = {
    "old-reference": [("ownership.require_reference", "ownership.stale-reference")],
    # A slot's own capture pool has dI before dW once.
    "repeated-dgrad": [
        ("ownership.check_dgrad_guards", "ownership.duplicate-dgrad"),
        ("capture.check_dgrad_guards", "capture.out-of-order"),
    ],
    # The epoch counts dW also for a backend without an arena.
    "missing-wgrad": [
        ("arena.finalize_guards", "arena.incomplete"),
        ("epoch.finalize_guards", "epoch.incomplete"),
    ],
    "write-after-abort": [("arena.check_wgrad_guards", "arena.spoiled")],
    "stale-cache": [("version.check_forward_guards", "version.stale-cache")],
    # A tape whose forward was committed also means that the epoch has begun.
    "checkpoint-live-tape": [
        ("persistence.checkpoint_before_order_guards", "persistence.live-tape"),
        ("persistence.checkpoint_guards", "persistence.mid-epoch"),
    ],
    "checkpoint-reduction": [
        ("persistence.checkpoint_guards", "persistence.reduction-in-flight"),
        ("persistence.checkpoint_guards", "persistence.mid-epoch"),
    ],
}


def without(guards: Iterable[tuple[str, str]]) -> dict[str, ast.FunctionDef]:
    """Halves in which the statements that refuse with these clauses are gone."""
    replaced: dict[str, ast.FunctionDef] = {}
    for half, clause in guards:
        module, name = half.split(".")
        source = replaced.get(half) or half_source(getattr(RELATIONS[module], name))
        kept = [s for s in source.body if f"'{clause}'" not in ast.unparse(s)]
        assert len(kept) == len(source.body) - 1, (
            f"expected one statement of {half} that refuses with {clause}"
        )
        replaced[half] = ast.FunctionDef(
            name=source.name,
            args=source.args,
            body=kept,
            decorator_list=[],
            lineno=1,
            col_offset=0,
        )
    return replaced


@pytest.fixture
def remove(monkeypatch: pytest.MonkeyPatch) -> Callable[[Iterable[tuple[str, str]]], None]:
    """Let every contract that is built from now on lack some guards."""

    def removed(guards: Iterable[tuple[str, str]]) -> None:
        replaced = without(guards)
        module = import_module("qeffect.contract")
        monkeypatch.setattr(module, "transitions", lambda omit=(): transitions(omit, replaced))

    return removed


def row(name: str) -> FaultRow:
    """What becomes of one injection."""
    return faults._inject(ROWS[name])


@pytest.mark.parametrize("name", ROWS)
class TestFault:
    def test_fault_is_refused_where_the_table_says(self, name: str) -> None:
        """The injection is refused at the table's transition, under the table's clause."""
        result = row(name)

        assert (ROWS[name]["clause"], ROWS[name]["transition"], True) == (
            result.clause,
            result.transition,
            result.refused,
        )

    def test_fault_changes_nothing(self, name: str) -> None:
        """The whole state is the same before and after the refused call."""
        injection = _INJECTIONS[name]()
        injection.prepare()
        before, accepted = injection.contract.snapshot(), injection.accepted
        with pytest.raises(Refused) as caught:
            injection.violate()

        assert before == injection.contract.snapshot()
        assert accepted == injection.accepted
        assert caught.value.clause == ROWS[name]["clause"]

    def test_fault_is_the_first_invalid_operation(self, name: str) -> None:
        """Everything before the injection was accepted, and there was something before it."""
        injection = _INJECTIONS[name]()
        injection.prepare()

        assert injection.accepted > 3

    def test_fault_preserves_what_the_table_says(self, name: str) -> None:
        """What was preserved is used afterwards, up to the next commit or checkpoint."""
        injection = _INJECTIONS[name]()
        injection.prepare()
        epoch = injection.contract.epoch
        with pytest.raises(Refused):
            injection.violate()
        injection.go_on()

        assert injection.contract.epoch == epoch + 1
        assert row(name).preserved == ROWS[name]["preserved"]
        assert row(name).result == ROWS[name]["result"]

    def test_fault_explains_itself(self, name: str) -> None:
        """The refusal says what was found and expected, the cause and what to do."""
        injection = _INJECTIONS[name]()
        injection.prepare()
        with pytest.raises(Refused) as caught:
            injection.violate()
        record = caught.value.record()

        assert record.found != record.expected
        assert (CLAUSES[record.clause].cause, CLAUSES[record.clause].remedy) == (
            record.cause,
            record.remedy,
        )

    def test_fault_passes_once_its_guards_are_removed(
        self, name: str, remove: Callable[[Iterable[tuple[str, str]]], None]
    ) -> None:
        """Without the listed guards the injection is accepted, and the row does not hold."""
        remove(GUARDS[name])
        injection = _INJECTIONS[name]()
        injection.prepare()
        injection.violate()
        result = row(name)

        assert (False, "", False) == (result.refused, result.clause, result.holds)

    def test_fault_needs_each_of_its_guards(
        self, name: str, remove: Callable[[Iterable[tuple[str, str]]], None]
    ) -> None:
        """The first guard gives the refusal its name; any one left still refuses."""
        for left in range(len(GUARDS[name])):
            remove(guard for place, guard in enumerate(GUARDS[name]) if place != left)
            injection = _INJECTIONS[name]()
            injection.prepare()
            with pytest.raises(Refused) as caught:
                injection.violate()

            assert caught.value.clause == GUARDS[name][left][1]


class TestFaultTable:
    def test_fault_table_has_the_papers_rows(self) -> None:
        """Seven injections in six families, in the paper's order, all refused."""
        report = run()

        assert [r["violation"] for r in fault_rows()] == [r.injection for r in report.rows]
        assert len({r.family for r in report.rows}) == 6
        assert report.verdict == "accepted"
        assert all(r.refused and r.holds for r in report.rows)

    def test_fault_report_has_the_agreed_fields(self) -> None:
        """Each row as plain data has what the command line promises."""
        plain = run().asdict()

        assert len(plain["rows"]) == 7
        for r in plain["rows"]:
            assert {
                "injection",
                "family",
                "detected_at",
                "result",
                "clause",
                "refused",
                "preserved",
            } <= r.keys()

    def test_fault_report_tells_a_contract_that_fails_to_refuse(
        self, remove: Callable[[Iterable[tuple[str, str]]], None]
    ) -> None:
        """With one guard gone the table does not hold, and says which row and why."""
        remove(GUARDS["stale-cache"])
        report = run()

        assert report.verdict == "refused"
        assert [r.injection for r in report.rows if not r.holds] == [
            ROWS["stale-cache"]["violation"]
        ]
        assert all("not preserved" in r.preserved for r in report.rows if not r.holds)
        assert all(r.result.startswith("not refused") != r.refused for r in report.rows)

    def test_fault_report_tells_a_refusal_that_came_too_early(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A refusal of the work before the injection does not count as the injection's."""

        def broken(self: faults._Injection) -> None:
            self.forward(0, 0)

        monkeypatch.setattr(_INJECTIONS["stale-cache"], "prepare", broken)
        result = row("stale-cache")

        assert (False, False, "") == (result.refused, result.holds, result.clause)
        assert "not preserved" in result.preserved

    def test_fault_report_tells_a_refusal_that_changed_the_state(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A refusal that changed the state does not count as one."""
        original = _INJECTIONS["stale-cache"].violate  # type: ignore[attr-defined]

        def leaky(self: faults._Injection) -> None:
            self.contract.submit()
            original(self)

        monkeypatch.setattr(_INJECTIONS["stale-cache"], "violate", leaky)
        result = row("stale-cache")

        assert result.clause == "version.stale-cache"
        assert (False, False) == (result.refused, result.holds)

    def test_fault_command_exits_with_none_when_all_hold(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """The command prints every row and exits with 0."""
        assert main(["faults"]) == 0
        printed = capsys.readouterr().out
        assert all(r["violation"] in printed and r["clause"] in printed for r in fault_rows())

    def test_fault_command_exits_with_one_when_a_fault_passes(
        self,
        remove: Callable[[Iterable[tuple[str, str]]], None],
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        """The command exits with 1 when an injection is accepted."""
        remove(GUARDS["write-after-abort"])

        assert main(["faults", "--json"]) == 1
        assert '"verdict": "refused"' in capsys.readouterr().out

    def test_fault_table_touches_no_device(self) -> None:
        """A fresh process runs the table without importing torch, so no CUDA context can exist."""
        program = (
            "import sys\n"
            "from qeffect.faults import run\n"
            "report = run()\n"
            "assert report.verdict == 'accepted', report\n"
            "loaded = [m for m in sys.modules if m.split('.')[0] in"
            " ('torch', 'cuda', 'numpy', 'transformer_engine', 'verification', 'gpu_runtime')]\n"
            "print(len(report.rows), loaded)\n"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)

        assert (0, "7 []\n", "") == (done.returncode, done.stdout, done.stderr)

    def test_fault_command_touches_no_device(self) -> None:
        """Nor does the command line: in a fresh process neither torch nor its CUDA is loaded."""
        program = (
            "import sys\n"
            "from qeffect.cli import main\n"
            "code = main(['faults', '--json'])\n"
            "print('torch' in sys.modules, file=sys.stderr)\n"
            "raise SystemExit(code)\n"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)

        assert (0, "False\n") == (done.returncode, done.stderr)
