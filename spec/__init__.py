"""
The specification: what the contract promises, apart from any implementation.

``contract.md`` is all of it as one text, written from the data here: ``clauses/`` (what is refused,
with cause and remedy), ``transitions`` and ``guards`` (what is called, and the order of what it
checks), ``columns`` (the state), ``promises/`` (what may be relied on) in the words of ``world``,
``constants``, and the prose of ``chapters/``. What the proofs need besides is in ``verification``.
"""
