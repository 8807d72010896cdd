"""
The backend for Transformer Engine; no other folder imports this library.
"""
