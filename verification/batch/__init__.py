"""
The batch reading: the path table compiled to NumPy over many states at a time.
"""
