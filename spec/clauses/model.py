"""
What a clause is, and what a part of the contract is: the records that the other modules fill in.
"""

from __future__ import annotations

from attrs import field, frozen

__all__ = ["Clause", "Part"]


@frozen
class Clause:
    """
    One promise of the contract.

    Args:
        id: Stable name, ``relation.what-was-violated``; a refusal carries it.
        number: Place in the normative text, ``part.clause``.
        title: The promise in a few words.
        invariant: The promise in a sentence.
        transitions: Transitions that check it; ``configure`` is the construction of a contract,
            ``replay`` the reading of an event log, ``check`` that of a schedule.
        argument: Argument to look at first when it is refused, ``ref.generation`` for a part of
            one; empty where no argument is at fault but the moment is.
        unchanged: What a refusal leaves as it was.
        section: Section of the paper, or ``design`` where this project goes beyond it.
        cause: The likely cause, for a person who embeds the contract.
        remedy: What to do about it.
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
        """The part of the contract it belongs to: its id before the dot."""
        return self.id.partition(".")[0]


@frozen
class Part:
    """
    One relation or ledger of the contract, with its clauses.

    Args:
        name: Name of the relation, as in clause ids.
        title: Heading.
        hidden: The object that tensor dataflow does not show.
        without: What goes wrong when nothing holds it.
        holder: What holds it.
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
