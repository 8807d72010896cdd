"""
`python -m qeffect.gpu_runtime.bench` is `python -m qeffect.gpu_runtime bench`.
"""

import argparse

from qeffect.gpu_runtime.bench import add_bench_arguments, run_bench

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m qeffect.gpu_runtime bench")
    add_bench_arguments(parser)
    raise SystemExit(run_bench(parser.parse_args()))
