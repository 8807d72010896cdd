"""
Backends: what a layer library must answer, and the libraries that do.
"""
