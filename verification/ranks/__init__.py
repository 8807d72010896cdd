"""
The model of ranks: several contracts that exchange messages, update their weights together and stop
together.
"""
