"""
Found and expected of every refusal, by relation; `qeffect.explain` joins the tables.
"""
