"""
Proofs, exploration and random tests of the contract. They run the contract's transition functions
on other memories than that of a real process.
"""
