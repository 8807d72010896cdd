"""
The ledgers of a contract: the parts that `qeffect.contract.Contract` is composed of.

Each part is constructed from what it needs, keeps its own books, and runs its transitions through
the one `Runner` that they share.
"""
