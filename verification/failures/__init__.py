"""
Re-enactments of public failures of FP8 pipeline training, to test which of them the contract
refuses.

Each failure was reported in public by another project. A re-enactment turns the reported cause into
the calls that a runtime with that fault would make, or into the table that it would run. A
re-enactment never runs code of the project that failed. Each re-enactment is written once and runs
twice: as reported, and with the faulty step corrected (`History.legal`). The corrected run must
reach the optimizer's commit; otherwise a refusal of the faulty run would prove nothing.

`failure` defines a failure's entry and runs it, `history` has the calls that re-enactments make,
and `catalogue` collects the entries, which are in one module per relation. Parts that need torch or
a device are in `tests/failures`; the entry names the test.
"""
