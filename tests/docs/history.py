"""A report's history in git: the sources of its commit, and the commits since then."""

from __future__ import annotations

import hashlib
import re
import subprocess

from tests.docs.blocks import ROOT

#: Folders of the package, and where they are in it.
FOLDERS = {
    "qeffect/": "",
    "gpu_runtime/guards/": "guards/",
    "gpu_runtime/": "gpu_runtime/",
    "spec/": "spec/",
    "verification/": "verification/",
}


def git(*arguments: str) -> str | None:
    """The output of git in this tree; None outside a checkout, or if git fails."""
    if not (ROOT / ".git").exists():
        return None
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return done.stdout if done.returncode == 0 else None


def of_commit(commit: str) -> str | None:
    """The digest of the package's modules in a commit; None if git does not know it."""
    listed = git("ls-tree", "-r", commit, "--", *{name.split("/")[0] for name in FOLDERS})
    if listed is None:
        return None
    lines = []
    for line in listed.splitlines():
        (mode, _, blob), name = line.split("\t")[0].split(), line.split("\t")[1]
        if name.endswith(".py") and mode != "120000":
            folder = next(folder for folder in FOLDERS if name.startswith(folder))
            lines.append(f"{FOLDERS[folder]}{name.removeprefix(folder)} {blob}\n")
    return hashlib.sha256("".join(sorted(lines)).encode()).hexdigest()


#: The age of a report as a page shows it; a page shows the age at the time it was written.
AGE = re.compile(r"(\d+|an unknown number) later")


def age(commit: str) -> str:
    """How many commits after the report's commit changed modules that the report may have run."""
    folders = {name.split("/")[0] for name in FOLDERS} - {"verification"}
    paths = [f"{folder}/**.py" for folder in folders]
    listed = git("rev-list", "--count", f"{commit[:40]}..HEAD", "--", *paths)
    return f"{'an unknown number' if listed is None else int(listed)} later"
