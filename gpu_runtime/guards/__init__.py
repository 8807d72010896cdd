"""
Guards for other people's frameworks, one module each: ``from qeffect.guards import pipelining``.

One line of code installs a guard, and one line removes it. A guard changes no file and no option of
the framework. It refuses or reports each action that breaks the contract. The guards share four
modules: `evidence` (did a computation run?), `reports` (violations), `advice` (causes and remedies)
and `meeting` (an exchange among ranks). Inside QEffect only one module imports this folder: the
report that times the guard of torch's pipeline.
"""
