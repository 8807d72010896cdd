"""
Links of the pages lead somewhere, and the files that pages name exist.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.blocks import KERNEL_PAGE, ROOT, RUNTIME_PAGE
from tests.docs.code import PAGES
from tests.docs.links import anchors, headings, inlined

#: Pages about files of torch, TorchTitan and Megatron-core.
OTHERS_FILES = (
    "tests/failures/megatron_batched_messages.md",
    "tests/failures/megatron_stale_weights.md",
    "tests/failures/torch_deferred_receives.md",
    "tests/failures/torch_inferred_shapes_reduce_early.md",
    "tests/failures/torch_replicas_not_reduced.md",
    "tests/failures/torchtitan_lost_gradient.md",
    "CHANGELOG.md",
)


def text_of(page: Path) -> str:
    """A page as it is checked in, with the targets of all links in the links."""
    return inlined(page.read_text(encoding="utf-8"))


def test_links_of_every_page_are_looked_at() -> None:
    """The checked pages include those with which a reader begins."""
    begun = ("README.md", "CONTRIBUTING.md", "gpu_runtime/README.md", "qeffect/README.md")
    generated = (page.relative_to(ROOT).as_posix() for page in (KERNEL_PAGE, RUNTIME_PAGE))
    assert {*begun, *generated} <= set(PAGES)
    assert not [name for name in PAGES if "site-packages" in name]


def links_of(text: str) -> list[str]:
    """The links and pictures of a page that stay within the repository."""
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]


@pytest.mark.parametrize("name", PAGES)
def test_linked_files_and_headings_exist(name: str) -> None:
    """
    Every relative link and picture leads to a file, and to a heading, or to the first line of a
    function, if it names one.
    """
    page = ROOT / name
    for link in links_of(text_of(page)):
        path, _, heading = link.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), link
        if found.suffix == ".py" and heading:
            line = found.read_text(encoding="utf-8").splitlines()[
                int(heading.removeprefix("L")) - 1
            ]
            assert line.startswith(("@", "def ")), link
        else:
            known = {*headings(text_of(found)), *anchors(text_of(found))} if heading else {""}
            assert heading in known, link


def test_a_link_that_leads_nowhere_is_seen(tmp_path: Path) -> None:
    """A comment in a code block does not count as a heading."""
    page = tmp_path / "page.md"
    page.write_text("# One `word`, two\n```sh\n# no heading\n```\n[a](b.md#c) ![d](e.svg)\n")
    assert ["b.md#c", "e.svg"] == links_of(text_of(page))
    assert {"one-word-two"} == headings(text_of(page))


@pytest.mark.parametrize("name", [name for name in PAGES if name not in OTHERS_FILES])
def test_named_files_exist(name: str) -> None:
    """A file in code font is found from the page's folder, the top, or a top-level folder."""
    page = ROOT / name
    tops = ("qeffect", "gpu_runtime", "tests", "verification")
    starts = (page.parent, ROOT, *(ROOT / top for top in tops))
    named = re.findall(r"`([a-z][\w.]*/[\w./]+\.(?:py|json|toml|md))`", text_of(page))
    assert [] == [file for file in named if not any((s / file).exists() for s in starts)]
