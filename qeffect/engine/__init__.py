"""
The engine: composes the relations' guards and writes into transitions that run over plain memory.
"""
