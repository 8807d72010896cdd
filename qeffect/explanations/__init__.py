"""
What every refusal found and expected, by relation; `qeffect.explain` joins the tables.
"""
