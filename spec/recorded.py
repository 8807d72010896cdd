"""
The promises of a step in one call (chapter *A step in one call*), with the proof or tests of each.

These promises are about the calls `check_step` and `commit_step`, which are not transitions. So no
promise here is a predicate over a transition. One promise is proved for all transitions. Tests show
the other promises; each test fails if the comparison that it covers is removed.
"""

from __future__ import annotations

from typing import Final

from attrs import frozen

__all__ = ["STEP_PROMISES", "StepPromise"]


@frozen
class StepPromise:
    """
    A promise of a step in one call.

    Args:
        name: Name of the promise.
        text: The promise in a sentence.
        proof: Path of the file with the promise's proof; empty if only tests show the promise.
        tests: Tests, as ``file: test``, that show the promise, or that show how the promise fails
            if a comparison is removed.
    """

    name: str
    text: str
    proof: str = ""
    tests: tuple[str, ...] = ()


_KERNEL: Final = "tests/kernel/test_steps.py"
_PROOFS: Final = "tests/verification/test_recurring_proofs.py"
_RANKS: Final = "tests/ranks/test_recurring.py"
_LOGS: Final = "tests/eventlog/test_steps.py"

STEP_PROMISES: Final = (
    StepPromise(
        "steps.moved-alike",
        "Suppose that all counters of one family (epochs, for example) advance by the same "
        "amount. Every transition then takes the same path through its code, and leaves the same "
        "state, except that this family's counters have advanced by that amount.",
        "verification/proofs/recurring.py",
        (
            f"{_PROOFS}: test_no_column_may_stand_still_while_its_family_moves",
            f"{_PROOFS}: test_every_path_of_a_steps_transitions_is_asked_for_every_family",
        ),
    ),
    StepPromise(
        "steps.same-end",
        "A step committed in one call leaves the same state as its transitions called one by one. "
        "The columns, the free slots in their order, the reservations and the counts are all "
        "equal.",
        tests=(
            f"{_RANKS}: test_the_whole_state_is_that_of_action_by_action",
            f"{_KERNEL}: test_a_step_as_one_leaves_what_its_actions_leave",
        ),
    ),
    StepPromise(
        "steps.same-start",
        "`check_step` treats the current state as equal to the recorded state only in one case: "
        "from the current state, every transition of the step would be accepted and would leave "
        "the recorded values.",
        tests=(
            f"{_RANKS}: test_no_other_state_is_taken_for_the_recorded_one",
            f"{_RANKS}: test_each_compared_column_is_needed",
            f"{_RANKS}: test_each_look_is_needed",
            f"{_KERNEL}: test_what_a_contract_holds_beside_its_memory_is_looked_at",
        ),
    ),
    StepPromise(
        "steps.one-incarnation",
        "A step is checked and committed only in the incarnation that recorded it. Within that "
        "incarnation, the step is accepted if all its transitions would be accepted.",
        tests=(
            f"{_KERNEL}: test_a_step_is_of_one_contract_and_incarnation",
            f"{_RANKS}: test_histories_that_are_not_taken_as_one_are_refused_by_their_actions",
        ),
    ),
    StepPromise(
        "steps.first-refusal",
        "If the state differs from the recorded state, `check_step` reports the clause that "
        "refuses the step's first refused transition. If `check_step` reports no clause, no "
        "transition of the step is refused.",
        tests=(
            f"{_RANKS}: test_no_other_state_is_taken_for_the_recorded_one",
            f"{_RANKS}: test_histories_that_are_not_taken_as_one_are_refused_by_their_actions",
        ),
    ),
    StepPromise(
        "steps.check-is-commit",
        "`check_step` runs every check of `commit_step`, including the counts of the last commit.",
        tests=(f"{_KERNEL}: test_counts_of_the_last_commit_are_asked_for_at_the_check",),
    ),
    StepPromise(
        "steps.no-checkpoint-within",
        "No checkpoint is taken between an accepted `check_step` and the `commit_step` or "
        "`withdraw_step` that ends it.",
        tests=(f"{_KERNEL}: test_between_the_check_and_the_commit",),
    ),
    StepPromise(
        "steps.replayed",
        "An event log records a step committed in one call as one line. The replayer refuses such "
        "a line if any transition of the step would be refused.",
        tests=(
            f"{_LOGS}: test_each_step_as_one_is_one_line_and_the_log_is_accepted",
            f"{_LOGS}: test_a_forged_step_is_refused",
            f"{_LOGS}: test_a_repeated_step_whose_action_is_refused_is_refused_by_its_clause",
        ),
    ),
)
