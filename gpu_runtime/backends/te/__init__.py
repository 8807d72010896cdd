"""
Transformer Engine behind the backend protocol: the only folder that imports the library.
"""
