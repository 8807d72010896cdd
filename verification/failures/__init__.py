"""
Public failures of FP8 pipeline training, re-enacted: which the contract refuses.

Each failure was reported in public by another project. A re-enactment states the reported cause in
our own words: as the calls that a runtime with that fault would make, or as the table that it would
run. It never runs the code of the project that failed. Each re-enactment is written once and run
twice: as reported, and with the faulty step corrected (`History.legal`). The corrected run must
reach the optimizer's commit; otherwise a refusal of the faulty run would prove nothing.

`failure` defines a row and runs it, `history` is the vocabulary of re-enactments, and `catalogue`
collects the rows, which stand in one module per relation. Parts that need torch or a device are in
`tests/failures`; the row names the test.
"""
