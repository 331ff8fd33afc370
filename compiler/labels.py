"""What a user calls a launch, in plans, memory maps, timelines and errors; whose an actor is."""

from __future__ import annotations

from collections.abc import Mapping

EVALUATE = "evaluate"
"""The first word of the names of actors whose launches evaluate between steps."""


def evaluates(actor: str) -> bool:
    """Whether an actor of this name is of the evaluation between steps, and not of the steps."""
    return actor.partition(".")[0] == EVALUATE


def made_of(op: str, attrs: Mapping[str, object]) -> tuple[str, ...]:
    """Return the user's ops that an op computes: several where it is fused, else itself."""
    members = attrs.get("members")
    return tuple(map(str, members)) if isinstance(members, tuple) else (op,)


def launch_label(op: str, attrs: Mapping[str, object], scope: str) -> str:
    """Return where in the model an op belongs and what it computes: "mlp.up + gelu", "head: sum".

    The scope of a product says which one it is, so it takes the place of its name.
    """
    first, *rest = made_of(op, attrs)
    if scope and first == "matmul" and rest:
        return " + ".join([scope, *rest])
    text = " + ".join([first, *rest])
    return f"{scope}: {text}" if scope else text
