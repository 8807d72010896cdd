"""
The specification: what the contract promises, independent of any implementation.

``contract.md`` is the whole specification as one text. It is generated from the data here:
``clauses/`` (what is refused, with cause and remedy), ``transitions`` and ``guards`` (the calls,
and the order of their checks), ``columns`` (the state), ``promises/`` (what a caller may rely on,
stated with the terms of ``world``), ``ranks``, ``constants``, and the prose of ``chapters/``. The
lemmas of the proofs are in ``verification``.
"""
