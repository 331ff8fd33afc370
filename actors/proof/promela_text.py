"""Pieces of Promela: blocks, inlines, events, deliveries."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from actors.transitions import Message

_INDENT = "    "


def indented(lines: Iterable[str]) -> list[str]:
    """Return lines one step further in."""
    return [_INDENT + line for line in lines]


def block(head: str, body: Iterable[str]) -> list[str]:
    """Return a head and its body in braces."""
    return [f"{head} {{", *indented(body), "}"]


def inline(head: str, conditions: list[str], body: list[str]) -> list[str]:
    """An inline that does something if all conditions hold."""
    guard = " && ".join(conditions) or "true"
    choice = ["if", f":: {guard} ->", *indented(body), ":: else -> skip", "fi;"]
    return block(f"inline {head}", choice)


def event(guard: str, body: list[str]) -> list[str]:
    """Return one choice of the loop of events, done at once, after which all is checked."""
    return [":: d_step {", *indented([f"{guard} ->", *body, "check();"]), "}"]


def delivery(channel: str, kinds: Mapping[Message, list[str]]) -> list[str]:
    """Return the choice by the kind of the message that a channel holds."""
    choice = ["if"]
    for kind, body in kinds.items():
        choice += [f":: m == {kind.name} ->", *indented(body)]
    return event(f"nempty({channel})", [f"{channel}?m;", *choice, "fi;"])


def repeated(counter: str, channel: str) -> list[str]:
    """Send as many RETURNs as a counter says, and set it to 0."""
    return [
        f"n = {counter};",
        f"{counter} = 0;",
        f"do :: n > 0 -> send_RETURN_{channel}(); n = n - 1 :: else -> break od;",
    ]


def least(terms: list[str]) -> str:
    """Return the expression for the least of some."""
    least = terms[0]
    for other in terms[1:]:
        least = f"({least} < {other} -> {least} : {other})"
    return least


def any_(conditions: list[str]) -> str:
    """Return the expression that is true where one of some is."""
    return " || ".join([f"({c})" if "&&" in c else c for c in conditions]) or "false"
