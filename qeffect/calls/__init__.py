"""
The calls of a contract by kind: the classes that `qeffect.contract.Contract` inherits.
"""
