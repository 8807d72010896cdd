"""
``python -m qeffect.gpu_runtime.lab.bench`` is ``qeffect runtime bench``.
"""

from qeffect.cli import main

if __name__ == "__main__":
    raise SystemExit(main(before=("runtime", "bench")))
