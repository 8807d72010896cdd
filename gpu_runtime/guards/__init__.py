"""
Guards that check other frameworks, with one module per framework: ``from qeffect.guards import
pipelining``.

One line of code installs a guard, and one line removes the guard. A guard changes no file and no
option of the framework. Each action that breaks the contract is refused or reported.

The guards share these modules. `works` and `recurring` call the contract. `judging` refuses or
reports a violation. `evidence` finds out whether a computation ran. `advice` contains causes and
remedies. `reports` collects violations. `trust` contains the sentences of `on_trust`. `releases`
checks the framework's release. Inside QEffect only the measurement laboratory (`gpu_runtime/lab`)
imports this folder.
"""
