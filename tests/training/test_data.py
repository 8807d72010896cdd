"""Tokens from a file: windows, their order, their position, and unusable files."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qeffect.gpu_runtime.training.corpus_digest import file_sha256
from qeffect.gpu_runtime.training.data import DataError, Loader, Tokens, save, shuffled

from .helpers import language, noise


def counted(folder: Path, count: int = 161) -> Tokens:
    """Tokens that are their own places."""
    save(folder / "counted.npy", np.arange(count))
    return Tokens.open(folder / "counted.npy", vocabulary=1 << 17, sequence=16)


class TestOrder:
    @given(st.integers(1, 400), st.integers(0, 1 << 40))
    def test_is_a_permutation(self, count: int, key: int) -> None:
        """Each window once, whatever the key."""
        assert sorted(shuffled(n, count, key) for n in range(count)) == list(range(count))

    def test_of_a_pass(self, tmp_path: Path) -> None:
        """A pass has every window once, each in an order of its own."""
        loader = Loader(tokens=counted(tmp_path), sequence=16, seed=1)
        passes = [[loader.place(10 * turn + n) for n in range(10)] for turn in range(3)]

        assert all(sorted(one) == list(range(10)) for one in passes)
        assert len({tuple(one) for one in passes}) == 3

    def test_targets_are_one_ahead(self, tmp_path: Path) -> None:
        """The target of each place is the token behind it, to the last of the window."""
        x, y = Loader(tokens=counted(tmp_path), sequence=16, shuffle=False).windows(8, 2)

        assert x.shape == y.shape == (16, 2)
        assert x.dtype == torch.int64
        assert torch.equal(x + 1, y)
        assert [128, 144] == x[0].tolist()

    def test_a_replica_has_its_share(self, tmp_path: Path) -> None:
        """The windows of a step are those of all replicas and microbatches, each once."""
        tokens = counted(tmp_path, 16 * 64 + 1)
        loader = Loader(tokens=tokens, sequence=16, shuffle=False)
        job = language(noise(tmp_path), schedule="zbv", pp=2, dp=2, microbatches=4, loader=loader)
        cpu = torch.device("cpu")
        draws = [job.batch(cpu, replica) for replica in range(2)]
        taken = [
            int(draw(step, m)[0][0, 0]) // 16 for step in (0, 1) for draw in draws for m in range(4)
        ]

        assert taken == list(range(16))

    def test_goes_on_in_the_middle_of_a_pass(self, tmp_path: Path) -> None:
        """A loader that gets the state of another loader gives the same further windows as the
        other loader."""
        tokens = counted(tmp_path, 16 * 40 + 1)
        whole = language(
            noise(tmp_path), schedule="zbv", pp=2, loader=Loader(tokens=tokens, sequence=16)
        )
        later = Loader(tokens=tokens, sequence=16)
        assert whole.loader is not None
        later.load(whole.loader.state(whole.position(3)), 3)
        # As many windows a step in twice as many microbatches of half the replicas, say.
        other = language(noise(tmp_path), schedule="zbv", pp=2, loader=later)

        cpu = torch.device("cpu")
        for step in (3, 4, 12):
            for m in range(4):
                a, b = whole.batch(cpu)(step, m), other.batch(cpu)(step, m)
                assert torch.equal(a[0], b[0])
        assert 12 == later.position

    def test_another_order_is_refused(self, tmp_path: Path) -> None:
        """A position means nothing in another order, or another file."""
        tokens = counted(tmp_path)
        held = Loader(tokens=tokens, sequence=16, seed=1).state(5)

        with pytest.raises(DataError, match=r"expected seed 1 as in the checkpoint, found 2"):
            Loader(tokens=tokens, sequence=16, seed=2).load(held, 0)
        other = Tokens.open(noise(tmp_path), vocabulary=64, sequence=16)
        with pytest.raises(DataError, match="expected tokens 161"):
            Loader(tokens=other, sequence=16, seed=1).load(held, 0)

    def test_a_file_changed_in_its_middle_is_refused(self, tmp_path: Path) -> None:
        """Length and ends are the same; the whole file's hash is not."""
        path = noise(tmp_path, 20000)
        loader = Loader(tokens=Tokens.open(path, vocabulary=64, sequence=16), sequence=16)
        held = loader.state(5)
        values = np.load(path)
        values[10000] = (values[10000] + 1) % 64
        np.save(path, values)

        changed = Tokens.open(path, vocabulary=64, sequence=16)
        assert changed.facts() == {name: held[name] for name in changed.facts()}
        with pytest.raises(DataError, match=f"expected sha256 {held['sha256']} as in the checkp"):
            Loader(tokens=changed, sequence=16).load(held, 0)

    def test_a_state_without_the_whole_hash_goes_on(self, tmp_path: Path) -> None:
        """A checkpoint of before has a hash of the ends; that one is compared."""
        tokens = Tokens.open(noise(tmp_path, 20000), vocabulary=64, sequence=16)
        loader = Loader(tokens=tokens, sequence=16)
        held = {name: value for name, value in loader.state(5).items() if name != "sha256"}

        loader.load(held, 2)
        assert (loader.position, loader.step) == (5, 2)
        with pytest.raises(DataError, match="expected sha256_of_ends"):
            loader.load({**held, "sha256_of_ends": "0" * 64}, 2)


class TestDigest:
    """The hash of a whole file, computed once."""

    def _aged(self, path: Path, content: bytes = b"tokens") -> Path:
        """A file that was written long ago."""
        path.write_bytes(content)
        os.utime(path, (1e9, 1e9))
        return path

    def _reads(self, monkeypatch: pytest.MonkeyPatch) -> list[object]:
        """The files that were read from now on."""
        real, seen = hashlib.file_digest, []

        def noted(file: object, name: str) -> object:
            seen.append(file)
            return real(file, name)  # type: ignore[arg-type]

        monkeypatch.setattr(hashlib, "file_digest", noted)
        return seen

    def test_is_kept_until_the_file_changes(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Another size, time or inode reads the file again."""
        path, seen = self._aged(tmp_path / "a.npy"), self._reads(monkeypatch)
        expected = hashlib.sha256(b"tokens").hexdigest()
        assert [file_sha256(path) for _ in range(3)] == [expected] * 3
        assert len(seen) == 1

        for edit in (
            lambda: self._aged(path, b"tokenz"),  # the same size and time in the same file
            lambda: os.utime(path, (1e9, 1e9 + 1)),
        ):
            edit()
            file_sha256(path)
        assert len(seen) == 2
        self._aged(tmp_path / "b.npy", b"tokenz").replace(path)
        os.utime(path, (1e9, 1e9 + 1))
        assert hashlib.sha256(b"tokenz").hexdigest() == file_sha256(path)
        self._aged(path, b"more tokens")
        assert hashlib.sha256(b"more tokens").hexdigest() == file_sha256(path)
        assert len(seen) == 4

    def test_of_a_young_file_is_not_kept(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A change within the clock's tick would have the same time."""
        path, seen = tmp_path / "a.npy", self._reads(monkeypatch)
        for content in (b"tokens", b"tokenz"):
            path.write_bytes(content)
            assert file_sha256(path) == hashlib.sha256(content).hexdigest()
        assert len(seen) == 2
        assert [one.name for one in tmp_path.iterdir()] == ["a.npy"]

    def test_goes_to_the_cache_folder_or_nowhere(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A folder that cannot be written does not break the run."""
        path, seen = self._aged(tmp_path / "a.npy"), self._reads(monkeypatch)
        (tmp_path / ".a.npy.sha256").mkdir()  # nothing can be written there
        (tmp_path / "file").touch()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
        assert file_sha256(path) == file_sha256(path)
        assert len(seen) == 2
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        assert file_sha256(path) == file_sha256(path)
        assert len(seen) == 3
        (kept,) = (tmp_path / "cache" / "qeffect").iterdir()

        for damage in (b"", b"[]", b"nonsense", b'{"sha256": 5}', b"\xff"):
            kept.write_bytes(damage)
            assert file_sha256(path) == hashlib.sha256(b"tokens").hexdigest()
        assert sorted(one.name for one in tmp_path.iterdir()) == [
            ".a.npy.sha256", "a.npy", "cache", "file",
        ]  # fmt: skip

    def test_of_a_file_that_changes_meanwhile_is_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Half of one content and half of another has no hash."""
        path = noise(tmp_path)
        tokens = Tokens.open(path, vocabulary=64, sequence=16)
        real = hashlib.file_digest

        def grows(file: object, name: str) -> object:
            with path.open("ab") as more:
                more.write(b"x")
            return real(file, name)  # type: ignore[arg-type]

        monkeypatch.setattr(hashlib, "file_digest", grows)
        with pytest.raises(DataError, match="the file changed while it was read"):
            Loader(tokens=tokens, sequence=16).state(0)


class TestFiles:
    def test_an_archive(self, tmp_path: Path) -> None:
        """One line says what a `.npz` is, also of a damaged one."""
        path = tmp_path / "tokens.npz"
        np.savez(path, tokens=np.zeros(40, np.uint16))
        whole = path.read_bytes()
        for content in (whole, whole[:-30]):
            path.write_bytes(content)
            with pytest.raises(DataError, match=r"found an archive of arrays \(\.npz\)") as refused:
                Tokens.open(path, vocabulary=64, sequence=16)
            assert "\n" not in str(refused.value)

    def test_large_tokens(self, tmp_path: Path) -> None:
        """A vocabulary above 65,536 takes four bytes a token."""
        save(tmp_path / "wide.npy", np.array([70000] * 20))
        tokens = Tokens.open(tmp_path / "wide.npy", vocabulary=70016, sequence=16)

        assert 4 == tokens.values.dtype.itemsize
        assert 70000 == int(tokens.window(16, 0)[0])

    @pytest.mark.parametrize(
        ("made", "said"),
        [
            (None, "file not found"),
            (b"", "expected a NumPy array"),
            (b"not an array", "expected a NumPy array"),
            (b"\x80\x04]", "found a file of another format"),
            (np.array([{}, {}], object), "expected a NumPy array"),
            (np.zeros((4, 4), np.uint16), "found 2 dimensions of uint16"),
            (np.zeros(40, np.float32), "found 1 dimension of float32"),
            (np.zeros(0, np.uint16), "expected at least 17 tokens, .*, found 0"),
            (np.zeros(16, np.uint16), "expected at least 17 tokens, .*, found 16"),
            (np.array([1] * 20 + [64], np.uint16), "found 64 at index 20"),
        ],
    )
    def test_that_cannot_be_used(self, made: object, said: str, tmp_path: Path) -> None:
        """One line that names the file and what is wrong with it."""
        path = tmp_path / "tokens.npy"
        if isinstance(made, bytes):
            path.write_bytes(made)
        elif made is not None:
            np.save(path, made)  # type: ignore[arg-type]

        with pytest.raises(DataError, match=said) as refused:
            Tokens.open(path, vocabulary=64, sequence=16)

        assert str(refused.value).startswith(str(path))
        assert "\n" not in str(refused.value)
        assert "pickle" not in str(refused.value), "the error repeats NumPy's advice about pickle"

    def test_a_truncated_one(self, tmp_path: Path) -> None:
        """A file that ends before its header says is refused."""
        path = noise(tmp_path)
        path.write_bytes(path.read_bytes()[:-100])

        with pytest.raises(DataError, match="found a damaged array"):
            Tokens.open(path, vocabulary=64, sequence=16)
