"""Two torchrun agents on one machine that train one run, as agents on two hosts do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.ports import free_port
from tests.ranks.rank_logs import replayed_run

from .helpers import SMALL, text

#: Seconds for the whole of a disturbed run.
LIMIT_S = 240.0
STEPS = 300
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
TRAIN = ("-m", "qeffect", "runtime", "train")
RUN = (
    SMALL.format(vocabulary=128, layers=2)
    + f"""[parallel]
pp = 2
schedule = "1f1b"
microbatches = 2
[data]
train = "train.npy"
[optimizer]
rate = 0.01
warmup = 2
[checkpoint]
folder = "kept"
every = 20
[run]
steps = {STEPS}
log = "log.jsonl"
log_every = 20
event_logs = "logs"
[limits]
start_s = 60
commit_s = 30
"""
)


class Agents:
    """
    Two agents, each with one worker, and a run in a folder.

    Args:
        folder: An empty folder for the run and the agents' output.
        share: Whether agents keep one store over all rounds, as they do by default. A restarted
            agent then cannot join, because torch 2.13 publishes the store's address only in the
            first round.
    """

    def __init__(self, folder: Path, *, share: bool = True) -> None:
        self.folder, self.share = folder, share
        self.config = folder / "r.toml"
        self.config.write_text(RUN)
        text(folder)
        self.port = free_port()
        self.agents: dict[int, subprocess.Popen[bytes]] = {}
        self.ended = time.monotonic() + LIMIT_S

    def start(self, agent: int) -> None:
        """
        Start an agent; agent 0 hosts the rendezvous.

        Each agent has its own loopback address. Agents are numbered in the order of their
        addresses, so that the worker of agent 0 is rank 0 in every round.
        """
        command = [
            *TORCHRUN, "--nnodes", "2", "--nproc-per-node", "1",
            "--max-restarts", "3", "--rdzv-backend", "c10d",
            "--rdzv-endpoint", f"127.0.0.1:{self.port}", "--rdzv-conf", f"is_host={1 - agent}",
            "--rdzv-id", "run", "--local-addr", f"127.0.0.{agent + 1}",
            *TRAIN, str(self.config), "--resume", "--quiet",
        ]  # fmt: skip
        with (self.folder / f"agent{agent}.txt").open("ab") as out:
            given = {
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": str(int(not self.share)),
            }
            self.agents[agent] = subprocess.Popen(command, stdout=out, stderr=out, env=given)

    def train_alone(self) -> None:
        """Train the run under one agent with both workers."""
        words = [*TORCHRUN, "--standalone", "--nproc-per-node", "2", *TRAIN, str(self.config)]
        given = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run([*words, "--quiet"], env=given, check=True, timeout=LIMIT_S)

    def worker(self, agent: int) -> int:
        """Return the process of an agent's worker."""
        pid = self.agents[agent].pid
        (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return int(child)

    def kill_agent(self, agent: int) -> None:
        """Kill an agent at once; its worker continues as an orphan."""
        self.agents[agent].kill()
        self.agents[agent].wait()

    def kill_host(self, agent: int) -> None:
        """Kill an agent and its worker at once."""
        worker = self.worker(agent)
        self.kill_agent(agent)
        os.kill(worker, signal.SIGKILL)

    def kill_worker(self, agent: int) -> None:
        """Kill an agent's worker at once."""
        os.kill(self.worker(agent), signal.SIGKILL)

    def wait(self, reached: Callable[[], bool]) -> None:
        """Wait until a condition holds; the test fails if the condition does not hold in time."""
        while not reached():
            assert time.monotonic() < self.ended, self.said()
            time.sleep(0.05)

    def trained(self, steps: int) -> bool:
        """Whether a checkpoint of this step, or of a later step, exists."""
        return any(self.folder.glob("kept/step-*")) and steps <= max(
            int(path.name.removeprefix("step-")) for path in self.folder.glob("kept/step-*")
        )

    def codes(self) -> list[int]:
        """Wait for both agents, and return their exit codes."""
        self.wait(lambda: all(agent.poll() is not None for agent in self.agents.values()))
        return [self.agents[agent].returncode for agent in sorted(self.agents)]

    def replayed(self) -> int:
        """Replay the rank logs through the model of ranks; return how many attempts they have."""
        return replayed_run(self.folder / "logs", 2 * (STEPS - 20)).attempts

    def log(self) -> list[dict[str, Any]]:
        """Return the lines of the run's log."""
        found = (self.folder / "log.jsonl").read_text().splitlines()
        return [json.loads(line) for line in found]

    def losses(self) -> list[float]:
        """Return the losses by step; for a step that ran again, the last loss counts."""
        found = {line["step"]: line["loss"] for line in self.log() if "loss" in line}
        return [found[step] for step in range(STEPS)]

    def resumes(self) -> list[int]:
        """Return the steps at which the run was resumed."""
        return [line["step"] for line in self.log() if "resumed" in line]

    def runs(self, process: int) -> bool:
        """Whether a process runs and is not a zombie."""
        try:
            return ") Z" not in Path(f"/proc/{process}/stat").read_text()
        except FileNotFoundError:
            return False

    def said(self) -> str:
        """Return the last lines that both agents and their workers printed."""
        return "\n".join(path.read_text()[-3000:] for path in self.folder.glob("agent*.txt"))

    def end(self) -> None:
        """Kill both agents and their workers."""
        for agent, process in self.agents.items():
            if process.poll() is None:
                for act in (self.kill_worker, self.kill_agent):
                    try:
                        act(agent)
                    except (OSError, ValueError):  # it has none
                        continue
