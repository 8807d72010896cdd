"""
The benchmark: what this runtime costs and gains beside what users of Transformer Engine have today.

`cells` and `columns` say what is measured, `worker` and `rounds` measure it, `derive` and `targets`
compute what follows, `report` and `tables` write it down.
"""

from .cli import add_bench_arguments, run_bench

__all__ = ["add_bench_arguments", "run_bench"]
