"""
Tests of `qeffect.schedule`: tables, checks of ranks, pairings, plans, pictures and verdicts.
"""
