"""
Plans of a step: the order of a rank's actions, its line of the schedule table with messages, and
the slots (sets of buffers) that they need.
"""
