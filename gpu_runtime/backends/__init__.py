"""
Backends: the protocol that a layer library implements (`protocol.py`), and two implementations.

`te/` is Transformer Engine, `reference/` plain PyTorch for a CPU or a GPU.
"""
