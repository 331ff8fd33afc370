"""What ranks of one job have not in common, told in the words of its user.

Ranks compare a digest of all that has to be equal, and that is all of it where it is. Where it is
not they bring more, all of bounded size: first what the user has said, as texts, and a few bytes
for every node that was traced; then the one node that is the first to differ.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, NoReturn, cast

from actorflow.compile.job_options import JobOptions
from actorflow.trace.tracer import find_source
from compiler.errors import CompileError
from compiler.graph import Graph, Node
from compiler.graph_hash import hash_graph
from compiler.ops.sources import CONSTANT, INPUT, VARIABLE, constant_array
from compiler.options import in_words
from compiler.rows import packed

if TYPE_CHECKING:
    from actorflow.compile.compiling import Compilation
    from actorflow.run.among import Among

_MEND = "run the same script with the same options on all ranks"
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_NO_MATTER = ("optimizer", "max_plans", "streams", "num_streams")
"""Options that ranks may have each for itself, or that are told piece by piece."""
_MOST_CHARACTERS = 120
_DIGEST_BYTES = 8
_MOST_NODES = 1 << 20

Said = tuple[str, str]
"""What a user has said, and how it is said: ("AdamW's lr", "0.01")."""


def digest_of_job(asked: Compilation) -> str:
    """Return a digest of all that ranks must have in common, before any of them compiles."""
    graphs = [hash_graph(g) for g in (asked.graph, asked.evaluation) if g is not None]
    options = [row for row in asked.options.recorded() if row[0] not in _NO_MATTER]
    parts = [asked.options.name, str(asked.hardware.ranks.mesh), *graphs, repr(options)]
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()


def tell_difference(among: Among, asked: Compilation, digests: Sequence[object]) -> NoReturn:
    """Raise what differs first between rank 0 and the first rank that has another digest.

    All ranks call it together. Raises CompileError.
    """
    rank = next(r for r, digest in enumerate(digests) if digest != digests[0])
    nodes = [*_nodes(asked)][:_MOST_NODES]
    what = f"find what differs in job {asked.options.name!r}"
    where, traced = find_source(), b"".join([digest for digest, _ in nodes])
    said = among.gather(what, (str(where), tuple(_said(asked)), traced))
    (line, ours, first), (its, theirs, other) = [cast("Any", said[at]) for at in (0, rank)]
    number = _first_apart(first, other)
    shown = _shown(nodes[number][1], asked) if number < len(nodes) else ()
    told = cast("list[Any]", among.gather(what, shown))
    text = _of_said(ours, theirs, rank) or _of_nodes(told[0], told[rank], rank)
    lines = "" if line == its else f" (rank {rank} is at {its}, and rank 0 at {line})"
    raise CompileError(
        f"{where}: ranks run job {asked.options.name!r} differently: {text}{lines}; {_MEND}"
    )


# What the user has said


def _said(asked: Compilation) -> Iterator[Said]:
    """Yield what was said, in the order in which it is to be compared."""
    yield "mesh=", str(asked.hardware.ranks.mesh) or "none"
    given = asked.job
    if given is not None:
        yield from _of_optimizer(given)
        for field in fields(JobOptions):
            if field.name not in (*_NO_MATTER, "mesh"):
                yield f"{field.name}=", _text(getattr(given, field.name))
    steps, seconds = asked.options.snapshot_every, asked.options.snapshot_seconds
    period = f"every {steps} steps" if steps else f"every {seconds:g} s" if seconds else "none"
    yield "checkpoint= (every=)", period
    for name, value in asked.options.recorded():
        if name not in (*_NO_MATTER, "snapshot_every", "snapshot_seconds"):
            words, text = in_words(name, value)
            yield words, _cut(text)
    yield from _of_batch(asked.graph, "batch")
    if asked.evaluation is not None:
        yield from _of_batch(asked.evaluation, "batch of the evaluation")


def _of_batch(graph: Graph, what: str) -> Iterator[Said]:
    inputs = [(n.attrs.str_("name"), n.outputs[0]) for n in graph.nodes if n.op is INPUT]
    for name, value in sorted(inputs):
        yield f"{name!r} of the {what}", str(graph.types[value])


def _of_optimizer(given: JobOptions) -> Iterator[Said]:
    for part in given.parts:
        optimizer, kind = part.optimizer, type(part.optimizer).__name__
        yield f"the optimizer of {part.patterns!r}", f"{kind} of {part.loss!r}"
        for name in getattr(optimizer, "__dataclass_fields__", ()):
            yield f"{kind}'s {name}", _text(getattr(optimizer, name))


def _text(value: object) -> str:
    return _cut(_ADDRESS.sub("", repr(value)))


def _cut(text: str) -> str:
    """Return a text, or of a long one the beginning and what tells it from others."""
    if len(text) <= _MOST_CHARACTERS:
        return text
    digest = hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
    return f"{text[:_MOST_CHARACTERS]}... ({digest})"


def _of_said(ours: Sequence[Said], theirs: Sequence[Said], rank: int) -> str:
    """Return the first difference; "" where the same was said."""
    first, other = dict(ours), dict(theirs)
    for name in dict.fromkeys([*first, *other]):
        one, its = first.get(name, "none"), other.get(name, "none")
        if one != its:
            return f"{name} is {its} on rank {rank} and {one} on rank 0"
    return ""


# What was traced


def _nodes(asked: Compilation) -> Iterator[tuple[bytes, tuple[Graph, Node]]]:
    """Yield a digest of each node, by what it computes and not by its line."""
    for graph in [graph for graph in (asked.graph, asked.evaluation) if graph is not None]:
        for node in graph.nodes:
            types = [str(graph.types[value]) for value in node.outputs]
            row = [node.op.name, node.inputs, node.attrs.packed, node.stage, node.device, types]
            yield hashlib.blake2b(packed(row), digest_size=_DIGEST_BYTES).digest(), (graph, node)


def _first_apart(one: bytes, other: bytes) -> int:
    """Return the number of the first digest that two ranks have not in common."""
    for begin in range(0, max(len(one), len(other)), _DIGEST_BYTES):
        if one[begin : begin + _DIGEST_BYTES] != other[begin : begin + _DIGEST_BYTES]:
            return begin // _DIGEST_BYTES
    return _MOST_NODES


def _shown(found: tuple[Graph, Node], asked: Compilation) -> tuple[Any, ...]:
    """Return what is told of a node: what it is, its attributes, and the user's line."""
    graph, node = found
    types = ", ".join([str(graph.types[value]) for value in node.outputs])
    what = node.op.name
    if node.op is VARIABLE:
        what = f"{node.attrs.str_('role')} {node.attrs.str_('name')!r}"
    stage = f" on stage {node.stage}" if node.stage >= 0 else ""
    where = " of the evaluation" if graph is asked.evaluation else ""
    attrs = tuple([(name, _text(value)) for name, value in node.attrs.items()])
    if node.op is CONSTANT:
        numbers = constant_array(node).ravel()[:_MOST_CHARACTERS]
        attrs = (("value", _cut(" ".join(map(str, numbers)))),)
    return f"{what} {types}{stage}{where}", attrs, str(node.source)


def _of_nodes(first: Sequence[Any], other: Sequence[Any], rank: int) -> str:
    if not (first or other):
        return f"rank {rank} makes other use of the same ops: what is returned or updated differs"
    if not first or not other:
        (what, _, line), has, lacks = (other, rank, 0) if other else (first, 0, rank)
        return f"rank {has} goes on with {what} ({line}), where rank {lacks} has nothing more"
    whats = [first[0], other[0]]
    if whats[0] == whats[1]:
        attrs = [dict(row[1]) for row in (first, other)]
        names = [n for n in attrs[0] | attrs[1] if attrs[0].get(n) != attrs[1].get(n)]
        more = [", ".join([f"{n}={own.get(n, 'none')}" for n in names]) for own in attrs]
        whats = [f"{what} with {m}" if m else what for what, m in zip(whats, more, strict=True)]
        if not names:
            whats[1] += " of other values"
    return f"rank {rank} has {whats[1]} ({other[2]}) where rank 0 has {whats[0]} ({first[2]})"
