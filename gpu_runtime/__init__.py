"""
A training runtime that asks the kernel before every F, dI and dW it performs.

See `README.md` in this folder for what each module is for. Importing the package imports neither
Transformer Engine nor CUDA.
"""
