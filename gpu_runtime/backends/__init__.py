"""
Backends connect the runtime to a layer library: the interface (`protocol.py`) and two
implementations.

`te/` uses Transformer Engine. `reference/` is plain PyTorch for a CPU or a GPU.
"""
