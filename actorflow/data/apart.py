"""What two ranks' data differ in, in a few words: neither hashes nor all that is the same."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

_HASH = re.compile("[0-9a-f]{12,}")
_MOST_CHARACTERS = 40


def what_differs(own: str, first: str) -> str:
    """Return what a source's fingerprint has that another has not; "" for the same."""
    words = [re.split("[:,;]", text) for text in (own, first)]
    for mine, its in zip_longest(*words, fillvalue=""):
        if mine == its:
            continue
        names = [word.partition("=")[0] if "=" in word else "" for word in (mine, its)]
        name = names[0] if names[0] == names[1] else ""
        if all([_HASH.fullmatch(word.rpartition("=")[2]) for word in (mine, its)]):
            return f"the content of {name!r} is another" if name else "its content is another"
        if mine.isdecimal() and its.isdecimal():
            return f"its length is {mine} and not {its}"
        return f"{_cut(mine) or 'nothing more'} and not {_cut(its) or 'nothing more'}"
    return ""


def how_far_apart(own: Any, first: Any) -> str:
    """Return what a source's position has that another has not."""
    if isinstance(own, Mapping) and isinstance(first, Mapping):
        for name in dict.fromkeys([*first, *own]):
            if own.get(name) != first.get(name):
                values = [_cut(f"{name}={at.get(name)!r}") for at in (own, first)]
                return f"it stands at {values[0]} and not at {values[1]}"
    return f"it stands at {_cut(repr(own))} and not at {_cut(repr(first))}"


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."
