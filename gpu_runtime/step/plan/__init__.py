"""
Plans of a step: the order of a rank's actions, the rank's row with messages, and the slots that
they need.
"""
