"""
For every clause, the texts of the found and expected values; `qeffect.explain` joins these tables.
"""
