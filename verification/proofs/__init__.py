"""
Proofs: obligations from the transitions' paths, and the solvers that answer them.
"""
