"""
The engine: relations composed into transitions, over plain memory.
"""
