"""
A training runtime that asks QEffect's contract before every action: F, dI and dW.

An action is a forward (F), a computation of input gradients (dI) or a computation of weight
gradients (dW). The contract is a list of rules; it refuses an action that breaks a rule. A training
step runs as follows, from the command to the launch of a CUDA graph:

1. `qeffect/cli/` finds `commands.py` by entry point. `commands.py` builds a function's name from
   the command's name: `train` calls `run_train` of `training/command.py`, or with ``--compare``
   `run_train` of `lab/commands/train.py`. `run_train` reads the configuration file and connects
   this process with the other ranks.
2. `training/loop.py` builds this rank's worker and calls `StepRunner.step` of
   `training/step_runner.py`.
3. `ranks/worker.py` holds a rank's runtime, connections and optimizer. `Worker.step` calls
   `ranks/pipeline.py`, which runs the rank's actions and messages in the order of the schedule.
4. `step/actions.py` performs one F, dI or dW: it asks the contract, acts, and reports to the
   contract. The action itself is run by an executor, which `runtime/assembly.py` chooses for the
   mode (`step/performer.py`).
5. `step/graphs.py` replays the action's CUDA graph; in mode ``eager``, `step/eager.py` calls the
   layers of `backends/`.
6. `runtime/epoch.py` sums and reduces the gradients. All ranks agree to the update
   (`ranks/consent.py`). Then `runtime/epoch.py` updates the weights and commits the epoch (an epoch
   is one optimizer step).

In mode ``one launch`` the first step runs in this way, but without graphs; the second step is
captured (`ranks/step_capture.py`). From then on, one launch of the captured graph does the device
work of items 3 to 6 (`ranks/one_launch.py`). Before each launch the host asks the contract about
the whole step (`ranks/rehearsal.py`).

In this list of the package's folders and modules, each folder or module imports only from those
before it: `backends/` (layers), `report.py`, `step/` (one action, its memory, graphs and streams),
`runtime/` (one process), `operators.py` (actions as operators of torch), `ranks/` (the pipeline),
`training/`, `doctor.py`, `lab/` (compares, times and reports) and `commands.py`, which imports the
module of each command by name. `guards/` is separate from this list, and is installed as
`qeffect.guards`. `README.md` describes every folder and module; `renamed.py` has the names of
earlier releases.

Importing this package imports neither torch, Transformer Engine nor CUDA.
"""

from qeffect.renamed import install

from .renamed import MODULES, NAMES

install(__name__, MODULES, NAMES)
