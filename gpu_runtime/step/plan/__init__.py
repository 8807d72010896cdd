"""
Plans of a step: the order of a rank's actions, the rank's row of the schedule table with messages,
and the slots (sets of buffers) that the actions need.
"""
