"""How tensors lie on the ranks of a job, as the user says it: `af.Mesh`, and `sbp=`.

    @af.job(mesh=af.Mesh(data=2, model=2), optimizer=af.optim.AdamW(1e-3))

    nn.Linear(64, 256, sbp={"model": af.split(0)})
    x.to_sbp(model=af.split(1))

A layout gives axes of the mesh a word each: `af.split(axis)`, a part of an axis of the tensor on
each rank; `af.broadcast`, all of it on each; `af.partial`, terms that are summed. "S(0)", "B" and
"P" are the same as texts. Of axes that it does not name the compiler decides. A job without a mesh,
or on a mesh of one rank, takes no notice of layouts: its graph is the one without them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import cast

from actorflow.trace.tracer import Constraint, Trace, find_source
from compiler.attrs import Attrs
from compiler.errors import CompileError
from compiler.graph import SourceLocation
from compiler.mesh import Mesh as MeshOfRanks
from compiler.ops.channels import STAGE
from compiler.ops.sources import INPUT
from compiler.ops.to_sbp import TO_SBP
from compiler.sbp.words import BROADCAST, PARTIAL, Broadcast, Partial, Sbp, Split, word_of
from compiler.types import TensorType, ValueId

broadcast: Broadcast = BROADCAST
"""Every rank has all of the tensor, the same bits."""

partial: Partial = PARTIAL
"""The tensor is the sum of what the ranks have."""

MOST_RANKS = 1_024
"""Of one mesh: all of them are listed for every group that meets."""

Words = Mapping[str, Sbp | str]
"""What a user gives for one tensor."""

LayerWords = Words | Mapping[str, Words]
"""What a user gives for a layer: words of its weight, or such for parameters by name."""

Layout = tuple[tuple[str, Sbp], ...]
"""Words by axes of a mesh, as the user named them."""

_WORDS = 'af.split(axis), af.broadcast, af.partial, or a text such as "S(0)", "B" or "P"'


def Mesh(*unnamed: object, **axes: int) -> MeshOfRanks:  # noqa: N802  # what it makes
    """Return a mesh of ranks: axes by name, outermost first, and how many ranks each has.

    Along the axis "data" ranks have different rows of a batch, and along "stage" different stages
    of a pipeline; other names are the user's. `af.Mesh(data=2, model=2)` is of four ranks: 0 and 1
    have the first half of the rows. Raises CompileError with the user's line.
    """
    where = find_source()
    if unnamed or not axes:
        raise CompileError(
            f"{where}: the axes of af.Mesh have names, such as af.Mesh(data=2, model=2); got"
            f" {', '.join(map(repr, unnamed)) or 'none'}"
        )
    for name, extent in axes.items():
        if not name.isidentifier():
            raise CompileError(
                f"{where}: an axis of af.Mesh has a name such as data, model or my_axis, got"
                f" {name!r}"
            )
        if not isinstance(extent, int) or isinstance(extent, bool) or extent < 1:
            raise CompileError(
                f"{where}: axis {name!r} of af.Mesh must have an integer of 1 or more ranks, got"
                f" {extent!r}"
            )
    if math.prod(axes.values()) > MOST_RANKS:
        raise CompileError(
            f"{where}: af.Mesh of {math.prod(axes.values()):,} ranks; at most {MOST_RANKS:,} are"
            " possible"
        )
    return MeshOfRanks(tuple(axes), tuple(axes.values()))


def layout_of(given: object, what: str) -> Layout:
    """Return the layout that a user gives. Raises CompileError with his line for what is none.

    Whether a mesh has such axes, and a tensor so many rows, is known when a job is traced.
    """
    where = find_source()
    if not isinstance(given, Mapping):
        raise CompileError(
            f"{where}: {what} must be words by axes of the mesh, such as"
            f' {{"model": af.split(0)}}, got {given!r}'
        )
    return tuple([(_name(name, what, where), _word(w, what, where)) for name, w in given.items()])


def layouts_of(given: LayerWords, ranks: Mapping[str, int], layer: str) -> dict[str, Words]:
    """Return words for parameters of a layer, by name; `ranks` are their numbers of axes.

    Words alone are those of the first parameter, the weight. Others have its first axes alone, as a
    bias has: they are split where these are, and whole where another axis is. Raises CompileError
    with the user's line.
    """
    where, what = find_source(), f"sbp of {layer}"
    if not isinstance(given, Mapping) or not any([isinstance(w, Mapping) for w in given.values()]):
        layout, of_weight = layout_of(given, what), next(iter(ranks.values()))
        return {
            name: {axis: _beside_weight(word, rank, of_weight) for axis, word in layout}
            for name, rank in ranks.items()
        }
    for name, words in given.items():
        if not isinstance(words, Mapping):
            raise CompileError(
                f"{where}: {what} has words for parameters and for axes of the mesh; give one or"
                f" the other, got {name!r}: {words!r}"
            )
        if name not in ranks:
            raise CompileError(
                f"{where}: {what} names parameter {name!r}, and the layer has"
                f" {', '.join(map(repr, ranks))}"
            )
    return cast("dict[str, Words]", dict(given))


def _beside_weight(word: Sbp, rank: int, of_weight: int) -> Sbp:
    if not isinstance(word, Split) or rank == of_weight:
        return word
    axis = word.axis + of_weight if word.axis < 0 else word.axis
    return Split(axis) if axis < rank else BROADCAST


def _name(name: object, what: str, where: SourceLocation) -> str:
    if not isinstance(name, str):
        raise CompileError(
            f"{where}: {what} names axes of the mesh by texts, such as 'model', got {name!r}"
        )
    return name


def _word(given: object, what: str, where: SourceLocation) -> Sbp:
    if isinstance(given, str):
        try:
            return word_of(given)
        except ValueError as error:
            raise CompileError(f"{where}: {what}: {error}") from None
    if isinstance(given, (Split, Broadcast, Partial)):
        return given
    raise CompileError(f"{where}: {what} takes {_WORDS}; got {given!r}")


def constraint(
    layout: Layout, type_: TensorType, mesh: MeshOfRanks, what: str, where: SourceLocation
) -> Constraint:
    """Return what a node of the graph has of a layout, for a tensor of a type on a mesh.

    Axes of one rank are left out: there is nothing to choose. Raises CompileError for an axis that
    the mesh has not, for one beyond the tensor's rank, and where a rank would have no row.
    """
    for name, _ in layout:
        if name not in mesh.names:
            raise CompileError(
                f"{where}: {what} names axis {name!r}, and the mesh of the job has none of that"
                f" name; its axes are {', '.join(map(repr, mesh.names))} ({mesh}). To have it whole"
                f" on all of them, name the axis with one rank: af.Mesh(..., {name}=1)"
            )
        if name == STAGE:
            raise CompileError(
                f"{where}: {what} names axis {STAGE!r}: its ranks run different ops, and have no"
                " parts of one tensor; say what runs where with af.stage"
            )
    words, found = dict(layout), []
    rows = list(type_.shape)
    for name, parts in zip(mesh.names, mesh.shape, strict=True):
        word = words.get(name)
        if isinstance(word, Split):
            word = _split_of(word, type_, what, where)
            if rows[word.axis] < parts:
                raise CompileError(
                    f"{where}: {what} cuts axis {word.axis} of {type_} into {parts} parts along"
                    f" {name!r}, where it is {rows[word.axis]} long: every rank needs a row. Make"
                    " the axis longer, or leave it whole with af.broadcast"
                )
            rows[word.axis] //= parts
        if word is not None and parts > 1:
            found.append((name, str(word)))
    return tuple(found)


def laid_out(trace: Trace, value: ValueId, given: object, axes: Words) -> ValueId:
    """Return a value of a trace in the layout that a user gives, as a mapping or by keywords.

    It is the value itself where the job has no ranks to lay it out on. An entry of the batch comes
    as the first layout of it says: each rank is given its own part. Raises CompileError.
    """
    where, what = find_source(), "to_sbp"
    if (given is None) == (not axes):
        raise CompileError(
            f"{where}: {what} takes words by axes of the mesh, such as x.to_sbp(model=af.split(1)),"
            f' or x.to_sbp({{"model": af.split(1)}}); got {"both" if axes else "none"}'
        )
    layout = layout_of(axes if given is None else given, what)
    if trace.mesh is None:
        return value
    sbp = constraint(layout, trace.builder.type_of(value), trace.mesh, what, where)
    maker = trace.builder.producer_of(value)
    can_come = [(axis, word) for axis, word in sbp if not isinstance(word_of(word), Partial)]
    if maker.op is INPUT and can_come and "sbp" not in maker.attrs:
        trace.builder.widen(value, Attrs({**maker.attrs, "sbp": tuple(can_come)}), ())
    return trace.emit(TO_SBP, [value], Attrs({"sbp": sbp}))[0] if sbp else value


def _split_of(word: Split, type_: TensorType, what: str, where: SourceLocation) -> Split:
    """Return a split along an axis that is counted from the front."""
    if not -type_.rank <= word.axis < type_.rank:
        axes = [str(axis) for axis in range(type_.rank)]
        mend = " or ".join([", ".join(axes[:-1]), axes[-1]] if axes[1:] else axes)
        raise CompileError(
            f"{where}: {what} splits axis {word.axis}, and {type_} has"
            f" {type_.rank or 'no'} {'axis' if type_.rank == 1 else 'axes'};"
            f" {f'use {mend}' if mend else 'leave it whole with af.broadcast'}"
        )
    return Split(word.axis % type_.rank)
