"""
Guards for other people's frameworks, one module each: ``from qeffect.guards import pipelining``.

A guard is put on with one line and taken off with one line, changes no file and no option of the
framework, and refuses or reports (`reports`) what breaks the contract. The guards share four
modules: `evidence` that computations ran, `reports` of violations, `advice` about them, `meeting`
of ranks. Inside QEffect only one module imports this folder: the report that times the guard of
torch's pipeline.
"""
