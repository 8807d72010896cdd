"""
The pytest plugin: check schedules and contracts in a project's own tests.

Installing QEffect gives pytest two fixtures and an option. The rest of QEffect is imported only
when a test uses one of the fixtures, or when the option is given.

* ``check_schedule(schedule)`` checks a table and fails the test with the refused entry.
* ``guarded_contract(stages)`` makes a contract. A ticket (an action's reservation) that is still
  open at the test's end is a failure.
* ``--qeffect-report FILE`` writes the verdict of every check and contract of the run as JSON.

>>> def test_our_schedule(check_schedule):
...     check_schedule("schedules/ours.csv")
...     check_schedule("schedules/broken.csv", refused="schedule.message-order")
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .contract import Contract, Ticket
    from .log.recorder import Recorder
    from .schedule.actions import Schedule
    from .schedule.check import Verdict

__all__ = ["check_schedule", "guarded_contract"]

#: The name of an entry among a report's properties.
_PROPERTY = "qeffect"
_OPTION = "--qeffect-report"
#: Events of a contract's log that a failure shows.
_SHOWN = 12


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option ``--qeffect-report``."""
    parser.getgroup("qeffect", "schedules and contracts").addoption(
        _OPTION,
        metavar="FILE",
        help="JSON file for the results of check_schedule and guarded_contract in each test",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the collector of the tests' results, in the process that writes the report."""
    file = config.getoption(_OPTION)
    if file is not None and not hasattr(config, "workerinput"):
        from pathlib import Path

        from .report import UnusableError, require_place

        path = Path(file).absolute()
        try:
            require_place(path, _OPTION)
        except UnusableError as error:
            raise pytest.UsageError(str(error)) from None
        config.pluginmanager.register(_Report(path), "qeffect report")


class _Report:
    """Writes the results of all tests of a run, including those that xdist workers send."""

    def __init__(self, path: Any) -> None:
        self.path = path
        self.found: list[dict[str, Any]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take a test's records when the test has ended."""
        if report.when == "teardown":
            for name, record in report.user_properties:
                if name == _PROPERTY and isinstance(record, dict):
                    self.found.append({"test": report.nodeid, **record})

    def pytest_sessionfinish(self) -> None:
        """Write the report."""
        from importlib.metadata import PackageNotFoundError, version

        from .report import write_json

        try:
            number = version("qeffect")
        except PackageNotFoundError:
            number = "not installed"
        write_json(
            self.path,
            {
                "qeffect": number,
                "schedules": [one for one in self.found if one["kind"] == "schedule"],
                "contracts": [one for one in self.found if one["kind"] == "contract"],
            },
        )

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print one line: how much was checked, and where the report is."""
        kinds = [one["kind"] for one in self.found]
        terminalreporter.write_line(
            f"qeffect: {kinds.count('schedule')} schedules and {kinds.count('contract')} contracts "
            f"checked; {self.path}"
        )


def _record(request: pytest.FixtureRequest, record: dict[str, Any]) -> None:
    if request.config.getoption(_OPTION) is not None:
        request.node.user_properties.append((_PROPERTY, record))


@pytest.fixture
def check_schedule(request: pytest.FixtureRequest) -> Callable[..., Verdict]:
    """
    Return a function that checks a schedule, and fails the test if `qeffect check` would refuse it.

    The function takes the path of a table, rows of entries, a Schedule of qeffect.schedule, or a
    schedule object of torch. The keyword argument ``refused`` names the clause that must refuse the
    schedule; by default the schedule must be accepted. All other keyword arguments are those of
    `qeffect.schedule.check.check`. The function returns the verdict.
    """

    def run(schedule: Any, *, refused: str | None = None, **options: Any) -> Verdict:
        __tracebackhide__ = True
        from .schedule.actions import ScheduleError
        from .schedule.check import check

        known = None
        try:
            _require_clause(refused)
            known = _read(schedule, request.node.name)
            verdict = check(schedule if known is None else known, **options)
        except ScheduleError as error:
            pytest.fail(f"check_schedule: {error}", pytrace=False)
        record = verdict.record()
        names = ("source", "verdict", "clause", "rank", "step", "action")
        _record(
            request,
            {"kind": "schedule", "expected": refused, **{name: record[name] for name in names}},
        )
        if verdict.clause != refused:
            pytest.fail(_words(verdict, known, refused), pytrace=False)
        return verdict

    return run


def _require_clause(clause: str | None) -> None:
    from qeffect.spec.clauses import CLAUSES, SCHEDULE_CLAUSES

    from .schedule.actions import ScheduleError
    from .text import near

    known = {**CLAUSES, **SCHEDULE_CLAUSES}
    if clause is not None and clause not in known:
        raise ScheduleError(f"refused={clause!r} is not a clause{near(str(clause), known)}")


def _read(given: Any, name: str) -> Schedule | None:
    """Return a schedule; None for an object of torch, which the checker reads itself."""
    from collections.abc import Mapping
    from os import PathLike, fspath

    from .schedule.actions import Schedule
    from .schedule.infer import from_actions
    from .schedule.tables import read_table

    if isinstance(given, Schedule):
        return given
    if isinstance(given, str | PathLike):
        return read_table(fspath(given))
    if isinstance(given, list | tuple | Mapping):
        return from_actions(given, source=name)
    return None


def _words(verdict: Verdict, schedule: Schedule | None, refused: str | None) -> str:
    found = verdict.finding
    if found is None:
        return f"{verdict.source}: expected a refusal by {refused}, but the schedule was accepted"
    lines = [] if refused is None else [f"{verdict.source}: expected a refusal by {refused}"]
    lines.append(f"{verdict.source}: {found}")
    if schedule is not None:
        from .schedule.grid import grid

        lines.append(grid(schedule, found, context=4))
    lines += [f"expected: {found.expected}", f"found:    {found.found}", f"do: {found.remedy}"]
    return "\n".join(lines)


def _named(ticket: Ticket) -> str:
    if ticket.key is None:
        return f"{ticket.action} of {ticket.slot}"
    return f"{ticket.action} of stage {ticket.key.stage}, microbatch {ticket.key.microbatch}"


@pytest.fixture
def guarded_contract(request: pytest.FixtureRequest) -> Iterator[Callable[..., Contract]]:
    """
    Return a function that makes contracts; its arguments are those of `qeffect.Contract`.

    Each contract records its event log; a failing test shows the last events. If a ticket (an
    action's reservation) is still open at the end of the test, neither committed nor aborted, the
    test fails.
    """
    made: list[tuple[Contract, Recorder]] = []

    def make(*stages: Any, **options: Any) -> Contract:
        from .contract import Contract
        from .log.recorder import Recorder

        contract = Contract(*stages, **options)
        made.append((contract, Recorder(contract)))
        return contract

    yield make
    left: list[str] = []
    for number, (contract, log) in enumerate(made):
        open_tickets = [_named(ticket) for ticket in contract.outstanding()]
        _record(
            request,
            {
                "kind": "contract",
                "stages": len(contract.stages),
                "epoch": contract.epoch,
                "events": len(log.lines) - 1,
                "open": open_tickets,
            },
        )
        shown = "\n".join(line.strip() for line in log.lines[1:][-_SHOWN:]) or "no event"
        request.node.add_report_section("call", f"qeffect contract {number}", shown)
        left += [f"contract {number}: {ticket}" for ticket in open_tickets]
    if left:
        pytest.fail(
            "guarded_contract: tickets neither committed nor aborted: " + "; ".join(left),
            pytrace=False,
        )
