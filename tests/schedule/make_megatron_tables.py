"""
Record what the loops of a Megatron-core release run and send, rank by rank, as tables.

    python -m tests.schedule.make_megatron_tables megatron_core-0.19.2-....whl [more wheels]

The release's own code runs: `forward_backward_pipelining_with_interleaving`,
`..._without_interleaving`, `P2PCommunicator`, and the functions that post messages. Three parts are
replaced: F and B only record that they ran; `torch.distributed` only records the posted messages;
and the device is a CPU. One process therefore runs the ranks one after the other. Messages get
their names as in `qeffect.schedule.megatron`: a sent tensor is named after the F or B that made it,
and a received tensor after the F or B that used it. A folder that contains the package `megatron`
may replace a wheel.

Needs torch. The tables go to `megatron_tables/<version>/`.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

FOLDER = Path(__file__).parent / "megatron_tables"
#: Ranks, virtual stages, microbatches, and the group of microbatches if it is not the ranks.
SHAPES: tuple[tuple[int, int, int, int | None], ...] = (
    (2, 1, 4, None),
    (4, 1, 2, None),
    (4, 1, 8, None),
    (2, 2, 2, None),
    (2, 2, 4, None),
    (2, 2, 5, 3),
    (2, 3, 6, None),
    (3, 2, 6, None),
    (4, 2, 8, None),
    (4, 2, 12, 6),
    (4, 3, 11, 7),
)
MANNERS = {
    "batched": (True, False, False),
    "overlapped": (False, True, False),
    "prefetched": (False, True, True),
    "plain": (False, False, False),
}
#: The functions of a release that post messages together.
POSTS = ("_batched_p2p_ops", "_p2p_ops")
#: A module of 0.19 that cannot be imported without triton.
NEEDS_TRITON = "megatron.core.transformer.moe.ops.paged_stash"


def name_of(pp: int, vpp: int, microbatches: int, group: int | None, messages: str) -> str:
    """Return the name of a table's file."""
    grouped = "" if group is None else f"_n{group}"
    return f"pp{pp}_vpp{vpp}_m{microbatches}{grouped}.{messages}.csv"


def main(sources: list[str]) -> None:
    """Record the tables of one release, which the process imports under the release's own name."""
    for source in sources:
        with tempfile.TemporaryDirectory() as scratch:
            place = Path(source)
            if place.suffix == ".whl":
                zipfile.ZipFile(place).extractall(scratch)
                place = Path(scratch)
            version, rows = record(place)
        folder = FOLDER / version
        folder.mkdir(parents=True, exist_ok=True)
        for name, table in rows.items():
            text = "".join(",".join(row) + "\r\n" for row in table)
            (folder / name).write_text(text, encoding="utf-8", newline="")
        print(f"{folder}: {len(rows)} tables")


def record(place: Path) -> tuple[str, dict[str, list[list[str]]]]:
    """
    Run a release's loops for all shapes.

    Args:
        place: The folder that contains the package `megatron`.

    Returns:
        The version, and the rows of each table by its file's name.
    """
    with mock.patch.object(sys, "path", [str(place), *sys.path]), _importable():
        core = importlib.import_module("megatron.core")
        loops = importlib.import_module("megatron.core.pipeline_parallel.schedules")
        p2p = importlib.import_module("megatron.core.pipeline_parallel.p2p_communication")
        config = importlib.import_module("megatron.core.model_parallel_config")
    tables = {}
    with _on_a_cpu():
        for pp, vpp, microbatches, group in SHAPES:
            for messages, (batch, overlap, prefetch) in MANNERS.items():
                if vpp == 1 and overlap:
                    continue
                tables[name_of(pp, vpp, microbatches, group, messages)] = [
                    _Recorder(loops, p2p, config.ModelParallelConfig, pp, vpp, group, rank).run(
                        microbatches, batch, overlap, prefetch
                    )
                    for rank in range(pp)
                ]
    for module in [name for name in sys.modules if name.partition(".")[0] == "megatron"]:
        del sys.modules[module]
    return str(core.__version__), tables


@contextmanager
def _importable() -> Iterator[None]:
    """
    Install a stand-in for the only module of GPU kernels that is imported at once; no code here
    uses this module.
    """
    absent: Any = mock.MagicMock()
    sys.modules[NEEDS_TRITON] = absent
    yield


@contextmanager
def _on_a_cpu() -> Iterator[None]:
    import torch
    from torch.overrides import TorchFunctionMode

    class AsCpu(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            given = dict(kwargs or {})
            if str(given.get("device", "")).startswith("cuda"):
                given["device"] = "cpu"
            return func(*args, **given)

    with (
        AsCpu(),
        mock.patch.object(torch.cuda, "current_device", return_value="cpu"),
        mock.patch.object(torch.cuda, "synchronize"),
    ):
        yield


class _Group:
    """A process group that only knows its size and this process's place."""

    def __init__(self, size: int, rank: int) -> None:
        self._size, self._rank = size, rank

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank


class _Posted:
    def wait(self) -> None:
        """Return at once, because no message is really sent."""


class _Recorder:
    """The actions and messages of one rank in one step."""

    def __init__(
        self,
        loops: Any,
        p2p: Any,
        config: Any,
        pp: int,
        vpp: int,
        group: int | None,
        rank: int,
    ) -> None:
        self.loops, self.p2p, self.config = loops, p2p, config
        self.pp, self.vpp, self.group, self.rank = pp, vpp, group, rank
        self.groups = loops.ProcessGroupCollection
        #: Entries, and for a message its tensor's identity with "SEND" or "RECV".
        self.row: list[str | tuple[int, str]] = []
        self.names: dict[tuple[int, str], str] = {}
        self.made: dict[int, tuple[int, int]] = {}
        self.kept: list[Any] = []
        self.posted: list[tuple[int, str]] = []

    def run(self, microbatches: int, batch: bool, overlap: bool, prefetch: bool) -> list[str]:
        import torch
        import torch.distributed as dist

        many = self.vpp > 1
        config = self.config(
            pipeline_model_parallel_size=self.pp,
            virtual_pipeline_model_parallel_size=self.vpp if many else None,
            pipeline_dtype=torch.float,
            batch_p2p_comm=batch,
            overlap_p2p_comm=overlap,
            overlap_p2p_comm_warmup_flush=prefetch,
            microbatch_group_size_per_vp_stage=self.group,
        )
        config.hidden_size = 1
        config.fine_grained_activation_offloading = False
        chunks = [torch.nn.Identity() for _ in range(self.vpp)]
        for chunk in chunks:
            chunk.config, chunk.model_type = config, "stub"  # type: ignore[assignment]
        here, alone = _Group(self.pp, self.rank), _Group(1, 0)
        posts = {
            "P2POp": lambda op, *rest: (op, rest),
            "batch_isend_irecv": lambda ops: [op(*rest) for op, rest in ops],
            "isend": self._isend,
            "irecv": self._irecv,
            "is_initialized": lambda: True,
            "get_backend": lambda *_: "nccl",
            "get_global_rank": lambda _, rank: rank,
        }
        with (
            mock.patch.multiple(dist, **posts),
            mock.patch.multiple(
                self.loops, forward_step=self._forward, backward_step=self._backward
            ),
            mock.patch.multiple(
                self.p2p, **{name: self._exchange(getattr(self.p2p, name)) for name in POSTS}
            ),
        ):
            communicator = self.p2p.P2PCommunicator(pp_group=here, config=config)
            run = (
                self.loops.forward_backward_pipelining_with_interleaving
                if many
                else self.loops.forward_backward_pipelining_without_interleaving
            )
            run(
                forward_step_func=None,
                data_iterator=[None] * self.vpp if many else None,
                model=chunks if many else chunks[0],
                num_microbatches=microbatches,
                seq_length=1,
                micro_batch_size=1,
                p2p_communicator=communicator,
                pg_collection=self.groups(
                    tp=alone, cp=alone, pp=here, embd=alone, pos_embd=alone, dp_cp=alone
                ),
            )
        return [self.names[entry] if isinstance(entry, tuple) else entry for entry in self.row]

    def _isend(self, tensor: Any, dst: int = 0, group: Any = None) -> _Posted:
        return self._post("SEND", tensor)

    def _irecv(self, tensor: Any, src: int = 0, group: Any = None) -> _Posted:
        return self._post("RECV", tensor)

    def _post(self, way: str, tensor: Any) -> _Posted:
        self.kept.append(tensor)
        self.posted.append((id(tensor), way))
        return _Posted()

    def _exchange(self, post: Any) -> Any:
        """
        Wrap a function that posts messages together: no message waits for another, and sends are
        posted first.
        """

        def run(**given: Any) -> Any:
            done = post(**given)
            self.row += sorted(self.posted, key=lambda message: message[1] == "RECV")
            self.posted.clear()
            return done

        return run

    def _name(self, given: Any, kind: str, work: tuple[int, int]) -> None:
        tensor = given[0] if isinstance(given, list) else given
        if tensor is not None:
            self.kept.append(tensor)
            self.names[id(tensor), kind[:4]] = f"{work[0]}{kind}{work[1]}"

    def _forward(self, *args: Any, **given: Any) -> Any:
        import torch

        work = ((given.get("vp_stage") or 0) * self.pp + self.rank, given["current_microbatch"])
        self._name(args[4], "RECV_F", work)
        self.row.append(f"{work[0]}F{work[1]}")
        output = torch.zeros(1, requires_grad=True)
        self.made[id(output)] = work
        self._name(output, "SEND_F", work)
        return (output if self.vpp > 1 else [output]), torch.zeros([], dtype=torch.int)

    def _backward(self, taken: Any, output: Any, gradient: Any, *_: Any) -> Any:
        import torch

        work = self.made[id(output[0] if isinstance(output, list) else output)]
        self._name(gradient, "RECV_B", work)
        self.row.append(f"{work[0]}B{work[1]}")
        made = torch.zeros(1)
        self._name(made, "SEND_B", work)
        return [made] if isinstance(output, list) else made


if __name__ == "__main__":
    main(sys.argv[1:])
