"""
Build steps beyond pyproject.toml: the version comes from git, and source distributions keep links.

A tagged commit has its tag's version. Any other commit has the version of the next release, a count
of commits and the commit id: `0.1.0.dev12+g0123...`. If tracked files differ from the commit,
`.changes` is added.

Setuptools would put the files of a linked folder into the archive twice, under the link and beside
it. The test suite, the linters and an editable install need the links.
"""

from __future__ import annotations

import email
import subprocess
from pathlib import Path

from setuptools import setup
from setuptools.command.sdist import sdist

#: The next release; a tag `v0.1.0` makes it.
RELEASE = "0.1.0"
HERE = Path(__file__).resolve().parent
LINKS = [path for path in sorted(Path("qeffect").iterdir()) if path.is_symlink()]


class SourceTree(sdist):
    """A source distribution in which `qeffect/spec` and its like are links."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        """Put the files of linked folders in place once, and then the links."""
        left = [file for file in files if not set(Path(file).parents) & set(LINKS)]
        super().make_release_tree(base_dir, left)
        for link in LINKS:
            Path(base_dir, link).symlink_to(link.readlink())


def git(*words: str) -> str | None:
    """What git prints, None if it fails."""
    try:
        done = subprocess.run(
            ["git", "-C", str(HERE), *words], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def version() -> str:
    """The version of this tree; a tree without git has its archive's, or the next release's."""
    top = git("rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != HERE:
        archived = HERE / "PKG-INFO"
        if archived.exists():
            return email.message_from_string(archived.read_text("utf-8"))["Version"]
        return RELEASE
    changes = ".changes" if git("status", "--porcelain", "--untracked-files=no") else ""
    tag = git("describe", "--tags", "--exact-match", "--match", "v*")
    if tag and not changes:
        return tag.removeprefix("v")
    count, head = git("rev-list", "--count", "HEAD"), git("rev-parse", "HEAD")
    return f"{RELEASE}.dev{count}+g{head}{changes}"


setup(version=version(), cmdclass={"sdist": SourceTree})
