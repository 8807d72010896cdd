"""
Random walks over real contracts, and the oracle that decides from their history which calls are
legal.
"""
