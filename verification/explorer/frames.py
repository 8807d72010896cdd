"""
Frames: which arguments of a transition are right, optional or wrong for one slot, cell or stage of
the state; the explorer's moves are made from frames.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product

from attrs import evolve, field, frozen

from qeffect.engine.stage import TRANSITIONS, Transitions
from qeffect.relations.constants import (
    ADDS,
    BACK_BIT,
    DGRAD_BIT,
    GRAD_BIT,
    IN_BIT,
    JOINS,
    NEVER,
    NO_SLOT,
    OPENS,
    OUT_BIT,
    OVERWRITES,
    RESERVED,
    WGRAD_BIT,
)

from .cone import Dependence, dependence, visible_columns
from .moves import ACTIONS, EVIDENCE, Move, Rel, Value, Where
from .scopes import WHOLE, Scope, configuration, sizes

__all__ = ["Frame", "Maker"]

_NOTHING = 0  # no matrix
_MOVEMENT = {"stage", "updates"}  # the parameters of a movement of scales in an update
_NOWHERE = -1  # a destination that was never configured

#: A wrong value for some arguments, and the condition under which it is wrong.
Wrong = tuple[Mapping[str, Value], tuple[Where, ...]]


@frozen
class Frame:
    """
    The right and wrong arguments of a transition (a call of the contract) for one slot, cell or
    stage.

    Args:
        right: The right value of each argument.
        choices: Values of the arguments that the caller may choose, with the usual value first.
        wrong: Wrong values of arguments.
        where: Conditions on the state under which the frame applies.
        fits: Whether a call with the right values is legal; choices and wrong values are tried only
            then.
    """

    right: Mapping[str, Value]
    choices: Mapping[str, tuple[int, ...]] = field(factory=dict)
    wrong: tuple[Wrong, ...] = ()
    where: tuple[Where, ...] = ()
    fits: bool = True


class Maker:
    """
    Makes the moves (the calls to try) of a scope.

    Args:
        scope: The scope to explore.
        transitions: The composed transitions of the scope.
    """

    def __init__(self, scope: Scope, transitions: Transitions) -> None:
        self.scope = scope
        self.n = sizes(scope)
        self.config = configuration(scope)
        self.depends: dict[str, Dependence] = {
            name: dependence(transitions.functions[name], scope.off) for name in scope.transitions
        }
        self.visible = visible_columns(self.depends.values())
        self.versioned = "version" not in scope.omit

    def all(self) -> Iterator[Move]:
        """Yield every move, in a fixed order."""
        grouped = set() if self.scope.tickets else {n for a in ACTIONS.values() for n in a}
        for name in self.scope.transitions:
            if name not in grouped and self.matters((name,)):
                yield from self.moves(name, (name,))
        if self.scope.tickets:
            return
        for action, (check, commit, abort) in ACTIONS.items():
            there = {check, commit, abort} <= set(self.scope.transitions)
            if there and self.matters((check, commit, abort)):
                for move in self.moves(action, (check, commit)):
                    yield move
                    if move.right:
                        fails = f"{action} fails"
                        yield evolve(move, label=fails, steps=(check, abort), twin=True)

    def matters(self, steps: tuple[str, ...]) -> bool:
        """Return whether the steps can be refused, or can change a value that a guard reads."""
        found = [self.depends[name] for name in steps]
        touched = set().union(*(one.writes for one in found)) - {"serial"}
        return any(one.guards for one in found) or bool(touched & self.visible)

    def reads(self, steps: tuple[str, ...]) -> frozenset[str]:
        return frozenset().union(*(self.depends[name].arguments for name in steps))

    def moves(self, label: str, steps: tuple[str, ...]) -> Iterator[Move]:
        parameters = list(TRANSITIONS[steps[0]])
        if len(steps) > 1:
            parameters += [p for p in TRANSITIONS[steps[1]] if p in EVIDENCE]
        reads = self.reads(steps)
        for frame in self.frames(steps[0], set(parameters)):
            for move in self.expand(frame, reads):
                yield evolve(move, label=label, steps=steps)

    def expand(self, frame: Frame, reads: frozenset[str]) -> Iterator[Move]:
        choices = {n: values for n, values in frame.choices.items() if n in reads}
        default = {n: values[0] for n, values in frame.choices.items()}
        if frame.fits:
            for values in product(*choices.values()):
                chosen = dict(zip(choices, values, strict=True))
                yield _move(reads, {**frame.right, **default, **chosen}, frame.where, True)
        elif self.scope.wrong_arguments:
            yield _move(reads, {**frame.right, **default}, frame.where, False)
        if not self.scope.wrong_arguments:
            return
        flags = {n: values for n, values in choices.items() if n in ("refresh", "first")}
        for values in product(*flags.values()):
            chosen = {**default, **dict(zip(flags, values, strict=True))}
            for spoiled, when in frame.wrong:
                if reads & spoiled.keys():
                    arguments = {**frame.right, **chosen, **spoiled}
                    yield _move(reads, arguments, frame.where + when, False)

    # What parameters mean

    def frames(self, transition: str, parameters: set[str]) -> Iterator[Frame]:
        if "ref" in parameters:
            for slot, cell in product(range(self.n["slot"]), range(self.n["cell"])):
                for frame in self.tape(parameters, slot, cell):
                    yield from self.led(frame) if "leader" in parameters else [frame]
        elif {"key", "slot"} <= parameters:
            for cell, slot in product(range(self.n["cell"]), (*range(self.n["slot"]), NO_SLOT)):
                yield from self.place(parameters, cell, slot)
        elif "key" in parameters:
            for cell in range(self.n["cell"]):
                yield from self.key(parameters, cell)
        elif {"slot", "ticket"} <= parameters:
            for slot in range(self.n["slot"]):
                yield from self.ticket(parameters, "slot", "held", slot, transition)
        elif {"stage", "ticket"} <= parameters:
            column = "evaluating" if transition.endswith("evaluation") else "refreshing"
            for stage in range(self.n["stage"]):
                yield from self.ticket(parameters, "stage", column, stage, transition)
        elif {"epoch", "ticket"} <= parameters:
            yield from self.update(transition)
        elif {"stage", "epoch"} <= parameters:
            for stage in range(self.n["stage"]):
                yield from self.fault(stage)
        elif "stage" in parameters:
            for stage in range(self.n["stage"]):
                links = self.links(self.config["domain_of"][stage])
                evaluates = "cached" in parameters
                told, untold = self.evidence(parameters, stage, evaluates=evaluates)
                choices = {"link": links} if "link" in parameters else {}
                if evaluates:
                    choices["cached"] = (0, 1)
                yield Frame({"stage": stage, **told}, choices, tuple(untold))
        elif "bucket" in parameters:
            for bucket in range(self.n["bucket"]):
                links = self.links(self.config["domain_of"][self.config["stage_at"][bucket]])
                yield Frame({"bucket": bucket}, {"link": links} if "link" in parameters else {})
        elif "link" in parameters:
            yield from (Frame({"link": link}) for link in range(self.n["link"]))
        elif "domain" in parameters:
            yield from (Frame({"domain": domain}) for domain in range(self.n["domain"]))
        elif "incarnation" in parameters:
            same: dict[str, Value] = {"incarnation": Rel("incarnation", 0)}
            for epoch in range(self.scope.epochs):
                fresh: dict[str, Value] = {"epoch": epoch, "incarnation": Rel("incarnation", 0, 1)}
                yield Frame(fresh, {}, ((same, ()),))
        elif "epoch" in parameters:
            others = [{"epoch": Rel("weight_epoch", 0, offset)} for offset in (1, -1)]
            callers = {"caller": tuple(range(self.n["caller"]))} if "caller" in parameters else {}
            right: dict[str, Value] = {"epoch": Rel("weight_epoch", 0)}
            left = (Where("walk", 0, self.scope.walks - 1, equal=False),)
            where = left if transition == "next_walk" else ()
            yield Frame(right, callers, tuple((o, ()) for o in others), where)
        else:
            yield Frame({})

    def fault(self, stage: int) -> Iterator[Frame]:
        """Yield a fault of the current or previous epoch; a fault of the next epoch is wrong."""
        now: dict[str, Value] = {"stage": stage, "epoch": Rel("weight_epoch", stage)}
        later: dict[str, Value] = {"stage": stage, "epoch": Rel("weight_epoch", stage, 1)}
        yield Frame(now, {}, ((later, ()),))
        before: dict[str, Value] = {"stage": stage, "epoch": Rel("weight_epoch", stage, -1)}
        yield Frame(before, {}, (), (Where("weight_epoch", stage, 0, equal=False),))

    def links(self, domain: int) -> tuple[int, ...]:
        """Return every link, the links of the domain first."""
        at = self.config["domain_at"]
        return tuple(sorted(range(self.n["link"]), key=lambda link: (at[link] != domain, link)))

    def chosen(self, parameters: set[str], domain: int) -> dict[str, tuple[int, ...]]:
        values = {
            "link": self.links(domain),
            "refresh": (0, 1),
            "first": (ADDS, OVERWRITES, JOINS, OPENS) if self.scope.tied else (ADDS, OVERWRITES),
            "bit": (OUT_BIT, GRAD_BIT, DGRAD_BIT, WGRAD_BIT),
            "message": (IN_BIT, BACK_BIT, OUT_BIT),
        }
        return {name: v for name, v in values.items() if name in parameters}

    def shared(self, parameters: set[str], cell: int) -> tuple[dict[str, Value], list[Wrong]]:
        """Return right and wrong values of the arguments that accompany a key."""
        domain = self.config["domain_of"][self.config["stage_of"][cell]]
        right: dict[str, Value] = {}
        wrong: list[Wrong] = []
        if "token" in parameters:
            right["token"] = Rel("token", domain)
            wrong += [({"token": Rel("token", domain, k)}, ()) for k in (1, -1)]
        if "destination" in parameters:
            right["destination"] = self.config["destination_of"][cell]
            wrong.append(({"destination": _NOWHERE}, ()))
        told, untold = self.evidence(parameters, self.config["stage_of"][cell])
        return right | told, wrong + untold

    def evidence(
        self,
        parameters: set[str],
        stage: int,
        slot: int | None = None,
        fills: bool = True,
        evaluates: bool = False,
    ) -> tuple[dict[str, Value], list[Wrong]]:
        """
        Return right and wrong values of an action's evidence (the reports of its backend).

        Args:
            parameters: Names of the arguments of the move (a call, or a check with its commit).
            stage: Stage of the action.
            slot: Slot (set of buffers) of the action's tape, if the tape exists before the check.
            fills: Whether the action was asked to fill the stage's weight cache.
            evaluates: Whether the action is an evaluation, which fills and updates nothing.
        """
        fresh = Rel("weight_epoch", stage)
        domain, cells = self.config["domain_of"][stage], self.config["cells"][stage]
        gathers = self.scope.epoch_scales and parameters != _MOVEMENT
        known: dict[str, tuple[Value, tuple[Value, ...]]] = {
            "queued": (WHOLE, (_NOTHING,)),
            "covered": (WHOLE, (_NOTHING,)),
            "filled": (WHOLE, (_NOTHING,)),
            "fill_epoch": (
                (fresh, (Rel("weight_epoch", stage, 1), NEVER)) if fills else (NEVER, (fresh,))
            ),
            "updates": (0, (1, 2)) if gathers else (1, (0, 2)),
            "scales": (NEVER, ()),
            "draws": (Rel("drawn", domain, 1), (Rel("drawn", domain), NEVER)),
            "weight": (1, (0, 2)) if self.scope.weights else (NEVER, ()),
            "parts": (cells, (Rel("parts", stage, -1), 0)) if self.scope.weights else (NEVER, ()),
        }
        if evaluates:
            known |= {"fill_epoch": (NEVER, (fresh,)), "updates": (0, (1,))}
        if slot is not None:
            known["scales"] = (Rel("scaled_at", slot), (Rel("scaled_at", slot, 1), NEVER))
            known["draws"] = (Rel("drawn_at", slot), (Rel("drawn_at", slot, 1), NEVER))
        given = {name: known[name] for name in EVIDENCE if name in parameters}
        wrong: list[Wrong] = [({n: v}, ()) for n, (_, others) in given.items() for v in others]
        return {name: value for name, (value, _) in given.items()}, wrong

    def tape(self, parameters: set[str], slot: int, cell: int) -> Iterator[Frame]:
        """Yield references to the slot's tape (the data of one F), with the right cell (stage and
        microbatch) or another cell in the key."""
        domain = self.config["domain_of"][self.config["stage_of"][cell]]
        right, wrong = self.shared(parameters, cell)
        told, untold = self.evidence(parameters, self.config["stage_of"][cell], slot)
        right |= told
        wrong += [one for one in untold if one not in wrong]
        right |= {
            "key.cell": cell,
            "key.epoch": Rel("epoch_at", slot),
            "ref.slot": slot,
            "ref.generation": Rel("generation", slot),
            "ref.incarnation": Rel("incarnation", 0),
        }
        older = (Where("generation", slot, 0, equal=False),)
        wrong += [
            ({"key.epoch": Rel("epoch_at", slot, 1)}, ()),
            ({"ref.generation": Rel("generation", slot, 1)}, ()),
            ({"ref.generation": Rel("generation", slot, -1)}, older),
            ({"ref.incarnation": Rel("incarnation", 0, 1)}, ()),
        ]
        choices = self.chosen(parameters, domain)
        yield Frame(right, choices, tuple(wrong), (Where("cell_at", slot, cell),))
        another = {**right, "key.epoch": self.now(cell)}
        where = (Where("cell_at", slot, cell, equal=False),)
        yield Frame(another, choices, (), where, fits=False)

    def led(self, frame: Frame) -> Iterator[Frame]:
        """Yield a frame with the ticket of each dW in flight; 0 and unissued tickets are wrong."""
        for leader in range(self.n["slot"]):
            right = {**frame.right, "leader": leader, "ticket": Rel("held", leader)}
            wrong = (({"ticket": 0}, ()), ({"ticket": Rel("serial", 0, 1)}, ()))
            where = (*frame.where, Where("held", leader, 0, equal=False))
            yield evolve(frame, right=right, wrong=(*frame.wrong, *wrong), where=where)

    def now(self, cell: int) -> Value:
        """Return the epoch of a key that is presented now."""
        if self.scope.fresh_keys:
            return Rel("forwarded", cell, 1)
        return Rel("weight_epoch", self.config["stage_of"][cell])

    def epochs(self, cell: int) -> Iterator[tuple[Value, tuple[Where, ...], bool]]:
        """
        Yield each epoch that a presented key can have, with its condition and whether it is right.

        Without the relation version, no guard checks the epoch, and the caller is trusted to
        present the current epoch.
        """
        if self.scope.fresh_keys:
            yield self.now(cell), (), True
            return
        stage = self.config["stage_of"][cell]
        for epoch in range(self.scope.epochs):
            yield epoch, (Where("weight_epoch", stage, epoch),), True
            if self.versioned:
                yield epoch, (Where("weight_epoch", stage, epoch, equal=False),), False

    def place(self, parameters: set[str], cell: int, slot: int) -> Iterator[Frame]:
        """
        Yield frames (arguments of a call) in which a key asks for a slot. The call is right if key
        and slot are free, or if the key has reserved the slot.
        """
        if "fill_epoch" in parameters and "reports_fills" not in self.scope.off:
            for fills in (False, True):
                yield from self._place(parameters, cell, slot, fills)
        else:
            yield from self._place(parameters, cell, slot)

    def _place(
        self, parameters: set[str], cell: int, slot: int, fills: bool | None = None
    ) -> Iterator[Frame]:
        stage = self.config["stage_of"][cell]
        right, wrong = self.shared(parameters, cell)
        choices = self.chosen(parameters, self.config["domain_of"][stage])
        if fills is not None:  # the reports of an F depend on its request
            told, untold = self.evidence(parameters, stage, fills=fills)
            right |= told
            wrong = [one for one in wrong if not set(EVIDENCE) & one[0].keys()] + untold
            choices["refresh"] = (int(fills),)
        key = {**right, "key.cell": cell, "slot": slot}
        if slot == NO_SLOT or self.config["slot_stage"][slot] != stage:
            yield Frame({**key, "key.epoch": self.now(cell)}, choices, fits=False)
            return
        free, idle = Where("consumers", slot, 0), Where("slot_of", cell, NO_SLOT)
        busy = evolve(free, equal=False)
        reserved = Where("consumers", slot, RESERVED)
        own = Where("cell_at", slot, cell)
        fitting: list[tuple[Where, ...]] = [(free, idle)]
        unfit: list[tuple[Where, ...]] = [(free, evolve(idle, equal=False))]
        if "token" in parameters:  # a forward may take the slot that its key reserved
            fitting.append((reserved, own))
            unfit.append((busy, evolve(reserved, equal=False)))
            unfit.append((reserved, evolve(own, equal=False)))
        else:
            unfit.append((busy,))
        for where in fitting:
            for epoch, when, now in self.epochs(cell):
                spoiled = tuple(wrong) if now else ()
                yield Frame({**key, "key.epoch": epoch}, choices, spoiled, where + when, now)
        for where in unfit:
            yield Frame({**key, "key.epoch": self.now(cell)}, choices, (), where, fits=False)

    def key(self, parameters: set[str], cell: int) -> Iterator[Frame]:
        right, wrong = self.shared(parameters, cell)
        for epoch, where, fits in self.epochs(cell):
            key = {"key.cell": cell, "key.epoch": epoch}
            yield Frame({**right, **key}, {}, tuple(wrong) if fits else (), where, fits)

    def ticket(
        self, parameters: set[str], index: str, column: str, member: int, transition: str
    ) -> Iterator[Frame]:
        """
        Yield the ticket in flight on a slot or stage. Wrong values are the ticket of another
        action, 0, and a ticket that was never issued.
        """
        right: dict[str, Value] = {index: member, "ticket": Rel(column, member)}
        wrong: list[Wrong] = [
            ({"ticket": 0}, ()),
            ({"ticket": Rel("serial", 0, 1)}, ()),
        ]
        for other in range(self.n[index]):
            if other != member:
                flying = (Where(column, other, 0, equal=False),)
                wrong.append(({"ticket": Rel(column, other)}, flying))
        stage = member if index == "stage" else self.config["slot_stage"][member]
        evaluates = column == "evaluating"
        told, untold = self.evidence(parameters, stage, evaluates=evaluates)
        right |= told
        wrong += untold
        in_flight = (Where(column, member, 0, equal=False),)
        yield Frame(right, {}, tuple(wrong), in_flight)
        idle = (Where(column, member, 0),)
        yield Frame({**right, "ticket": Rel("serial", 0, 1)}, {}, (), idle, fits=False)
        yield Frame({**right, "ticket": 0}, {}, (), idle, fits=False)

    def update(self, transition: str) -> Iterator[Frame]:
        """
        Yield the ticket of the update in flight. Wrong values are 0, a ticket that was never
        issued, and another epoch.

        If scales move once per epoch, a commit is right only after the scales have moved.
        """
        right: dict[str, Value] = {
            "epoch": Rel("weight_epoch", 0),
            "ticket": Rel("optimizing", 0),
        }
        wrong: list[Wrong] = [
            ({"ticket": 0}, ()),
            ({"ticket": Rel("serial", 0, 1)}, ()),
            ({"epoch": Rel("weight_epoch", 0, 1)}, ()),
            ({"epoch": Rel("weight_epoch", 0, -1)}, ()),
        ]
        flying = (Where("optimizing", 0, 0, equal=False),)
        moves = self.scope.epoch_scales and transition == "commit_update"
        domains = range(self.n["domain"]) if moves else range(0)
        moved = tuple(Where("gathered", domain, 0) for domain in domains)
        yield Frame(right, {}, tuple(wrong), (*flying, *moved))
        for domain in domains:
            late = Where("gathered", domain, 0, equal=False)
            yield Frame(right, {}, (), (*flying, late), fits=False)
        idle = (Where("optimizing", 0, 0),)
        yield Frame({**right, "ticket": Rel("serial", 0, 1)}, {}, (), idle, fits=False)
        yield Frame({**right, "ticket": 0}, {}, (), idle, fits=False)


def _move(
    reads: frozenset[str], arguments: Mapping[str, Value], where: tuple[Where, ...], right: bool
) -> Move:
    """Return a move (a call to try); arguments that no transition reads are set to zero."""
    kept = {name: value if name in reads else 0 for name, value in arguments.items()}
    return Move("", (), kept, where, right)
