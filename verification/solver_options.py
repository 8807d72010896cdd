"""
Options for ``qeffect prove`` and ``qeffect ranks``: the number of seeds, and a second solver.
"""

from __future__ import annotations

import argparse
from typing import Any, Final

from qeffect.cli.command import UnusableError, needs

__all__ = ["MOST_SEEDS", "add_solver_options", "chosen_seeds", "chosen_solvers"]

MOST_SEEDS: Final = 10_000


def add_solver_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--seeds",
        type=int,
        metavar="N",
        help="number of solver seeds; each further seed proves the obligations again (default 1)",
    )
    parser.add_argument("--cvc5", action="store_true", help="also prove with a second solver, cvc5")


def chosen_seeds(args: argparse.Namespace) -> range:
    """
    Return the seeds to prove with.

    Raises:
        UnusableError: The number is below 1 or too high.
    """
    seeds: int = 1 if args.seeds is None else args.seeds
    if seeds < 1:
        raise UnusableError(f"--seeds must be at least 1, not {seeds}")
    if seeds > MOST_SEEDS:
        raise UnusableError(f"--seeds must be at most {MOST_SEEDS:,}, not {seeds}")
    return range(seeds)


def chosen_solvers(args: argparse.Namespace) -> tuple[str, ...]:
    """
    Return the solvers to prove with.

    Raises:
        UnusableError: cvc5 is requested but not installed.
    """
    if not args.cvc5:
        return ("z3",)
    needs("cvc5", _cvc5)
    return ("z3", "cvc5")


def _cvc5() -> Any:
    import cvc5

    return cvc5
