"""
What QEffect promises: the contract in numbered clauses and its invariants as predicates.
"""
