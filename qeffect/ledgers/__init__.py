"""
The ledgers of a contract: the parts that `qeffect.contract.Contract` is composed of.

Each part has its own state, and all parts run their transitions through one shared `Runner`.
"""
