"""
The engine: composes the relations' guards and writes into functions that run over plain memory.
"""
