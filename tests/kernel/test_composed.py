"""
The checked-in composition is up to date, complete and readable, and every reading uses the same
object.
"""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

from qeffect import Contract, StageConfig
from qeffect.engine import composed, generate
from qeffect.engine.__main__ import main
from qeffect.engine.compose import half_name, half_source, source
from qeffect.engine.stage import RELATIONS, TRANSITIONS, transitions
from qeffect.relations import constants
from qeffect.relations import version as version_relation


class TestCurrent:
    def test_what_is_checked_in_is_what_the_relations_say(self) -> None:
        """No page differs from what ``python -m qeffect.engine`` would write now."""
        assert generate.stale() == []

    def test_the_pages_hold_every_transition_once(self) -> None:
        """Each transition stands on one page."""
        assert sorted(TRANSITIONS) == sorted(n for names in generate.PAGES.values() for n in names)

    def test_an_edited_page_is_stale(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """A page edited by hand, a missing and a superfluous one are told, and written anew."""
        monkeypatch.setattr(generate, "FOLDER", tmp_path)
        for name, text in generate.pages().items():
            (tmp_path / name).write_text(text, encoding="utf-8")
        assert main(["--check"]) == 0
        page = tmp_path / "forward.py"
        page.write_text(page.read_text().replace("st.token[d] + 1", "st.token[d] + 2"))
        (tmp_path / "dgrad.py").unlink()
        (tmp_path / "other.py").write_text("")
        capsys.readouterr()

        assert main(["--check"]) == 1
        assert "dgrad.py, forward.py, other.py" in capsys.readouterr().out
        assert main([]) == 0
        assert main(["--check"]) == 0

    def test_a_changed_relation_makes_the_page_stale(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The page follows the relations: without one write half it would read otherwise."""
        monkeypatch.delattr(version_relation, "invalidate_writes")

        assert generate.stale() == ["tapes.py"]


class TestShared:
    def test_the_full_composition_is_the_checked_in_one(self) -> None:
        """A contract that omits nothing runs the very functions of the page."""
        contract = Contract([StageConfig(0, microbatches=1, slots=1)])
        for name in TRANSITIONS:
            assert contract.transitions.functions[name] is getattr(composed, name)
            assert transitions().functions[name] is getattr(composed, name)

    def test_a_composition_shares_what_an_omission_does_not_touch(self) -> None:
        """Leaving out capture memory changes no transition in which it takes no part."""
        assert transitions({"capture"}).submit is composed.submit
        assert transitions({"capture"}).check_dgrad is not composed.check_dgrad

    @pytest.mark.parametrize("name", TRANSITIONS)
    def test_definition_leads_to_the_page(self, name: str) -> None:
        """A debugger and go-to-definition find the checked-in line."""
        function = getattr(composed, name)
        file = inspect.getsourcefile(function)

        assert file is not None
        assert Path(file).parent == generate.FOLDER
        assert source(function).startswith(f"def {name}(st")


class TestReadable:
    @pytest.mark.parametrize("name", TRANSITIONS)
    def test_every_guard_stands_under_the_half_it_comes_from(self, name: str) -> None:
        """The comment above a guard names its relation and half, and that half raises it."""
        half, found = "", 0
        for line in source(getattr(composed, name)).splitlines():
            if line.strip().startswith("# "):
                half = line.strip()[2:]
            elif "raise Refused(" in line:
                relation, function = half.split(".")
                tree = half_source(getattr(RELATIONS[relation], function))
                clause = line.split('"')[1]
                helpers = {
                    node.func.id
                    for node in ast.walk(tree)
                    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
                }
                texts = [ast.unparse(tree)] + [
                    inspect.getsource(getattr(RELATIONS[relation], helper))
                    for helper in helpers - {"Refused"}
                ]
                assert any(clause in text for text in texts), (half, clause)
                assert half_name(function) is not None
                found += 1
        tree = ast.parse(source(getattr(composed, name)))

        assert found == sum(isinstance(node, ast.Raise) for node in ast.walk(tree))

    @pytest.mark.parametrize("name", TRANSITIONS)
    def test_a_docstring_says_what_it_is_for(self, name: str) -> None:
        """Each function says when it is called, and which relations guard and write."""
        text = getattr(composed, name).__doc__ or ""

        assert "Guards: " in text
        assert "Writes: " in text

    def test_constants_are_named(self) -> None:
        """Sentinels and consumer bits stand by name; the literals left are 0, 1 and indices."""
        named = {n for n, value in vars(constants).items() if isinstance(value, int)}
        text = "\n".join(source(getattr(composed, name)) for name in TRANSITIONS)
        tree = ast.parse(text)
        literals = {
            node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, int)
        }

        assert {0, 1} == literals
        assert {"DGRAD_BIT", "WGRAD_BIT", "RESERVED", "NO_SLOT", "NEVER"} <= {
            node.id for node in ast.walk(tree) if isinstance(node, ast.Name)
        } & named


class TestHomes:
    #: Clauses that no relation's guard raises, and the module that does.
    ELSEWHERE = {
        "ownership.unknown-key": "arguments.py",
        "ownership.unknown-slot": "arguments.py",
        "persistence.configuration": "checkpoint.py",
        "epoch.uncounted": "ledgers/expected_counts.py",
        "epoch.device-count": "ledgers/expected_counts.py",
        "epoch.device-order": "ledgers/expected_counts.py",
        "arena.unknown-matrix": "process_layout.py",
        "arena.duplicate-destination": "process_layout.py",
        "arena.missing-destination": "process_layout.py",
        "arena.overlapping-destinations": "destinations.py",
        "log.chain": "log/player.py",
        "log.incarnation": "log/reader.py",
        "log.sequence": "log/player.py",
        "log.result": "log/player.py",
        "log.closing": "log/player.py",
        "log.state": "log/player.py",
        "log.step": "log/step_replay.py",
    }

    def raised(self, path: Path) -> set[str]:
        """Clauses that a module's source raises."""
        tree = ast.parse(path.read_text(encoding="utf-8"))
        return {
            argument.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name | ast.Attribute)
            and getattr(node.func, "id", getattr(node.func, "attr", "")).lstrip("_")
            in ("Refused", "refused", "Violation", "RepeatError")
            for argument in node.args[:1]
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
        }

    @pytest.mark.parametrize("relation", RELATIONS)
    def test_a_relation_raises_its_own_clauses_only(self, relation: str) -> None:
        """Every refusal in a relation's module has the relation's prefix; tickets refuses none."""
        file = inspect.getsourcefile(RELATIONS[relation])
        assert file is not None

        raising = {relation} - {"tickets"}
        assert {clause.partition(".")[0] for clause in self.raised(Path(file))} == raising

    def test_every_clause_has_one_home(self) -> None:
        """A clause is raised in its relation's module, or where this test says."""
        from qeffect.spec.clauses import CLAUSES

        root = Path(generate.__file__).parents[1]
        for clause in (c for c in CLAUSES if not c.startswith("schedule.")):
            relation = clause.partition(".")[0]
            home = self.ELSEWHERE.get(clause, f"relations/{relation}.py")
            assert clause in self.raised(root / home), clause
