"""
``python -m qeffect.gpu_runtime.lab`` is ``qeffect runtime report``.
"""

import sys

from qeffect.cli import main

if __name__ == "__main__":
    raise SystemExit(main(["runtime", "report", *sys.argv[1:]]))
