"""
The relations: for each, its guards (checks) and writes in every transition, and nothing else.
"""
