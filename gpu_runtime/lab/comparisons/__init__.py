"""
Compare recorded runs bit for bit: guarded steps with steps of the library's own full backward.
"""
