"""
The composition of all relations as checked-in source: how it is written, and whether it is stale.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from .compose import Joined, join
from .stage import RELATIONS, TRANSITIONS

__all__ = ["FOLDER", "PAGES", "pages", "stale", "write"]

#: Where the composed transitions are checked in.
FOLDER: Final = Path(__file__).with_name("composed")

#: The transitions of each page.
PAGES: Final[Mapping[str, tuple[str, ...]]] = {
    "refresh": ("check_refresh", "commit_refresh", "abort_refresh"),
    "forward": ("check_forward", "commit_forward", "abort_forward"),
    "dgrad": ("check_dgrad", "commit_dgrad", "abort_dgrad"),
    "wgrad": ("check_wgrad", "commit_wgrad", "abort_wgrad"),
    "tapes": ("reserve", "bind", "drop", "invalidate"),
    "transfers": ("post_receive", "finish_receive", "read", "finish_read"),
    "streams": ("submit", "join", "wait", "drain"),
    "epochs": (
        "finalize",
        "start_reduction",
        "finish_reduction",
        "fail_reduction",
        "commit_epoch",
    ),
    "restarts": ("checkpoint", "restore"),
}

_WRITTEN = "Written by ``python -m qeffect.engine``; edit ``qeffect.relations`` and write it again."

_FUTURE = "from __future__ import annotations\n"


def pages() -> dict[str, str]:
    """
    Return the text of every module of ``qeffect.engine.composed``, as the relations now say it.

    Returns:
        Source by file name.

    Raises:
        CompositionError: The halves cannot be joined without changing their meaning.

    >>> sorted(pages())[:3]
    ['__init__.py', 'dgrad.py', 'epochs.py']
    """
    modules = RELATIONS.values()
    found = {"__init__.py": _front()}
    for page, names in PAGES.items():
        joined = {name: join(name, TRANSITIONS[name], modules) for name in names}
        found[f"{page}.py"] = _page(joined)
    return found


def stale() -> list[str]:
    """Return the names of the files that differ from what the relations now say."""
    wanted = pages()
    found = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.py")}
    return sorted(name for name in {*wanted, *found} if wanted.get(name) != found.get(name))


def write() -> list[str]:
    """Write every stale file and remove those that are no page; return their names."""
    changed, wanted = stale(), pages()
    FOLDER.mkdir(exist_ok=True)
    for name in changed:
        if name in wanted:
            (FOLDER / name).write_text(wanted[name], encoding="utf-8")
        else:
            (FOLDER / name).unlink()
    return changed


def _front() -> str:
    imports = "".join(
        f"from .{page} import {', '.join(sorted(names))}\n" for page, names in sorted(PAGES.items())
    )
    return f'''"""
The contract in force: every transition as one flat function, all guards before the first write.

{_WRITTEN}
A comment names the half, as ``relation.function``, that the lines below it come from. The order of
the guards is normative: a refusal names the first that fails.

These very function objects guard a replay, and are what the explorer walks, what Z3 proves and
what NumPy batches. A composition that leaves relations out is made at run time.
"""

{_FUTURE}
{imports}
{_names(sorted(TRANSITIONS))}'''


def _page(joined: Mapping[str, Joined]) -> str:
    names = {name: value for one in joined.values() for name, value in one.names.items()}
    constants = sorted(name for name, value in names.items() if isinstance(value, int))
    imports = "from ...refusals import Refused\n" if "Refused" in names else ""
    if constants:
        line = f"from ...relations.constants import {', '.join(constants)}\n"
        if len(line) > 101:  # as the formatter would
            each = "".join(f"    {name},\n" for name in constants)
            line = f"from ...relations.constants import (\n{each})\n"
        imports += line
    if imports:
        imports += "\n"
    functions = "".join(f"\n\n{one.text}" for one in joined.values())
    title = f"The composed transitions {_listed(list(joined))}."
    if len(title) > 100:
        title = f"The composed transitions from {next(iter(joined))} to {list(joined)[-1]}."
    return f'"""\n{title}\n\n{_WRITTEN}\n"""\n\n{_FUTURE}\n{imports}{_names(joined)}{functions}'


def _listed(names: list[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}"


def _names(names: Mapping[str, Joined] | list[str]) -> str:
    """Spell ``__all__`` as the formatter would."""
    spelled = [f'"{name}"' for name in sorted(names)]
    line = f"__all__ = [{', '.join(spelled)}]\n"
    if len(line) <= 101:
        return line
    return "__all__ = [\n" + "".join(f"    {name},\n" for name in spelled) + "]\n"
