"""
Plans of a step: the order of a rank's actions, its row with messages, and the slots both need.
"""
