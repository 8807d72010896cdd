"""
The readings of the transition functions other than the concrete one, and what they establish.
"""
