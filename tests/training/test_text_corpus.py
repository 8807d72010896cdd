"""
Token files made from a user's own text: their contents, and the inputs that are refused in one
line.
"""

from __future__ import annotations

import json
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qeffect.cli import main
from qeffect.gpu_runtime.training.data import Tokens
from qeffect.gpu_runtime.training.encodings import Bytes, open_encoding
from qeffect.gpu_runtime.training.text_corpus import TextFile, blend

SENTENCE = "the quick brown fox jumps over the lazy dog.\n"


def lines(path: Path, texts: list[Any], field: str = "text") -> Path:
    """A file of JSON lines."""
    path.write_text("".join(json.dumps({field: one}) + "\n" for one in texts), "utf-8")
    return path


def corpus(out: Path, *words: object) -> int:
    """Run the command; return its exit code."""
    return main(["runtime", "corpus", "--out", str(out), "--quiet", *map(str, words)])


def refused(out: Path, capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """The one line of a command that is refused; nothing is written."""
    before = sorted(out.parent.rglob("*"))
    capsys.readouterr()
    assert corpus(out, *words) == 2
    said, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert said == ""
    assert sorted(out.parent.rglob("*")) == before
    return line


def tokens(out: Path, name: str = "train") -> list[int]:
    """The tokens of a corpus."""
    found: list[int] = np.load(out / f"{name}.npy").tolist()
    return found


def test_text_is_in_the_token_files_byte_by_byte(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Plain text and JSON lines, in the order of the files, with an end behind each text."""
    (tmp_path / "a.txt").write_text(SENTENCE * 100, "utf-8")
    texts = [f"Nummer {n}: größer" for n in range(200)]
    lines(tmp_path / "b.jsonl", [*texts, "", " "])
    out = tmp_path / "corpus"
    given = ["--text", tmp_path / "a.txt", tmp_path / "b.jsonl", "--tokenizer", "bytes"]
    assert corpus(out, *given, "--held-out", 0.1) == 0

    said = capsys.readouterr().out
    train, held_out = (
        bytes(t if t < 256 else 0 for t in tokens(out, name)).decode().split("\0")[:-1]
        for name in ("train", "held_out")
    )
    record = json.loads((out / "corpus.json").read_text())
    assert train[0] + held_out[0] == SENTENCE * 100
    assert held_out[0] == SENTENCE * 10
    assert sorted(train[1:] + held_out[1:]) == sorted([*texts, " "])
    assert train[1:] == [text for text in [*texts, " "] if text in train]
    assert 5 < len(held_out) < 50
    assert [one["empty"] for one in record["texts"]] == [0, 1]
    assert record["train_tokens"] == len(tokens(out))
    assert record["held_out_tokens"] == len(tokens(out, "held_out"))
    assert "vocabulary 272, padded from 257 tokens to a multiple of 16" in said
    assert "[model] vocabulary = 272" in said
    assert "1 empty text left out" in said
    assert sorted(path.name for path in out.iterdir()) == [
        "corpus.json",
        "held_out.npy",
        "train.npy",
    ]
    Tokens.open(out / "train.npy", vocabulary=272, sequence=64)  # what a training file reads


def test_a_blend_has_the_ratio_of_its_weights(tmp_path: Path) -> None:
    """To the token, over the whole and over every long part; no text is lost."""
    first = lines(tmp_path / "a.jsonl", ["aaaaaaaaa"] * 300)
    second = lines(tmp_path / "b.jsonl", ["bbbbbbbbbbbbbbbbbbb"] * 50)
    out = tmp_path / "corpus"
    given = ["--text", first, second, "--tokenizer", "bytes", "--held-out", 0]
    assert corpus(out, *given, "--weights", 3, 1.5) == 0

    found = np.asarray(tokens(out))
    assert len(found) == 4500
    assert (found == Bytes.end).sum() == 300 + 75
    for part in np.split(found, 5):
        ratio = (part == ord("a")).sum() / (part == ord("b")).sum()
        assert 1.7 < ratio < 2.1
    record = json.loads((out / "corpus.json").read_text())
    assert [one["train_tokens"] for one in record["texts"]] == [3000, 1500]
    assert not (out / "held_out.npy").exists()


def test_the_last_repetition_ends_where_the_ratio_is_reached(tmp_path: Path) -> None:
    """A file that is one text is cut there, and the cut has an end too."""
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(name * 99)
    out = tmp_path / "corpus"
    given = ["--text", tmp_path / "a.txt", tmp_path / "b.txt", "--tokenizer", "bytes"]
    assert corpus(out, *given, "--held-out", 0, "--weights", 1, 2.5) == 0
    found = "".join(chr(t) if t < 256 else "|" for t in tokens(out))
    assert found.count("a") == 99
    assert sorted(found.split("|")) == sorted(["a" * 99, "b" * 99, "b" * 99, "b" * 49, ""])


def test_shares_are_exact_whatever_the_sizes() -> None:
    """One file is taken once, and no file less."""
    counts, weights = [10, 7, 1000], [Fraction(1, 3), Fraction(2), Fraction(1)]
    wanted = blend(counts, weights)
    assert wanted == [333, 2000, 1000]


def test_the_same_text_is_on_the_same_side(tmp_path: Path) -> None:
    """A text decides its side alone: copies never stand in both files."""
    texts = [f"text {n}" for n in range(500)]
    sides = [
        dict(TextFile(lines(tmp_path / name, order), held_out=0.2).texts())
        for name, order in (("a.jsonl", texts), ("b.jsonl", texts[::-1] * 2))
    ]
    assert sides[0] == sides[1]
    assert 60 < sum(sides[0].values()) < 140


def test_a_trained_encoding_gives_the_text_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The text comes from many files. A text of few words gives few tokens; the vocabulary is
    padded, and the output reports this."""
    (tmp_path / "a.txt").write_text(SENTENCE * 20, "utf-8")
    lines(tmp_path / "b.ndjson", ["größer"] * 3, field="body")
    out = tmp_path / "corpus"
    given = ["--text", tmp_path / "a.txt", tmp_path / "b.ndjson", "--field", "body"]
    assert corpus(out, *given, "--held-out", 0, "--vocabulary", 4096) == 0

    encoding, record = open_encoding(out, "--corpus")
    assert encoding.decode(tokens(out)) == SENTENCE * 20 + "größer" * 3
    assert tokens(out).count(encoding.end) == 4
    assert max(tokens(out)) < record["tokens"] <= record["vocabulary"] < 400
    assert record["vocabulary"] % 16 == 0
    assert f"[model] vocabulary = {record['vocabulary']}" in capsys.readouterr().out


def words(folder: Path, vocabulary: dict[str, int]) -> Path:
    """A `tokenizer.json` of whole words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.enable_truncation(2)
    held = json.loads(made.to_str())
    held["model"]["vocab"] = vocabulary
    path = folder / "words.json"
    path.write_text(json.dumps(held))
    return path


def test_a_given_tokenizer_encodes_whole_texts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without its truncation; the vocabulary reaches its largest id; the corpus keeps it."""
    given = words(tmp_path, {"a": 0, "b": 1, "<unk>": 2, "</s>": 70_000})
    text = lines(tmp_path / "t.jsonl", ["a b a", "b c"])
    out = tmp_path / "corpus"
    assert corpus(out, "--text", text, "--tokenizer", given, "--held-out", 0) == 0

    assert tokens(out) == [0, 1, 0, 70_000, 1, 2, 70_000]
    assert np.load(out / "train.npy").dtype == np.uint32
    assert "vocabulary 70016, padded from 70,001 tokens" in capsys.readouterr().out
    encoding, record = open_encoding(out, "--corpus")
    assert (encoding.prompt("b a"), encoding.end) == ([1, 0], 70_000)
    assert (record["tokenizer"], record["end"]) == ("given", "</s>")
    assert (out / "tokenizer.json").read_bytes() == given.read_bytes()


def test_another_corpus_leaves_nothing_of_the_first(tmp_path: Path) -> None:
    """Files that the second does not have are removed with the first's others."""
    (tmp_path / "a.txt").write_text(SENTENCE * 50)
    out = tmp_path / "corpus"
    assert corpus(out, "--text", tmp_path / "a.txt", "--vocabulary", 272) == 0
    assert len(list(out.iterdir())) == 4
    (out / "mine.txt").write_text("stays")
    given = ["--text", tmp_path / "a.txt", "--tokenizer", "bytes", "--held-out", 0]
    assert corpus(out, *given) == 0
    assert sorted(path.name for path in out.iterdir()) == ["corpus.json", "mine.txt", "train.npy"]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("no.txt", None, "no.txt: cannot be read: No such file or directory; check its name"),
        ("a.txt", b"good\xff", "a.txt: expected UTF-8, found a byte that is not UTF-8, at byte 4"),
        ("a.txt", b"", "a.txt: expected text to train on, found none"),
        ("a.jsonl", b"\n \n", "a.jsonl: expected text to train on, found none"),
        ("a.jsonl", b'{"text": ""}\n', "a.jsonl: expected text to train on, found none"),
        ("a.jsonl", b'{"text": "a"}\n{"txt": 1}', "a.jsonl, line 2: expected a text in the field"),
        ("a.jsonl", b'{"txt": "a"}', "found 'txt'; name the field with --field"),
        ("a.jsonl", b'{"text": 3}', "line 1: expected a text in the field 'text', found 3"),
        ("a.jsonl", b"[1]\n", "line 1: expected a JSON object, found [1]"),
        ("a.jsonl", b'{"text": "a"\n', "line 1: expected a JSON object, found invalid JSON ("),
        (
            "a.jsonl",
            b'{"text": "a"}\n\n{"\xff',
            "line 3: expected UTF-8, found a byte that is not UTF-8",
        ),
        ("a.jsonl", b'{"text": "\\ud800"}', "line 1: expected UTF-8 in the field 'text', found a"),
    ],
)
def test_text_that_cannot_be_used_is_one_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    content: bytes | None,
    said: str,
) -> None:
    """Beside a good file; nothing is written, and a corpus of before stays as it was."""
    (tmp_path / "good.txt").write_text(SENTENCE)
    if content is not None:
        (tmp_path / name).write_bytes(content)
    given = ["--text", tmp_path / "good.txt", tmp_path / name, "--tokenizer", "bytes"]
    assert said in refused(tmp_path / "new" / "corpus", capsys, *given)

    out = tmp_path / "corpus"
    assert corpus(out, *given[:2], *given[3:]) == 0
    before = {path: path.read_bytes() for path in out.iterdir()}
    refused(out, capsys, *given)
    assert before == {path: path.read_bytes() for path in out.iterdir()}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--weights 1", "--weights: expected 2 numbers, one per file of --text, found 1"),
        ("--weights 1 0", "--weights: expected numbers above 0, found 0"),
        ("--weights 1 x", "--weights: expected numbers above 0, found x"),
        ("--weights 1 99999", "--weights: expected weights that repeat a file at most 1,000 times"),
        ("--held-out 1", "--held-out: expected a share from 0 to below 1, found 1.0"),
        ("--field body", "no file of --text ends in .jsonl or .ndjson"),
        ("--any-version", "--text replaces the standard library"),
        ("--end x", "only a tokenizer.json has a choice of end tokens"),
        ("--vocabulary 512", "the tokenizer bytes has a fixed vocabulary"),
        ("--tokenizer bytez", "found no file bytez; did you mean bytes?"),
        ("--tokenizer bpe --vocabulary 4294967296", "--vocabulary: expected a multiple of 16 from"),
        ("--tokenizer good.txt", "expected a tokenizer.json of the package tokenizers"),
    ],
)
def test_options_that_do_not_fit_are_one_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    options: str,
    said: str,
) -> None:
    """Before the folder is written."""
    monkeypatch.chdir(tmp_path)
    for name in ("good.txt", "other.txt"):
        Path(name).write_text(SENTENCE)
    given = ["--tokenizer", "bytes"] * ("--tokenizer" not in options)
    texts = ["--text", "good.txt", "other.txt"]
    assert said in refused(tmp_path / "corpus", capsys, *given, *texts, *options.split())


def test_options_of_text_need_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The standard library has no weights."""
    line = refused(tmp_path / "corpus", capsys, "--weights", "1")
    assert "add --text (or leave out --weights)" in line


def test_tokenizers_that_do_not_fit_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No end, an end that it lacks, an id over the largest vocabulary."""
    text = lines(tmp_path / "t.jsonl", ["a b"])
    out = tmp_path / "corpus"
    given = words(tmp_path, {"a": 0, "<unk>": 1})
    what = ["--text", text, "--tokenizer", given]
    assert "found none of these; name the token with --end" in refused(out, capsys, *what)
    assert "expected the token '<x>', found none" in refused(out, capsys, *what, "--end", "<x>")
    given = words(tmp_path, {"a": 0, "<unk>": 1, "</s>": 2**32 - 1})
    assert "expected token ids below 2,147,483,648" in refused(out, capsys, *what)


@pytest.mark.parametrize("tokenizer", ["bpe", "given"])
def test_without_its_package_the_message_says_what_to_install(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tokenizer: str,
) -> None:
    """`tokenizers` is an extra; bytes need none."""
    text = lines(tmp_path / "t.jsonl", ["a b"] * 20)
    named = tokenizer if tokenizer == "bpe" else words(tmp_path, {"a": 0, "</s>": 1})
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    line = refused(tmp_path / "corpus", capsys, "--text", text, "--tokenizer", named)
    assert "pip install 'qeffect[train]', or use --tokenizer bytes" in line
    assert corpus(tmp_path / "corpus", "--text", text, "--tokenizer", "bytes") == 0


def test_a_full_disk_leaves_the_folder_as_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system's own words are told."""
    (tmp_path / "a.txt").write_text(SENTENCE)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("qeffect.gpu_runtime.training.text_corpus._append", full)
    given = ["--text", tmp_path / "a.txt", "--tokenizer", "bytes"]
    line = refused(tmp_path / "deep" / "corpus", capsys, *given)
    assert "--out" in line
    assert line.endswith("No space left on device")
