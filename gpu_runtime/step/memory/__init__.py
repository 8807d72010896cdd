"""
Device memory of a step: slots, gradient destinations and their sums, counters, numerical state.
"""
