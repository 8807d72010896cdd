"""
Random tests of real contracts (walks), and the oracle that decides from the history of calls which
calls are legal.
"""
