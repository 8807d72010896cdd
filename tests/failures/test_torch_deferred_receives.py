"""
torch's `defer_pp_recv=True` silently swaps tensors, and `qeffect check` refuses the table.

`torch_deferred_receives.md` explains the fault and its cause. Here two gloo ranks run torch's own
pipeline over a plain module (`two_ranks.py`), the gradients are compared with one process without a
pipeline, and the same tables are given to `qeffect check`.

All comparisons with the reference are bit for bit, for three reasons. Every stage and microbatch is
computed by the same kernels on tensors of the same shapes on one thread. Messages are copies. In
every table here (`test_wgrads_in_order`), as in the reference, a stage's weight gradients are added
in the order of microbatches.
"""

from __future__ import annotations

import csv
import inspect
import json
import os
import re
import socket
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.pipelining import schedules

from qeffect.cli import main
from qeffect.schedule.actions import RECEIVES, SENDS, Atom, Kind, Schedule
from qeffect.schedule.check import check
from qeffect.schedule.infer import from_actions
from qeffect.schedule.tables import read_table
from qeffect.schedule.timeline import timeline
from qeffect.schedule.torch_tables import LOOPED, V_SHAPED, torch_schedule
from tests.torch_release import NEEDS_DEFERRED

from .two_ranks import MICROBATCHES, NUM_STAGES, RANKS, STAGES, batch, loss_of, module_of

ROOT = Path(__file__).resolve().parents[2]
TABLES = ROOT / "tests" / "schedule" / "torch_tables"
PICTURE = ROOT / "qeffect" / "schedule" / "pictures" / "zbv_deferred.svg"
REPORT = Path(__file__).with_name("torch_deferred_receives.md")
#: Seconds after which a process is ended; it takes about five.
LIMIT = 120
#: The two messages that change places first: where the receiver takes what, and what is sent there.
EXCHANGED = {
    "ScheduleZBVZeroBubble": ("2RECV_B0", "0SEND_F2", "1RECV_F2"),
    "ScheduleInterleavedZeroBubble": ("1RECV_F2", "2SEND_B0", "1RECV_B0"),
}

Gradients = dict[int, dict[str, Tensor]]


class Run:
    """What both ranks saw of one schedule."""

    def __init__(self, ranks: list[dict[str, Any]]) -> None:
        self.tables: list[list[list[str]]] = [rank["table"] for rank in ranks]
        self.gradients: Gradients = {k: v for rank in ranks for k, v in rank["gradients"].items()}
        self.losses: list[Tensor] = [loss for rank in ranks for loss in rank["losses"]]

    @property
    def schedule(self) -> Schedule:
        """The table that ran."""
        return from_actions(self.tables[0], source="the table that ran")


def last_lines(folder: Path) -> str:
    """The last lines that each rank wrote."""
    said = []
    for path in sorted(folder.glob("rank*.log")):
        lines = path.read_text(errors="replace").splitlines()[-15:]
        said.append("\n".join([f"{path.stem}:", *lines]))
    return "\n".join(said)


def environment(**more: str) -> dict[str, str]:
    """The environment of a rank: one thread, no GPU, this machine only."""
    only = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    if sys.platform == "linux":
        only["GLOO_SOCKET_IFNAME"] = "lo"
    return os.environ | only | more


def start(rank: int, port: int, folder: Path) -> subprocess.Popen[bytes]:
    """Start a rank as a process of its own."""
    with (folder / f"rank{rank}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.failures.two_ranks", str(rank), str(port), str(folder)],
            cwd=ROOT,
            env=environment(),
            stdout=log,
            stderr=subprocess.STDOUT,
        )


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[tuple[str, bool], Run]:
    """Both schedules, as they stand (False) and, from 2.13 on, deferred (True), on two ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    # The store stays here; port 0 lets the system choose a free one.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [start(rank, store.port, folder) for rank in range(RANKS)]
    try:
        codes = [rank.wait(LIMIT) for rank in ranks]
    except subprocess.TimeoutExpired:
        pytest.fail(f"a rank did not end within {LIMIT} s\n{last_lines(folder)}", pytrace=False)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [0] * RANKS == codes, last_lines(folder)
    saved = [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(RANKS)]
    return {key: Run([rank[key] for rank in saved]) for key in saved[0]}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Compute the reference on one thread, as the ranks do."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def reference() -> tuple[Gradients, list[Tensor]]:
    """Gradients and losses without a pipeline: one process, autograd, microbatch by microbatch."""
    stages = [module_of(stage) for stage in range(NUM_STAGES)]
    losses = []
    for data, target in zip(*(part.chunk(MICROBATCHES) for part in batch()), strict=True):
        hidden = data
        for module in stages:
            hidden = module(hidden)
        loss = loss_of(hidden, target)
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.detach())
    # torch's schedules divide by the number of microbatches (`scale_grads`).
    return {
        stage: {
            n: p.grad / MICROBATCHES for n, p in module.named_parameters() if p.grad is not None
        }
        for stage, module in enumerate(stages)
    }, losses


Message = tuple[Kind, int, int]
_SEND_OF = {Kind.RECV_F: (Kind.SEND_F, -1), Kind.RECV_B: (Kind.SEND_B, 1)}


def identity(atom: Atom) -> Message:
    """What a message, or a computation, is called."""
    return atom.kind, atom.stage, atom.microbatch


def taken(schedule: Schedule, *, in_order: bool) -> dict[Message, Message]:
    """
    For each receive of a table the send whose tensor it takes.

    Args:
        schedule: The schedule table, with sends and receives.
        in_order: Between two ranks the n-th receive takes the n-th send, as process groups have
            it. Otherwise each receive takes the message that it names.
    """
    named = {}
    queues: dict[tuple[int, int], tuple[list[Message], list[Message]]] = defaultdict(
        lambda: ([], [])
    )
    for rank, row in enumerate(schedule.atoms):
        for atom in row:
            if atom.kind in RECEIVES:
                kind, offset = _SEND_OF[atom.kind]
                send = kind, atom.stage + offset, atom.microbatch
                named[identity(atom)] = send
                queues[schedule.stage_to_rank[send[1]], rank][1].append(identity(atom))
            elif atom.kind in SENDS:
                peer = atom.stage + (1 if atom.kind is Kind.SEND_F else -1)
                queues[rank, schedule.stage_to_rank[peer]][0].append(identity(atom))
    if not in_order:
        return named
    return {
        receive: send
        for sends, receives in queues.values()
        for send, receive in zip(sends, receives, strict=True)
    }


def walk(schedule: Schedule, *, in_order: bool) -> Gradients:
    """
    The gradients that a table gives, computed in this process: no torch pipeline, no messages.

    Args:
        schedule: The schedule table, with sends and receives.
        in_order: See `taken`.
    """
    stages = [module_of(stage) for stage in range(NUM_STAGES)]
    names = [[name for name, _ in module.named_parameters()] for module in stages]
    inputs, targets = (part.chunk(MICROBATCHES) for part in batch())
    source = taken(schedule, in_order=in_order)
    home = schedule.stage_to_rank
    computed: dict[Message, Tensor] = {}
    tapes: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
    weights: dict[tuple[int, int], tuple[Tensor, ...]] = {}
    total: Gradients = {stage: {} for stage in range(NUM_STAGES)}

    def wanted(atom: Atom) -> Message | None:
        # The output or input gradient that a computation takes; None for the pipeline's two ends.
        forward = atom.kind is Kind.FORWARD
        other = atom.stage + (-1 if forward else 1)
        if other not in home:
            return None
        made = (Kind.FORWARD if forward else Kind.DGRAD, other, atom.microbatch)
        if home[other] == home[atom.stage]:
            return made
        receive = Kind.RECV_F if forward else Kind.RECV_B
        kind, stage, microbatch = source[receive, atom.stage, atom.microbatch]
        return Kind.FORWARD if kind is Kind.SEND_F else Kind.DGRAD, stage, microbatch

    def run(atom: Atom, arrived: Tensor | None) -> None:
        key = atom.stage, atom.microbatch
        module = stages[atom.stage]
        if atom.kind is Kind.FORWARD:
            x = inputs[atom.microbatch] if arrived is None else arrived
            x = x.clone().requires_grad_()
            tapes[key] = x, module(x)
            computed[identity(atom)] = tapes[key][1].detach()
        elif atom.kind is Kind.DGRAD:
            x, y = tapes.pop(key)
            head = loss_of(y, targets[atom.microbatch]) if arrived is None else y
            dx, *dw = torch.autograd.grad(head, (x, *module.parameters()), arrived)
            weights[key] = tuple(dw)
            computed[identity(atom)] = dx
        else:
            for name, gradient in zip(names[atom.stage], weights.pop(key), strict=True):
                before = total[atom.stage].get(name)
                total[atom.stage][name] = gradient if before is None else before + gradient

    rows = [
        [a for a in row if a.kind in (Kind.FORWARD, Kind.DGRAD, Kind.WGRAD)]
        for row in schedule.atoms
    ]
    while any(rows):
        moved = False
        for row in rows:
            while row:
                needs = None if row[0].kind is Kind.WGRAD else wanted(row[0])
                if needs is not None and needs not in computed:
                    break
                run(row.pop(0), None if needs is None else computed[needs])
                moved = True
        assert moved, (
            f"deadlock: the ranks wait before {[str(row[0].action) for row in rows if row]}"
        )
    return {s: {n: g / MICROBATCHES for n, g in found.items()} for s, found in total.items()}


def equal(one: Gradients, other: Gradients) -> bool:
    """Whether two sets of gradients have the same bits."""
    assert set(one) == set(other) == set(range(NUM_STAGES))
    assert all(one[s].keys() == other[s].keys() and one[s] for s in one)
    return all(torch.equal(one[s][n], other[s][n]) for s in one for n in one[s])


def differing(one: Gradients, other: Gradients) -> dict[int, float]:
    """The stages whose gradients differ: by how much, in norms, relative to the other ones."""
    found = {}
    for stage in one:
        ours, theirs = (torch.cat([g.flatten() for g in s[stage].values()]) for s in (one, other))
        if not torch.equal(ours, theirs):
            found[stage] = float((ours - theirs).norm() / theirs.norm())
    return found


@NEEDS_DEFERRED
def test_torch_has_the_option() -> None:
    """The installed torch can defer receives: without that, nothing below would say anything."""
    for cls in STAGES:
        known = inspect.signature(getattr(schedules, cls)).parameters
        assert "defer_pp_recv" in known, (
            f"expected {cls} of torch {torch.__version__} to have the option defer_pp_recv, found "
            "none; torch 2.13 and later have it"
        )


@pytest.mark.parametrize("cls", STAGES)
class TestTwoRanks:
    @pytest.mark.ci
    def test_as_it_stands(self, cls: str, runs: Mapping[tuple[str, bool], Run]) -> None:
        """Without the option losses and gradients are those of one process, bit for bit."""
        gradients, losses = reference()
        run = runs[cls, False]

        assert equal(gradients, run.gradients)
        assert [loss.item() for loss in losses] == [loss.item() for loss in run.losses]

    @pytest.mark.ci
    @NEEDS_DEFERRED
    def test_deferred_receives_give_other_gradients_and_no_error(
        self, cls: str, runs: Mapping[tuple[str, bool], Run]
    ) -> None:
        """With it, every rank ends without an error and the gradients are others, and finite."""
        gradients, _ = reference()
        run = runs[cls, True]
        wrong = differing(run.gradients, gradients)

        # That both ranks came to their end is what the fixture asserts.
        assert all(g.isfinite().all() for s in run.gradients.values() for g in s.values())
        assert not equal(gradients, run.gradients)
        assert set(range(NUM_STAGES)) == set(wrong)
        # Not a rounding, of 1e-7 in float32: some stage is wrong by more than its gradient's size.
        assert min(wrong.values()) > 0.01
        assert max(wrong.values()) > 1

    @NEEDS_DEFERRED
    def test_nothing_but_the_pairing(self, cls: str, runs: Mapping[tuple[str, bool], Run]) -> None:
        """
        The wrong gradients are those of the n-th receive taking the n-th send, bit for bit.

        With each receive taking the message that it names, the same table gives the right ones:
        only the places of receives are at fault.
        """
        gradients, _ = reference()
        run = runs[cls, True]

        assert equal(walk(run.schedule, in_order=True), run.gradients)
        assert equal(walk(run.schedule, in_order=False), gradients)
        assert equal(walk(runs[cls, False].schedule, in_order=True), gradients)

    @NEEDS_DEFERRED
    def test_only_receives_were_moved(self, cls: str, runs: Mapping[tuple[str, bool], Run]) -> None:
        """The option moves receives and nothing else; sends keep their order."""
        for row, deferred in zip(
            runs[cls, False].tables[0], runs[cls, True].tables[0], strict=True
        ):
            assert sorted(row) == sorted(deferred)
            assert [c for c in row if "RECV" not in c] == [c for c in deferred if "RECV" not in c]

    @pytest.mark.parametrize("defer", [False, pytest.param(True, marks=NEEDS_DEFERRED)])
    def test_the_table_that_ran(
        self, cls: str, defer: bool, runs: Mapping[tuple[str, bool], Run]
    ) -> None:
        """Both ranks ran one table, and it is the fixture where the release has fixtures."""
        one, other = runs[cls, defer].tables
        folder = TABLES / str(torch.__version__).split("+")[0]
        name = f"{cls}_pp2_vpp2_m4{'.defer' if defer else ''}.comms.csv"

        assert one == other
        if folder.is_dir():
            with (folder / name).open(newline="") as file:
                assert list(csv.reader(file)) == one

    @pytest.mark.parametrize("defer", [False, pytest.param(True, marks=NEEDS_DEFERRED)])
    def test_wgrads_in_order(
        self, cls: str, defer: bool, runs: Mapping[tuple[str, bool], Run]
    ) -> None:
        """Each stage's weight gradients come in microbatch order, as the reference adds them."""
        order: dict[int, list[int]] = defaultdict(list)
        for row in runs[cls, defer].schedule.atoms:
            for atom in row:
                if atom.kind is Kind.WGRAD:
                    order[atom.stage].append(atom.microbatch)

        assert {s: list(range(MICROBATCHES)) for s in range(NUM_STAGES)} == order


def checked(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], *options: str
) -> tuple[int, dict[str, Any]]:
    """`qeffect check --json` on the table that ran, saved as torch saves it."""
    path = tmp_path / "table.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(run.tables[0])
    code = main(["check", str(path), "--json", *options])
    record: dict[str, Any] = json.loads(capsys.readouterr().out)
    return code, record


@pytest.mark.parametrize("cls", STAGES)
class TestCheck:
    def test_as_it_stands(
        self,
        cls: str,
        runs: Mapping[tuple[str, bool], Run],
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        """The table that trained rightly is accepted."""
        code, record = checked(runs[cls, False], tmp_path, capsys)

        assert (0, "accepted") == (code, record["verdict"])

    @NEEDS_DEFERRED
    def test_the_table_that_ran_is_refused_and_both_messages_named(
        self,
        cls: str,
        runs: Mapping[tuple[str, bool], Run],
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        """The table that trained on swapped tensors is refused; both messages are named."""
        code, record = checked(runs[cls, True], tmp_path, capsys)
        receive, send, wanted = EXCHANGED[cls]
        finding = record["findings"][0]

        assert (1, "refused") == (code, record["verdict"])
        assert ("schedule.message-order", 1, receive) == (
            record["clause"],
            record["rank"],
            record["action"],
        )
        assert (wanted, receive) == (finding["expected"], finding["found"])
        assert [(0, send)] == [(place["rank"], place["action"]) for place in finding["related"]]
        assert f"rank 1 receives {receive} where rank 0 sends {send}" in finding["message"]

    @NEEDS_DEFERRED
    def test_a_queue_for_each_direction(
        self,
        cls: str,
        runs: Mapping[tuple[str, bool], Run],
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        """Were activations and gradients carried apart, the same table would be right."""
        code, record = checked(runs[cls, True], tmp_path, capsys, "--queues", "direction")

        assert (0, "accepted") == (code, record["verdict"])


def block(language: str) -> str:
    """The one block of a language in the issue's text."""
    (found,) = re.findall(rf"```{language}\n(.*?)```", REPORT.read_text("utf-8"), re.DOTALL)
    return str(found)


def numbers(text: str) -> dict[str, float]:
    """What a reproducer printed: a name and a number a line."""
    return {
        name: float(number)
        for name, _, number in (line.rpartition(": ") for line in text.splitlines() if line)
    }


class TestIssueText:
    @pytest.mark.ci
    @NEEDS_DEFERRED
    def test_reproducer(self, tmp_path: Path) -> None:
        """The reproducer is short, needs torch alone, and prints what the text says."""
        code = block("python")
        # Its last two lines give an address that others may use: the environment goes first.
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        script = tmp_path / "repro.py"
        script.write_text(code)
        ran = subprocess.run(
            [sys.executable, str(script)],
            cwd=tmp_path,
            env=environment(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)),
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )
        said = "\n".join(ran.stderr.splitlines()[-15:])
        stated = REPORT.read_text("utf-8").split("### Observed")[1].split("```")[1]
        found = numbers(ran.stdout)

        assert 0 == ran.returncode, said
        assert len(code.splitlines()) < 40
        assert "qeffect" not in code
        assert 5 == len(found)
        assert numbers(stated) == pytest.approx(found, rel=1e-3)
        right = found.pop("one process")
        for name, number in found.items():
            assert ("defer_pp_recv=False" in name) == (number == pytest.approx(right, rel=1e-3))

    @NEEDS_DEFERRED
    def test_the_text_names_the_lines_of_the_installed_release(self) -> None:
        """The text says where the function and its call are in the installed release."""
        version = str(torch.__version__).split("+")[0]
        place = re.search(
            rf"{re.escape(version)}: lines\s+(\d+)\s+and\s+(\d+)", REPORT.read_text("utf-8")
        )
        assert place is not None, (
            f"expected the lines of torch {version} in {REPORT.name}, found none; add them"
        )
        lines = Path(schedules.__file__).read_text("utf-8").splitlines()
        defined, called = (lines[int(number) - 1] for number in place.groups())

        assert "def _defer_recv_ops(" == defined
        assert "self.pipeline_order_with_comms = _defer_recv_ops(" == called.strip()

    @NEEDS_DEFERRED
    def test_the_suggested_change_mends_every_table(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """With the suggested change every table is accepted, and gives the right gradients."""
        change = block("diff").splitlines(keepends=True)
        before, after = (
            "".join(line[1:] for line in change if line[0] in (" ", sign)) for sign in "-+"
        )
        source = inspect.getsource(schedules._defer_recv_ops)
        assert 2 == source.count(before)
        fixed: dict[str, Any] = dict(vars(schedules))
        exec(compile(source.replace(before, after), "fixed", "exec"), fixed)
        monkeypatch.setattr(schedules, "_defer_recv_ops", fixed["_defer_recv_ops"])
        gradients, _ = reference()

        for cls in LOOPED + V_SHAPED:
            for pp, microbatches in ((2, 4), (4, 8)):
                plain, deferred = (
                    torch_schedule(
                        cls, pp=pp, microbatches=microbatches, comms=True, defer_receives=defer
                    )
                    for defer in (False, True)
                )
                assert "accepted" == check(deferred).verdict
                assert plain.rows != deferred.rows
                if cls in STAGES and pp == RANKS:
                    assert equal(walk(deferred, in_order=True), gradients)


def test_the_picture_is_drawn_of_the_table_that_ran() -> None:
    """
    The page's picture equals what `qeffect check --svg` draws of torch 2.13's table.

    `qeffect check --torch ScheduleZBVZeroBubble --pp 2 --vpp 2 --microbatches 4 --comms
    --defer-receives --svg qeffect/schedule/pictures/zbv_deferred.svg` writes it again, with torch
    2.13.0 installed.
    """
    table = TABLES / "2.13.0" / "ScheduleZBVZeroBubble_pp2_vpp2_m4.defer.comms.csv"
    schedule = attrs.evolve(
        read_table(table),
        source="torch 2.13.0 ScheduleZBVZeroBubble pp=2 vpp=2 microbatches=4 comms "
        "defer_pp_recv=True",
    )
    drawn = timeline(schedule, check(schedule).finding)

    assert PICTURE.read_text("utf-8") == drawn
    assert all(message in drawn for message in EXCHANGED["ScheduleZBVZeroBubble"])
