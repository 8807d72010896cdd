"""
The one thing that pyproject.toml cannot say: a source distribution keeps the links of the tree.

Setuptools puts a linked folder's files into the archive twice, under the link and beside it. The
suite, the linters and an editable install want the tree as it is.
"""

from __future__ import annotations

from pathlib import Path

from setuptools import setup
from setuptools.command.sdist import sdist

LINKS = [path for path in sorted(Path("qeffect").iterdir()) if path.is_symlink()]


class SourceTree(sdist):
    """A source distribution in which `qeffect/spec` and its like are links."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        """Put the files of linked folders in place once, and then the links."""
        left = [file for file in files if not set(Path(file).parents) & set(LINKS)]
        super().make_release_tree(base_dir, left)
        for link in LINKS:
            Path(base_dir, link).symlink_to(link.readlink())


setup(cmdclass={"sdist": SourceTree})
