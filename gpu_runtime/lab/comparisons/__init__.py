"""
Recorded runs compared bit for bit: guarded steps against native full backward.
"""
