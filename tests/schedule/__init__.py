"""
Tests of `qeffect.schedule`: tables, checks of ranks, bindings, plans, pictures and verdicts.
"""
