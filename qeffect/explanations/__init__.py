"""
For every clause, the texts of what was found and expected; `qeffect.explain` joins these tables.
"""
