"""
Public failures of FP8 pipeline training, re-enacted: which of them the contract refuses.

Each failure was reported in public by a project that this one has no part in. A re-enactment is a
transcription of the reported cause, in our own words, as the calls that a runtime with that fault
would make, or as the table that it would run. It is no run of the project's code. It is written
once and run twice: as reported, and with the reported step put right (`History.legal`), so that a
refusal says something: the legal run goes on to the optimizer's commit.

`model` says what a row is and runs it, `history` is the vocabulary of re-enactments, `catalogue`
collects the rows, which stand in one module for each relation. What needs torch or a device is in
`tests/failures`, and a row says so.
"""
