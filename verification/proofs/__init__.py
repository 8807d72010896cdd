"""
Proofs: obligations (formulas to prove) from the transitions' paths, and the solvers that answer
them.
"""
