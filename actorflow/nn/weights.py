"""Weights from elsewhere, matched with the parameters and buffers of a model: `Module.load`.

Names are matched with paths, after a rename; a shared tensor may come under any of its paths. All
names and shapes are compared before the first tensor is read, and no value changes before all are
read. What was matched, and what was not, is a `LoadReport`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import numpy as np

from actorflow.checkpoint.weights import Weights, load
from actorflow.nn.lease import assign_values, leased, make_claim
from actorflow.nn.parameter import ModelTensor
from actorflow.tensor.tracer import find_source
from compiler.contract.errors import CompileError

Source = Mapping[str, Any] | str | os.PathLike[str]
"""Arrays by name, or where they are."""

Rename = Mapping[str, str] | Callable[[str], str | None]
"""What a name is called in the model: regular expressions and what takes their place, each in turn;
or a function of the name, None for a tensor to leave out."""

_SHOWN = 5


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a load did: paths that got values, paths that did not, and names that were not used.

    `likely` has, for some unused names, the path that each most probably means: the nearest missing
    one of the same shape.
    """

    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    unused: tuple[str, ...]
    likely: Mapping[str, str]

    def __str__(self) -> str:
        """The counts, the first names, and a rename to try."""
        text = f"{len(self.loaded)} loaded"
        text += f", missing {_listed(self.missing)}, unused {_listed(self.unused)}"
        return text + _advice(self.likely)


def load_values(
    stored: Mapping[str, ModelTensor],
    source: Source,
    *,
    owner: str,
    item_at: Callable[[str], object],
    strict: bool,
    rename: Rename | None,
    dtype: str | None,
) -> LoadReport:
    """Set the values of a model, all or none; see `Module.load`.

    Args:
        stored: the parameters and buffers by their first paths.
        source: arrays by name, or where they are.
        owner: what the model is called in messages.
        item_at: what lies at any path of the model, or None.
        strict: refuse a path without values, and a name without a path.
        rename: from names to paths.
        dtype: of the model's floats from now on; their own by default.
    """
    arrays = _arrays_of(owner, source)
    by_path, unused = _matched(stored, item_at, _renamed(arrays, rename))
    _check_shapes(owner, stored, by_path, arrays)
    missing = [path for path in stored if path not in by_path]
    likely = _likely(missing, unused, stored, arrays)
    report = LoadReport(tuple(by_path), tuple(missing), tuple(unused), likely)
    if (strict and (missing or unused)) or (stored and not by_path):
        raise CompileError(f"{find_source()}: cannot load {owner}: {report}")
    types = {path: stored[path].type_in(dtype) for path in by_path}
    values: dict[str, np.ndarray[Any, Any]] = {}
    for path, names in by_path.items():
        for name in names:
            array = stored[path].checked(arrays[name], path, types[path])
            first = values.setdefault(path, array)
            if first is not array and not np.array_equal(first, array, equal_nan=True):
                raise CompileError(
                    f"{find_source()}: {names[0]!r} and {name!r} are one {stored[path].kind} of"
                    f" {owner}, {path!r}, and have different values; leave one out by a function"
                    " rename= that returns None for it, or do not share it in the model"
                )
    cells = {path: stored[path].cell for path in values}
    arrays_of_cells = {cells[path]: array for path, array in values.items()}
    if all([types[path] == stored[path].type for path in values]):
        assign_values(arrays_of_cells)
        return report
    # No run may have values whose type changes.
    with leased(cells, make_claim(cells, f"load of {owner} with dtype={dtype!r}")):
        for path in values:
            stored[path].set_type(types[path])
        assign_values(arrays_of_cells)
    return report


def _arrays_of(owner: str, source: Source) -> Mapping[str, Any]:
    if isinstance(source, (str, os.PathLike)):
        return load(source)
    if not isinstance(source, Mapping):
        raise CompileError(
            f"{find_source()}: cannot load {owner}: expected arrays by path, as state() returns"
            f" them, or the path of a file or a run, got {type(source).__name__}"
        )
    return source


def _renamed(names: Mapping[str, Any], rename: Rename | None) -> dict[str, str]:
    """Return what each name is called in the model. Raises CompileError where two are the same."""
    if rename is None:
        return {name: name for name in names}
    renamed: dict[str, str] = {}
    taken: dict[str, str] = {}
    for name in names:
        new = _apply(rename, name)
        if new is None:
            continue
        if not isinstance(new, str):
            raise CompileError(
                f"{find_source()}: rename must return a name, or None to leave the tensor out; for"
                f" {name!r} it returned {type(new).__name__}"
            )
        if new in taken:
            raise CompileError(
                f"{find_source()}: rename calls both {taken[new]!r} and {name!r} {new!r}; give None"
                " for the one to leave out"
            )
        renamed[name] = new
        taken[new] = name
    return renamed


def _apply(rename: Rename, name: str) -> str | None:
    if not isinstance(rename, Mapping):
        return rename(name)
    for pattern, replacement in rename.items():
        try:
            name = re.sub(pattern, replacement, name)
        except (re.error, IndexError, TypeError) as error:
            raise CompileError(
                f"{find_source()}: rename={{{pattern!r}: {replacement!r}}} is no regular expression"
                f" and text: {error}"
            ) from None
    return name


def _matched(
    stored: Mapping[str, ModelTensor], item_at: Callable[[str], object], renamed: Mapping[str, str]
) -> tuple[dict[str, list[str]], list[str]]:
    """Return the names of each path that has some, in the model's order, and those of none."""
    names: dict[str, list[str]] = {path: [] for path in stored}
    first_paths = {id(item): path for path, item in stored.items()}
    unused = []
    for name, new in renamed.items():
        path = new if new in names else first_paths.get(id(item_at(new)))
        if path is None:
            unused.append(name)
        else:
            names[path].append(name)
    return {path: some for path, some in names.items() if some}, unused


def _shape_in(arrays: Mapping[str, Any], name: str) -> tuple[int, ...] | None:
    """Return the shape of a tensor, which is not read for it; None where it has none."""
    if isinstance(arrays, Weights):
        return arrays.stored[name].shape
    shape = getattr(arrays[name], "shape", None)
    return None if shape is None else tuple(shape)


def _check_shapes(
    owner: str,
    stored: Mapping[str, ModelTensor],
    by_path: Mapping[str, list[str]],
    arrays: Mapping[str, Any],
) -> None:
    """Raise CompileError with all paths that get another shape, where there are several."""
    wrong = [
        f"{stored[path].kind} {path!r} expected {list(stored[path].shape)}, got {list(shape)}"
        for path, names in by_path.items()
        for name in names
        if (shape := _shape_in(arrays, name)) is not None and shape != stored[path].shape
    ]
    # A single one is refused with its line, as an assignment is.
    if len(wrong) > 1:
        more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise CompileError(
            f"{find_source()}: cannot load {owner}, {len(wrong)} shapes differ:"
            f" {'; '.join(wrong[:_SHOWN])}{more}. Make the model with the sizes of the file, or"
            " give other arrays for these paths"
        )


def _likely(
    missing: list[str],
    unused: list[str],
    stored: Mapping[str, ModelTensor],
    arrays: Mapping[str, Any],
) -> dict[str, str]:
    """Return the nearest missing path of the same shape, for the first unused names."""
    by_shape: dict[tuple[int, ...], list[str]] = {}
    for path in missing:
        by_shape.setdefault(stored[path].shape, []).append(path)
    likely = {}
    for name in unused[:_SHOWN]:
        shape = _shape_in(arrays, name)
        near = [] if shape is None else by_shape.get(shape, [])
        # Names end alike, however deep they lie: one that is the end of the other comes first.
        best = [p for p in near if name.endswith(f".{p}") or p.endswith(f".{name}")]
        if best := best or get_close_matches(name, near, n=1, cutoff=0.5):
            likely[name] = best[0]
            near.remove(best[0])
    return likely


def _advice(likely: Mapping[str, str]) -> str:
    if not likely:
        return ""
    rules = {rule for name, path in likely.items() for rule in _rules(name, path)}
    if len(rules) == 1 and all([_rules(name, path) for name, path in likely.items()]):
        return f". Perhaps rename={{{', '.join(rules)}}}"
    pairs = ", ".join([f"{name!r} is {path!r}" for name, path in likely.items()])
    return f". Perhaps {pairs}: say so with rename="


def _rules(name: str, path: str) -> Iterator[str]:
    """Yield what would make a path of a name, where that is a prefix more or less."""
    if name.endswith(f".{path}"):
        yield f"{'^' + re.escape(name.removesuffix(path))!r}: ''"
    elif path.endswith(f".{name}"):
        yield f"'^': {path.removesuffix(name)!r}"


def _listed(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{[*names[:_SHOWN]]}{more}" if names else "nothing"
