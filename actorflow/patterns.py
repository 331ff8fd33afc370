"""Parameters by patterns over their paths: `["head.*", "!*.bias"]`.

A pattern is a glob: `*` stands for any letters, dots too, `?` for one, `[ab]` for one of some. One
that begins with "!" takes out what it matches. Of several that match a path the last decides, and a
list that begins with "!" begins with every path.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

from compiler.errors import CompileError

Patterns = str | Sequence[str]


def wrong_patterns(given: object) -> str:
    """Return what is wrong with what should be patterns; nothing where they are."""
    patterns = [given] if isinstance(given, str) else given
    is_list = isinstance(patterns, (list, tuple)) and bool(patterns)
    if is_list and all([isinstance(p, str) and p.strip("!") for p in patterns]):  # type: ignore[attr-defined]  # a list
        return ""
    return f"a pattern over paths, such as 'head.*', or a list of some, got {given!r}"


def chosen(patterns: Patterns, paths: Sequence[str], what: str) -> tuple[str, ...]:
    """Return the paths that patterns choose, in the order of `paths`.

    Raises CompileError, which begins with `what`, for a pattern that matches no path.
    """
    listed = [patterns] if isinstance(patterns, str) else list(patterns)
    found = dict.fromkeys(paths, listed[0].startswith("!"))
    for pattern in listed:
        glob = pattern.removeprefix("!")
        matched = [path for path in paths if fnmatchcase(path, glob)]
        if not matched:
            raise CompileError(
                f"{what}: pattern {pattern!r} matches no parameter; {_near(glob, paths)}"
            )
        found.update(dict.fromkeys(matched, not pattern.startswith("!")))
    return tuple([path for path, is_chosen in found.items() if is_chosen])


def _near(glob: str, paths: Sequence[str]) -> str:
    below = [path for path in paths if fnmatchcase(path, f"{glob}.*")]
    if below:
        return f"write {glob + '.*'!r} for what is below"
    near = get_close_matches(glob, paths, cutoff=0.4) or paths[:3]
    return f"there is {', '.join(map(repr, near))}" if near else "the model has none"
