"""
``python -m qeffect.gpu_runtime COMMAND``:
doctor, demo, compare, pools, probes, bench, streams, plots.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """
    Run a command of the runtime.

    Returns:
        0 fine, 1 a violation or a mismatch was found, 2 unusable input or a missing need.
    """
    parser = argparse.ArgumentParser(prog="python -m qeffect.gpu_runtime", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    # Before torch is imported: the doctor says what is missing instead of failing for want of it.
    from qeffect.gpu_runtime.doctor import run_doctor

    doctor = commands.add_parser("doctor", help="what is here, what works, what is missing")
    doctor.add_argument("--json", action="store_true", help="print one JSON object")
    doctor.set_defaults(run=run_doctor)
    try:
        import torch  # noqa: F401
    except (ImportError, OSError) as error:
        given = list(sys.argv[1:] if argv is None else argv)
        if given[:1] != ["doctor"]:
            print(f"torch cannot be imported ({error}); only `doctor` works:", file=sys.stderr)
            given = ["doctor"]
        return run_doctor(parser.parse_args(given))
    _register(commands)
    args = parser.parse_args(argv)
    return int(args.run(args))


def _register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from qeffect.gpu_runtime.bench.cli import add_bench_arguments, run_bench
    from qeffect.gpu_runtime.demo import add_demo_arguments, run_demo
    from qeffect.gpu_runtime.evidence.command import add_compare_arguments, run_compare
    from qeffect.gpu_runtime.evidence.pools import add_pools_arguments, run_pools
    from qeffect.gpu_runtime.evidence.probes import add_probes_arguments, run_probes
    from qeffect.gpu_runtime.evidence.streams import add_streams_arguments, run_streams
    from qeffect.gpu_runtime.measure.plots import add_plots_arguments, run_plots

    for name, help_text, add, run in (
        (
            "demo",
            "guarded steps, then the same natively, and the comparison",
            add_demo_arguments,
            run_demo,
        ),
        ("compare", "native, eager and captured, bit for bit", add_compare_arguments, run_compare),
        (
            "pools",
            "one memory pool for each slot, and what a shared one corrupts",
            add_pools_arguments,
            run_pools,
        ),
        (
            "probes",
            "what the documentation says of the library, looked at here",
            add_probes_arguments,
            run_probes,
        ),
        ("bench", "step times, memory, set-up, copies and guards", add_bench_arguments, run_bench),
        (
            "streams",
            "stale reads of one-way and two-way handoffs",
            add_streams_arguments,
            run_streams,
        ),
        ("plots", "draw the reports", add_plots_arguments, run_plots),
    ):
        sub = commands.add_parser(name, help=help_text)
        add(sub)
        sub.set_defaults(run=run)


if __name__ == "__main__":
    raise SystemExit(main())
