"""
Proofs, exploration and random tests of the contract: other ways to run the transition functions
than on a process's real memory.
"""
