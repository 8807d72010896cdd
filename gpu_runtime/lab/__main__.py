"""
``python -m qeffect.gpu_runtime.lab`` is ``qeffect runtime bench``.
"""

import sys

from qeffect.cli import main

if __name__ == "__main__":
    raise SystemExit(main(["runtime", "bench", *sys.argv[1:]]))
