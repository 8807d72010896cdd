"""
Backends: the protocol that a layer library implements (`protocol.py`), and two implementations.

`te/` uses Transformer Engine; `reference/` is plain PyTorch for a CPU or a GPU.
"""
