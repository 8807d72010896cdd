"""
Random walks over real contracts, and the oracle that says from their history what is legal.
"""
