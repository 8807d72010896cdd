"""
The relations and ledgers: the guards and the writes of every transition, and nothing else.
"""
