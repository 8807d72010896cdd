"""
A training runtime that asks QEffect's contract before every action: F, dI and dW.

An action is a forward (F), a computation of input gradients (dI) or of weight gradients (dW). This
is a training step, from the command to the launch of a CUDA graph:

1. `qeffect/cli/` finds `commands.py` by entry point. `commands.py` builds a function's name from
   the command's name: `train` calls `run_train` of `training/command.py`, or with ``--compare``
   `run_train` of `lab/commands/train.py`. `run_train` reads the configuration file and connects
   this process with the other ranks.
2. `training/loop.py` builds this rank's worker and calls `StepRunner.step` of
   `training/step_runner.py`.
3. `ranks/worker.py` holds a rank's runtime, connections and optimizer. `Worker.step` calls
   `ranks/pipeline.py`, which runs the rank's actions and messages in the order of the schedule.
4. `step/actions.py` performs one F, dI or dW: it asks the contract, acts, and reports to the
   contract. The executor that `runtime/assembly.py` chose for the mode runs the action itself
   (`step/performer.py`).
5. `step/graphs.py` replays the slot's CUDA graph; in mode ``eager``, `step/eager.py` calls the
   layers of `backends/`.
6. `runtime/epoch.py` makes gradients final. All ranks agree to the update (`ranks/consent.py`).
   Then `runtime/epoch.py` updates the weights and commits the epoch.

In mode ``one launch`` the first step runs in this way, and the second step is captured
(`ranks/step_capture.py`). From then on the device work of items 3 to 6 is one launch of the
captured graph (`ranks/one_launch.py`). The host asks the contract for the whole step before each
launch (`ranks/rehearsal.py`).

The package's folders and modules are called rooms. In this list, each room imports only rooms that
come before it: `backends/` (layers), `report.py`, `step/` (one action, its memory, graphs and
streams), `runtime/` (one process), `operators.py` (actions as operators of torch), `ranks/` (the
pipeline), `training/`, `doctor.py`, `lab/` (compares, times and reports) and `commands.py`, which
imports the module of each command by name. `guards/` is a layer beside these rooms, and is
installed as `qeffect.guards`. `README.md` describes every room; `renamed.py` has the names of
earlier releases.

Importing this package imports neither torch, Transformer Engine nor CUDA.
"""

from qeffect.renamed import install

from .renamed import MODULES, NAMES

install(__name__, MODULES, NAMES)
