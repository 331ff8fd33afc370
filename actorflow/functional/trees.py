"""Tensors in tuples, lists and dicts of any depth, as functions take and return them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from actorflow.trace.tracer import find_source
from compiler.errors import CompileError

Tree = Any
"""A tensor, None, or a tuple, list or dict of trees."""


def leaves_of(tree: Tree, what: str) -> list[Any]:
    """Return the leaves of a tree in order, dicts by keys. Raises CompileError for no tree."""
    if tree is None:
        return []
    if isinstance(tree, Mapping):
        parts = [(f"{what}[{key!r}]", tree[key]) for key in _keys(tree, what)]
    elif isinstance(tree, (tuple, list)):
        parts = [(f"{what}[{i}]", item) for i, item in enumerate(tree)]
    elif isinstance(tree, (str, bytes)) or callable(tree):
        raise CompileError(
            f"{find_source()}: {what} is {tree!r:.60}; expected a tensor, None, or a tuple, list or"
            " dict of them"
        )
    else:
        return [tree]
    return [leaf for name, part in parts for leaf in leaves_of(part, name)]


def like(tree: Tree, leaves: list[Any]) -> Any:
    """Return a tree of the same form with other leaves."""
    rest = iter(leaves)

    def build(part: Tree) -> Any:
        if part is None:
            return None
        if isinstance(part, Mapping):
            made = {key: build(part[key]) for key in _keys(part, "a tree")}
            return {key: made[key] for key in part}
        if isinstance(part, tuple) and hasattr(part, "_fields"):
            return type(part)(*[build(item) for item in part])
        if isinstance(part, (tuple, list)):
            return type(part)([build(item) for item in part])
        return next(rest)

    return build(tree)


def _keys(tree: Mapping[Any, Any], what: str) -> list[Any]:
    try:
        return sorted(tree)
    except TypeError:
        raise CompileError(
            f"{find_source()}: {what} has keys that have no order: {list(tree)!r:.60}"
        ) from None


def form_of(tree: Tree) -> Any:
    """Return what two trees of the same form have in common."""
    if tree is None:
        return None
    if isinstance(tree, Mapping):
        return "dict", tuple([(key, form_of(tree[key])) for key in _keys(tree, "a tree")])
    if isinstance(tree, (tuple, list)):
        return type(tree).__name__, tuple([form_of(item) for item in tree])
    return "tensor"


def names_of(tree: Tree, what: str) -> list[str]:
    """Return what the leaves of a tree are called in messages."""
    if tree is None:
        return []
    if isinstance(tree, Mapping):
        return [n for key in _keys(tree, what) for n in names_of(tree[key], f"{what}[{key!r}]")]
    if isinstance(tree, (tuple, list)):
        return [n for i, item in enumerate(tree) for n in names_of(item, f"{what}[{i}]")]
    return [what]


def shown(tree: Tree) -> str:
    """Return the form of a tree in words."""
    if tree is None:
        return "None"
    if isinstance(tree, Mapping):
        return "{" + ", ".join([f"{k!r}: {shown(tree[k])}" for k in _keys(tree, "a tree")]) + "}"
    if isinstance(tree, (tuple, list)):
        return "(" + ", ".join([shown(item) for item in tree]) + ")"
    return "a tensor"
