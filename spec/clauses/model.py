"""
The records of a clause and of a part of the contract, which the other modules fill in.
"""

from __future__ import annotations

from attrs import field, frozen

__all__ = ["Clause", "Part"]


@frozen
class Clause:
    """
    One clause of the contract.

    Args:
        id: Stable name, ``relation.what-was-violated``; a refusal carries it.
        number: Number in the normative text, ``part.clause``.
        title: The clause in a few words.
        invariant: The clause in a sentence.
        transitions: Transitions that check the clause; ``configure`` is the construction of a
            contract, ``replay`` the reading of an event log, ``check`` the check of a schedule.
        argument: Argument to look at first after a refusal, or a field of an argument, as in
            ``ref.generation``; for ``replay``, a field of the refused line. Empty if the call came
            at the wrong time.
        unchanged: State that a refusal leaves unchanged.
        section: Section of the paper, or ``design`` where this project goes beyond it.
        cause: The likely cause, for a person who calls the contract.
        remedy: What this person should do.
    """

    id: str
    number: str
    title: str
    invariant: str
    transitions: tuple[str, ...]
    argument: str
    unchanged: str
    section: str
    cause: str
    remedy: str

    @property
    def relation(self) -> str:
        """The part of the contract that the clause belongs to: its id before the dot."""
        return self.id.partition(".")[0]


@frozen
class Part:
    """
    One part of the contract (a relation or a record of counts), with its clauses.

    Args:
        name: Name of the relation, as in clause ids.
        title: Heading of the part's chapter.
        hidden: The object (state or work) that a tensor dataflow graph does not show.
        without: What goes wrong when nothing protects that object.
        holder: What the contract keeps to protect that object.
        intro: Paragraphs before the clauses.
        clauses: The clauses, in order.
    """

    name: str
    title: str
    hidden: str
    without: str
    holder: str
    intro: str
    clauses: tuple[Clause, ...] = field(default=())
