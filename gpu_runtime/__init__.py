"""
A training runtime that asks the kernel before every F, dI and dW that it performs.

See `README.md` in this folder for what each module is for. Importing the package imports neither
torch, Transformer Engine nor CUDA. Names of earlier releases are in `renamed.py`.
"""

from qeffect.renamed import install

from .renamed import MODULES, NAMES

install(__name__, MODULES, NAMES)
