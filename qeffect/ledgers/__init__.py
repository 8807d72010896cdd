"""
The ledgers of a contract: the bookkeeping parts of which `qeffect.contract.Contract` is composed.

Each part has its own state, and all parts run their state changes through one shared `Runner`.
"""
