"""
Ranks: several contracts that exchange messages, move their weights together and stop together.
"""
