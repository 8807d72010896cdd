"""Text from the interpreter's own library: which text is taken, held out or refused."""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path

import numpy as np
import pytest

from qeffect.cli import main
from qeffect.gpu_runtime.training import corpus
from qeffect.gpu_runtime.training.corpus import (
    ListedFile,
    differences,
    known,
    listing,
    make,
    stdlib,
)
from qeffect.gpu_runtime.training.encodings import END
from qeffect.report import UnusableError


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A library of some files, and a list of it."""
    folder = tmp_path / "Lib"
    (folder / "site-packages").mkdir(parents=True)
    (folder / "email").mkdir()
    for n in range(200):
        (folder / "email" / f"m{n}.py").write_text(f"def f{n}(): return 'ä{n}'\n", "utf-8")
    (folder / "site-packages" / "foreign.py").write_text("import this\n")
    (folder / "_sysconfigdata__linux.py").write_text("build = 1\n")
    (folder / "bad.py").write_bytes(b"# -*- latin-1 -*-\n# \xe4\n")
    (folder / "data.pickle").write_bytes(b"\0")
    lists = tmp_path / "lists"
    lists.mkdir()
    monkeypatch.setattr(corpus, "stdlib", lambda: folder)
    monkeypatch.setattr(corpus, "LISTS", lists)
    rows = "".join(f"{one}\n" for one in listing(folder))
    (lists / f"cpython-{platform.python_version()}.txt").write_text(f"# a list\n{rows}")
    return folder


@pytest.mark.ci
def test_the_list_is_of_the_version_that_it_names() -> None:
    """On a listed version nothing differs; on another version the command reports the
    difference."""
    expected = known("3.11.7")
    assert expected is not None
    assert len({one.name for one in expected}) == len(expected) > 1500
    assert "pydoc_data/topics.py" in {one.name for one in expected}  # the language's reference
    assert {one.held_out for one in expected} == {True, False}
    if platform.python_version() == "3.11.7":
        assert [] == differences(listing(stdlib()), expected)
    else:
        assert known(platform.python_version()) is None


def test_what_is_taken(library: Path) -> None:
    """Sources and texts in UTF-8; nothing that was installed, or that a build wrote."""
    names = {one.name for one in listing(library)}

    assert {f"email/m{n}.py" for n in range(200)} == names


def test_by_bytes(library: Path, tmp_path: Path) -> None:
    """Every byte of every file is in one of the two token files, with an end behind each file."""
    said = make(tmp_path / "out", tokenizer="bytes")
    both = [np.load(tmp_path / "out" / f"{name}.npy") for name in ("train", "held_out")]

    assert said["listed"]
    assert json.loads((tmp_path / "out" / "corpus.json").read_text()) == said
    assert [said["train_tokens"], said["held_out_tokens"]] == [len(tokens) for tokens in both]
    assert said["files"]["train"] + said["files"]["held_out"] == 200
    assert said["files"]["held_out"] > 0
    for tokens, held_out in zip(both, (False, True), strict=True):
        texts = bytes(int(t) if t < 256 else 0 for t in tokens).split(b"\0")[:-1]
        expected = [
            (library / one.name).read_bytes()
            for one in listing(library)
            if one.held_out == held_out
        ]
        assert expected == texts


@pytest.mark.parametrize("change", ["more", "less", "other"])
def test_a_library_that_is_not_as_listed(
    change: str, library: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command prints one line that names the first differing file. With the flag it continues,
    and its record notes this."""
    path = library / "email" / {"more": "new.py", "less": "m0.py", "other": "m0.py"}[change]
    if change == "less":
        path.unlink()
    else:
        path.write_text("changed = True\n")
    argv = ["runtime", "corpus", "--out", str(tmp_path / "out"), "--tokenizer", "bytes"]
    assert 2 == main(argv)
    (line,) = capsys.readouterr().err.splitlines()[-1:]
    assert path.name in line
    assert "1 files of" in line
    assert not (tmp_path / "out").exists()

    assert 0 == main([*argv, "--any-version"])
    assert not json.loads((tmp_path / "out" / "corpus.json").read_text())["listed"]


def test_a_version_without_a_list(library: Path, tmp_path: Path) -> None:
    """The versions that have one are named."""
    (held,) = corpus.LISTS.iterdir()
    held.rename(held.with_name("cpython-3.0.0.txt"))

    with pytest.raises(UnusableError, match=r"has listed \(3\.0\.0\)"):
        make(tmp_path / "out", tokenizer="bytes")


def test_by_pairs(library: Path, tmp_path: Path) -> None:
    """The same library gives the same tokens; they are fewer than bytes, and give the text back."""
    from tokenizers import Tokenizer

    texts = {
        one.name: (library / one.name).read_text("utf-8")
        for one in listing(library)
        if one.held_out
    }
    first, second = (make(tmp_path / name, vocabulary=512) for name in ("a", "b"))
    found = np.load(tmp_path / "a" / "held_out.npy")
    tokenizer = Tokenizer.from_file(str(tmp_path / "a" / "tokenizer.json"))

    assert first == second
    assert found.tobytes() == np.load(tmp_path / "b" / "held_out.npy").tobytes()
    assert len(found) == first["held_out_tokens"] < sum(map(len, texts.values()))
    assert "".join(texts.values()) == tokenizer.decode(found.tolist())
    assert len(texts) == found.tolist().count(tokenizer.token_to_id(END))


def test_without_the_tokenizer(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package is optional; without it a line says what else there is."""
    monkeypatch.setitem(sys.modules, "tokenizers", None)

    with pytest.raises(UnusableError, match="--tokenizer bytes"):
        make(tmp_path / "out")


@pytest.mark.parametrize("vocabulary", [100, 1000])
def test_a_vocabulary_that_does_not_fit(library: Path, tmp_path: Path, vocabulary: int) -> None:
    """The head wants a multiple of 16, and each byte a token."""
    with pytest.raises(UnusableError, match="--vocabulary: expected a multiple of 16"):
        make(tmp_path / "out", vocabulary=vocabulary)


def test_who_is_held_out_hangs_on_the_name_alone() -> None:
    """A file's content does not change its side."""
    names = [f"a/{n}.py" for n in range(3000)]
    sides = [ListedFile(name, 1, "a").held_out for name in names]

    assert sides == [ListedFile(name, 2, "b").held_out for name in names]
    assert 30 < sum(sides) < 100
