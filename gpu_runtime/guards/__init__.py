"""
Guards for other people's frameworks, one module each: ``from qeffect.guards import pipelining``.

One line of code installs a guard, and one line removes it. A guard changes no file and no option of
the framework. It refuses or reports each action that breaks the contract.

The guards share these modules: `works` and `recurring` call the contract, `judging` refuses or
reports a violation, `evidence` finds out whether a computation ran, and `advice` has causes and
remedies. `reports` collects violations, `trust` has the sentences of `on_trust`, and `releases`
checks the framework's release. Inside QEffect only the measurement laboratory
(`gpu_runtime/lab`) imports this folder.
"""
