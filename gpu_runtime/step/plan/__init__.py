"""
Plans: the order of a rank's actions, and the slots that they need.
"""
