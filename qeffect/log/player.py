"""
The implementation of ``qeffect.log.replayer``: it hashes, parses and applies a log line by line.

Fast code handles valid lines, and only notices that a line is wrong. Slower code then examines the
wrong line again and finds the error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from hashlib import blake2b
from typing import Any, Final, NoReturn

from qeffect.spec.clauses import CLAUSES

from ..contract import Contract
from ..explain import explain
from ..refusals import Refused
from ..text import counted, shown, within
from .checker import LogError, check_closing, check_event, check_header, parse
from .format import (
    COLUMNS_ADDED,
    COLUMNS_OF_FIRST,
    COLUMNS_SINCE_FIRST,
    COLUMNS_SINCE_SECOND,
    DIGEST_BYTES,
    FIRST,
    KEPT_BEFORE_MOVES,
    KEPT_BEFORE_SKIPS,
    OF_STAGE_IN_FIRST,
    SECOND,
    SINCE_SECOND,
    VERSION,
    compact,
    fingerprints,
    header_of,
    rebuild,
    upgraded,
    upgraded_header,
    upgraded_header_of_second,
)
from .reader import Converters
from .rotation import CONTINUES, check_continues, differing, load_columns
from .step_replay import RepeatError, StepReplay

__all__ = ["MAX_LINE", "Player", "Violation"]

#: Longest line that is read; a header with thousands of destinations fits.
MAX_LINE: Final = 1 << 24
_BEGIN: Final = b'{"qeffect":"event-log",'
_MARK: Final = b',"digest":"'
_TAIL: Final = b'"}\n'
_END: Final = len(_MARK) + 2 * DIGEST_BYTES + len(_TAIL)
#: Transitions in a line of the second version that this version writes in another way, or that the
#: second version lacks.
_CHANGED: Final = re.compile(
    rb'"transition":"(?:commit_epoch|%s)"' % b"|".join(sorted(n.encode() for n in SINCE_SECOND))
)
_SEALED: Final = re.compile(rb',"digest":"[0-9a-f]{16}"}\n')
#: Exceptions of the functions that read or apply a line, if the line has the wrong shape.
_STUMBLES: Final = (KeyError, IndexError, TypeError, ValueError, AttributeError, RecursionError)
#: The same for a header, plus the exceptions that a lack of memory or a huge number causes.
_TOO_MUCH: Final = (*_STUMBLES, MemoryError, OverflowError)


class Violation(Exception):  # noqa: N818 - it ends a replay with a report
    """
    The refusal of a well-formed line.

    Args:
        clause: The id of the violated clause, such as `log.chain`.
        line: Number of the line in its file, from 1.
        field: The field of the line that most likely shows the error.
        found: The value in the line, escaped and shortened.
        expected: The expected value, escaped and shortened.
        action: The transition (contract call) of the refused line; None if the line records no
            transition.
    """

    def __init__(
        self,
        clause: str,
        line: int,
        field: str,
        found: str,
        expected: str,
        action: str | None = None,
    ) -> None:
        super().__init__(clause, line, field)
        self.clause, self.line, self.field = clause, line, field
        self.found, self.expected, self.action = within(found), within(expected), action


class Player:
    """
    One replay of one log.

    Args:
        name: The log's name in error messages.
        before: The finished replay of the file before this one. If None, and this file is not the
            first of its log, the state at the beginning of this file is taken on trust.

    Attributes:
        events: Number of events accepted so far, including the events of earlier files.
        part: Number of this file in its log.
        since: Number of events before this file.
        began: Weight epoch at the beginning of this file.
        rank: The rank in the header.
        digest: Digest of the last line.
    """

    def __init__(self, name: str, before: Player | None = None) -> None:
        self.name, self.before = name, before
        self.events = self.part = self.since = self.began = 0
        self.digest = ""
        self.steps: StepReplay | None = None
        self.converters: Converters | None = None
        self._continues: dict[str, Any] | None = None
        self.rank: int | None = None
        self.contract: Contract | None = None
        self.version = VERSION

    @property
    def first(self) -> bool:
        """Whether the log has format version 1."""
        return self.version == FIRST

    @property
    def former(self) -> bool:
        """Whether the log has format version 1 or 2."""
        return self.version != VERSION

    @property
    def epoch(self) -> int:
        """The weight epoch after the events replayed so far."""
        return self.contract.epoch if self.contract else 0

    def play(self, lines: Iterable[bytes]) -> None:
        """
        Replay all lines of a log.

        Raises:
            LogError: The input is not an event log.
            Violation: A well-formed line is refused.
        """
        rest = iter(lines)
        chain = blake2b(digest_size=DIGEST_BYTES)
        contract = self._begin(next(rest, b""), chain)
        self._follow(rest, chain, contract)

    def _where(self, number: int) -> str:
        return f"{self.name}, line {number}"

    def _begin(self, line: bytes, chain: blake2b) -> Contract:
        """Read the header and build the contract that it describes."""
        if not line:
            raise LogError(
                f"{self.name} is empty; expected an event log, which begins with a header"
            )
        if not line.startswith(_BEGIN):
            raise LogError(
                f"{self.name} is not an event log: it begins with {_spelled(line[:24])}, "
                f"not with {_BEGIN.decode()}"
            )
        body = line[:-_END]
        chain.update(body)
        sealed = _MARK + chain.hexdigest().encode() + _TAIL
        if line[-_END:] != sealed:
            self._broken(1, line, sealed)
        chain.update(sealed)
        where = self._where(1)
        header = parse(body, where)
        if header.get("version") == FIRST and type(header["version"]) is int:
            self.version = FIRST
            header = self._upgraded(header, where, upgraded_header)
        elif header.get("version") == SECOND and type(header["version"]) is int:
            self.version = SECOND
            header = self._upgraded(header, where, upgraded_header_of_second)
        self._continues = header.pop(CONTINUES, None) if self.version == VERSION else None
        check_header(header, where)
        self.rank = header["rank"]
        try:
            self.contract = rebuild(header)
            described = header_of(self.contract, self.rank)
        except Refused as refused:
            raise Violation(refused.clause, 1, "stages", refused.found, refused.expected) from None
        except _TOO_MUCH as error:
            why = str(error) or type(error).__name__
            raise LogError(f"{where} does not describe a valid contract: {why}") from None
        for name, value in described.items():
            if compact(value) != compact(header[name]):
                raise LogError(
                    f"{where}, field {name}: found {shown(header[name])}; a recorder "
                    f"describes this contract as {shown(value)}"
                )
        self.header = header
        if self._continues is not None:
            self._go_on(self._continues, self.contract, where)
        if self.before is not None:
            self._require_next(self.before, where)
        self.began = self.contract.epoch
        return self.contract

    # A later file of a log in several files

    def _go_on(self, continues: Any, contract: Contract, where: str) -> None:
        """Load the state with which a later file of a log begins."""
        try:
            check_continues(continues)
            load_columns(contract.memory, continues["state"], every=True)
        except ValueError as error:
            raise LogError(f"{where}, field {CONTINUES}: {error}") from None
        self.part, self.since = continues["part"], continues["events"]
        self.events = self.since

    def _take_steps(self, steps: StepReplay, contract: Contract, where: str) -> None:
        """Load the recorded steps that lines of a later file may repeat."""
        for kept in (self._continues or {"steps": ()})["steps"]:
            start = contract.memory.copy()
            try:
                load_columns(start, kept["state"], every=False)
            except ValueError as error:
                raise LogError(f"{where}, field {CONTINUES}: {error}") from None
            for event in kept["events"]:
                check_event(event, f"{where}, field {CONTINUES}")
            try:
                steps.take(kept["began"], start, kept["events"])
            except (*_STUMBLES, RepeatError) as error:
                raise LogError(
                    f"{where}, field {CONTINUES}: step {kept['began']} is not a recorded step "
                    f"({error})"
                ) from None

    def _require_next(self, before: Player, where: str) -> None:
        """
        Require that this file continues the file that was replayed before it.

        Raises:
            LogError: The two files belong to different logs, or are not consecutive.
            Violation: This file does not begin with the state with which the earlier file ended.
        """
        assert self.contract is not None
        assert before.contract is not None
        if self._continues is None or self.header != before.header:
            raise LogError(f"{where}: this file does not continue {before.name}")
        if self.part != before.part + 1:
            raise LogError(
                f"{where}: this is file {self.part} of its log, {before.name} is file "
                f"{before.part}; give the files between them too"
            )
        found, expected = self._continues["after"], before.digest
        if found != expected:
            raise Violation("log.chain", 1, f"{CONTINUES}.after", found, expected)
        if self.since != before.events:
            raise Violation(
                "log.sequence",
                1,
                f"{CONTINUES}.events",
                f"{self.since} events",
                f"{before.events} events in the earlier files",
            )
        if name := differing(self.contract.memory, before.contract.memory):
            raise Violation(
                "log.state",
                1,
                f"{CONTINUES}.state.{name}",
                f"{getattr(self.contract.memory, name)}",
                f"{getattr(before.contract.memory, name)}, the state after the earlier files",
            )

    def _follow(self, lines: Iterator[bytes], chain: blake2b, contract: Contract) -> None:
        """Replay every line after the header; a replay spends most of its time in this loop."""
        st = contract.memory
        self.converters = converters = Converters(contract)
        former, first = self.former, self.first
        self.steps = steps = StepReplay(contract, converters.arguments, lambda: self.events + 1)
        self._take_steps(steps, contract, self._where(1))
        if self.before is not None:
            self._join(self.before, steps, converters)
        since = self.since
        plans = converters.plans(steps.functions(), former=former)
        update, hexdigest = chain.update, chain.hexdigest
        decode = json.JSONDecoder(parse_float=_stumble, parse_constant=_stumble).raw_decode
        number = 1
        for number, line in enumerate(lines, 2):
            body = line[:-_END]
            update(body)
            sealed = _MARK + hexdigest().encode() + _TAIL
            if line[-_END:] != sealed:
                self._broken(number, line, sealed)
            update(sealed)
            if former and (first or _CHANGED.search(body)):
                body = self._as_now(number, body)
            try:
                text = (body + b"}").decode()
                event, _ = decode(text)
                spelled, function, checks, converts, stop = plans[event["transition"]]
                if spelled(text) is None:
                    check_event(parse(body, self._where(number)), self._where(number))
                values = [*event.values()]
                for position, allowed in checks:
                    if values[position] not in allowed:
                        raise ValueError(position)
                for position, convert in converts:
                    values[position] = convert(values[position])
                if values[0] != number - 1 + since:
                    self._out_of_sequence(number, event)
                result = function(st, *values[2:stop])
            except RepeatError as refused:
                raise Violation(
                    refused.clause,
                    number,
                    "step" if "step" in event else "transition",
                    refused.found,
                    refused.expected,
                    refused.action or event["transition"],
                ) from None
            except Refused as refused:
                self._refused(number, body, refused, converters)
            except _STUMBLES:
                self._stumbled(number, body, converters, steps)
                break
            if result is not None and values[stop] != result:
                self._other_result(number, body, result)
            if steps.events is not None:
                steps.note(event)
            self.events = number - 1 + since
        else:
            raise Violation(
                "log.closing",
                number + 1,
                "events",
                f"the end of the log after {counted(self.events, 'event')}",
                "a closing line",
            )
        more = next(lines, None)
        if more is not None:
            found = "another log's header" if more.startswith(_BEGIN) else "another line"
            raise Violation("log.closing", number + 1, "events", found, "the end of the log")
        self.digest = _digest(sealed)

    def _join(self, before: Player, steps: StepReplay, converters: Converters) -> None:
        """Require that the recorded steps equal those of earlier files; keep their incarnations."""
        assert before.steps is not None
        assert before.converters is not None
        converters.begun |= before.converters.begun
        if not steps.same(before.steps):
            raise Violation(
                "log.step",
                1,
                f"{CONTINUES}.steps",
                "other recorded steps",
                "the recorded steps that the earlier files keep",
            )

    # A log of a former version

    def _upgraded(
        self,
        line: dict[str, Any],
        where: str,
        upgrade: Callable[[dict[str, Any]], dict[str, Any]],
    ) -> dict[str, Any]:
        try:
            return upgrade(line)
        except _STUMBLES as error:
            raise LogError(f"{where} is not a line of version {self.version}: {error}") from None

    def _as_now(self, number: int, body: bytes) -> bytes:
        """Convert a line of an older log format into the current format."""
        where = self._where(number)
        event = parse(body, where)
        if "events" in event:
            return body
        transition = event.get("transition")
        if not isinstance(transition, str):
            check_event(event, where)  # which names the field
        if transition in SINCE_SECOND:
            raise LogError(f"{where} is not a line of version {self.version}: {transition}")
        if self.first and transition in OF_STAGE_IN_FIRST:
            event = self._upgraded(event, where, self._of_bucket)
        elif transition == "commit_epoch":
            if self.first:
                event = self._upgraded(event, where, self._with_caller)
            event = self._upgraded(event, where, self._as_update)
        if self.first:
            event = self._upgraded(event, where, upgraded)
        return compact(event)[:-1].encode()

    def _as_update(self, event: dict[str, Any]) -> dict[str, Any]:
        """Convert an old commit line into ``check_update``, whose replay then also commits."""
        assert self.contract is not None
        if [*event] != ["seq", "transition", "epoch", "caller"]:
            raise ValueError(f"its fields are {[*event]}")
        serial = self.contract.memory.serial[0] + 1
        return {**event, "transition": "check_update", "result": serial}

    def _of_bucket(self, event: dict[str, Any]) -> dict[str, Any]:
        """Convert a stage's reduction into its bucket's, on the stream that finalized the stage."""
        assert self.contract is not None
        early = {"seq": event["seq"], "transition": event["transition"]}
        if event.keys() - early.keys() - {"digest"} != {"stage"}:
            raise ValueError(f"its fields are {[*event]}")
        bucket, link = self.contract.default_reader(event["stage"])
        at = {} if event["transition"] == "fail_reduction" else {"link": link}
        return {**early, "bucket": bucket, **at}

    def _with_caller(self, event: dict[str, Any]) -> dict[str, Any]:
        """Add the caller to an old commit line: the stream that waited for the gradients."""
        assert self.contract is not None
        if [*event] != ["seq", "transition", "epoch"]:
            raise ValueError(f"its fields are {[*event]}")
        return {**event, "caller": self.contract.memory.consumer[0]}

    # The slow path: what is wrong with a line that failed

    def _broken(self, number: int, line: bytes, sealed: bytes) -> NoReturn:
        if not line.endswith(b"\n"):
            if len(line) >= MAX_LINE:
                raise LogError(f"{self._where(number)} is longer than {MAX_LINE} bytes")
            raise Violation("log.closing", number, "events", "a truncated line", "a closing line")
        if line.endswith(b"\r\n"):
            raise LogError(
                f"{self._where(number)} ends in CR LF (\\r\\n); expected LF (\\n) alone: copy the "
                "log as binary data"
            )
        if not _SEALED.fullmatch(line[-_END:]):
            raise LogError(
                f"{self._where(number)} does not end in a digest: {_spelled(line[-_END:])}"
            )
        raise Violation(
            "log.chain",
            number,
            "digest",
            line[-_END:][len(_MARK) : -len(_TAIL)].decode(),
            sealed[len(_MARK) : -len(_TAIL)].decode(),
        )

    def _out_of_sequence(self, number: int, event: Mapping[str, Any]) -> NoReturn:
        check_event(event, self._where(number))
        raise Violation(
            "log.sequence",
            number,
            "seq",
            f"event {event['seq']}",
            f"event {number - 1 + self.since}",
            event["transition"],
        )

    def _other_result(self, number: int, body: bytes, result: Any) -> NoReturn:
        event = parse(body, self._where(number))
        check_event(event, self._where(number))
        raise Violation(
            "log.result",
            number,
            "result",
            f"ticket {event['result']}",
            f"ticket {result}",
            event["transition"],
        )

    def _refused(
        self, number: int, body: bytes, refused: Refused, converters: Converters
    ) -> NoReturn:
        event = parse(body, self._where(number))
        check_event(event, self._where(number))
        transition = event["transition"]
        if refused.clause == "log.incarnation":
            raise Violation(
                refused.clause,
                number,
                "incarnation",
                event["incarnation"],
                "an incarnation that is new to this log",
                transition,
            )
        refused = explain(
            refused, transition, converters.contract.memory, converters.arguments(event)
        )
        raise Violation(
            refused.clause,
            number,
            _field(refused.clause, event),
            refused.found,
            refused.expected,
            transition,
        )

    def _stumbled(
        self, number: int, body: bytes, converters: Converters, steps: StepReplay
    ) -> None:
        """Accept a closing line; for any other line, raise an error that says what is wrong."""
        where = self._where(number)
        event = parse(body, where)
        if "events" in event:
            self._close(number, event, converters.contract)
            if steps.events is not None:
                raise Violation(
                    "log.step",
                    number,
                    "events",
                    "the end of the log while a step is being recorded",
                    "a keep_step or drop_step line before the end of the log",
                )
            return
        check_event(event, where)
        clause, field, expected = converters.unknown(event)
        if field not in event:
            raise LogError(f"{where} does not fit the state with which the file begins")
        if clause:
            raise Violation(clause, number, field, f"{event[field]}", expected, event["transition"])
        raise LogError(
            f"{where}, field {field}: {shown(event[field])} is not configured; {expected}"
        )

    def _close(self, number: int, closing: Mapping[str, Any], contract: Contract) -> None:
        state = fingerprints(contract.snapshot())
        if not isinstance(closing.get("state"), dict):
            check_closing(closing, state, self._where(number))  # which names the field
        if self.former:
            state = {n: digest for n, digest in state.items() if n not in COLUMNS_SINCE_SECOND}
        if self.first:
            state = {n: digest for n, digest in state.items() if n not in COLUMNS_SINCE_FIRST}
            told = closing["state"].items()
            old = {n: digest for n, digest in told if n not in COLUMNS_OF_FIRST}
            closing = {**closing, "state": old}
        lacks = COLUMNS_ADDED - closing["state"].keys()
        for since, kept in (("skipped", KEPT_BEFORE_SKIPS), ("gathered", KEPT_BEFORE_MOVES)):
            if since in lacks and kept in closing["state"] and kept in state:
                own = {**closing["state"], kept: state[kept]}
                closing = {**closing, "state": own}
        state = {name: digest for name, digest in state.items() if name not in lacks}
        check_closing(closing, state, self._where(number))
        if closing["events"] != self.events:
            raise Violation(
                "log.closing",
                number,
                "events",
                f"{closing['events']} events",
                f"{counted(self.events, 'event')}, the number in the log",
            )
        for column, digest in state.items():
            if closing["state"][column] != digest:
                raise Violation(
                    "log.state", number, f"state.{column}", closing["state"][column], digest
                )


def _field(clause: str, event: Mapping[str, Any]) -> str:
    """Return the field that violates the clause; ``transition`` if the call came at a bad time."""
    argument = CLAUSES[clause].argument
    for name in (argument.partition(".")[0], argument.rpartition(".")[2]):
        if name in event:
            return argument if name == argument.partition(".")[0] else name
    return "transition"


def _digest(sealed: bytes) -> str:
    """Return the digest at the end of a line."""
    return sealed[len(_MARK) : -len(_TAIL)].decode()


def _spelled(data: bytes) -> str:
    return repr(data.decode("utf-8", "backslashreplace"))


def _stumble(text: str) -> NoReturn:
    raise ValueError(text)
