"""
Memory: slots, gradient destinations and their sums, numerical state.
"""
