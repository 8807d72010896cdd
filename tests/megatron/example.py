"""Run a script of Megatron-core on a CPU: ``python -m tests.megatron.example FILE``."""

from __future__ import annotations

import runpy
import sys

from qeffect.gpu_runtime.lab.sides import as_cpu

if __name__ == "__main__":
    as_cpu.install()
    runpy.run_path(sys.argv[1], run_name="__main__")
