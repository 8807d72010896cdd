"""
A recurring step: one optimizer step, recorded once, then checked and committed in one call.

A transition is a function that checks and changes the contract's state. A training step runs the
same transitions in every epoch, and only counters differ between epochs. So one step is run
transition by transition, with every guard of every action, and recorded. The recording contains the
memory entries that the transitions read before writing them, and the final values of all entries
written. Later steps are checked by one comparison of the entries read, and committed by writing the
final values.

Why this gives the same result as running the transitions one by one:

* *The entries read determine the step.* The result of a transition depends only on the columns (the
  lists that hold the state) and on its arguments. An entry that no transition reads before it is
  written does not influence the step.
* *The entries read equal the recorded start, except for risen counters.* The columns in
  `counters.COUNTERS` hold numbers of six families: epochs, tickets, effect tokens, replays, work of
  a caller, generations. Each number belongs to a counter; for example, each slot has a counter of
  generations. If a counter has risen, all its numbers must have risen ("moved") by the same amount.
  Every other entry must be unchanged. The arguments (epochs of keys, generations of references,
  tokens and tickets) must have risen by the same amounts. With any other difference, the comparison
  fails.
* *Moving a family changes no guard's decision.* Transitions compare a family's numbers with each
  other, copy them, and add one. They also compare epochs and tickets with the number for "none",
  and generations with their maximum. The number for "none" does not move and is less than all
  others, since counters never fall; a step must not reach the maximum. So every guard decides as
  before, and every write is the recorded write, moved by the same amounts.

The last point is proved for every path of every transition that a step may contain, each family and
any amounts (`qeffect.verification.proofs.recurring`). It is also tested: when a step is recorded,
its transitions run again from starts whose counters are far apart. The transitions must be
accepted, and must produce the recorded end, moved by the same amounts.

The contract also has state outside its memory. Reserved slots are compared and written in the same
way. The order of the free slots is not compared: it only decides which slot the contract chooses,
and the step uses the recorded slots. After the step, the slots that the step has freed are at the
end of the list of free slots, as after running its transitions.

Another start may still be acceptable: for example, the caller waited once more, or another tape
used a slot before. The step's transitions then run one by one over a copy of the state. If all are
accepted, the step is committed in one call (`qeffect.ledgers.step_trial`).
"""

from __future__ import annotations

from .counters import BASES, COUNTERS, translated
from .recorded_step import RecordedStep
from .recording import Recording, StepObserver
from .state import Difference, StepState

__all__ = [
    "BASES",
    "COUNTERS",
    "Difference",
    "RecordedStep",
    "Recording",
    "StepObserver",
    "StepState",
    "translated",
]
