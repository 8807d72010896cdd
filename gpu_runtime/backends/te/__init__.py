"""
Transformer Engine behind the backend protocol. The only room that imports the library.
"""
