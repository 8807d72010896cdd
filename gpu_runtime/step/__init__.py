"""
Execution: the guarded actions, eagerly or as CUDA graphs, and their streams.
"""
