"""A plan for every rank of a job, compiled once for each class of ranks that share one.

Ranks whose local graphs are equal (`compiler.pipeline.pipeline.local_graphs`), and that choose
among the same kernels, form one class. The first rank of a class compiles. The others receive the
bytes of the plan and prove it as they prove a file. Each decision follows from values that all
ranks have gathered, so that all ranks enter the same gathers, whichever of them has a plan on disk.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, NoReturn, cast

from actorflow.compile.compiling import JobSpec, cache_plan, cached_plan, compiled_plan
from actorflow.compile.prove import prove
from actorflow.environment.native import build
from actorflow.environment.settings import logger
from actorflow.options.job_options import JobOptions
from actorflow.tensor.tracer import find_source
from compiler.contract.attrs import PlainValue
from compiler.contract.codec import to_msgpack
from compiler.contract.errors import (
    BudgetError,
    CompileError,
    DeviceError,
    OutOfMemory,
    PlanFormatError,
)
from compiler.contract.placement import Mesh
from compiler.contract.plan import Plan
from compiler.contract.rank_plans import RankPlans
from compiler.graph.graph import Graph, Node
from compiler.graph.target import in_words
from compiler.ops.primitives.body import hash_graph
from compiler.ops.primitives.sources import CONSTANT, INPUT, VARIABLE, constant_array
from compiler.ops.primitives.transfer import STAGE

if TYPE_CHECKING:
    from actorflow.distributed.process_group import ProcessGroup
    from compiler.pipeline.pipeline import LocalGraphs


# Ranks compare a digest of all that has to be equal. Where digests differ they send more, all of
# bounded size: first what the user has said, as texts, and a few bytes for every node that was
# traced; then the one node that is the first to differ.

_MEND = "run the same script with the same options on all ranks"
# An address in a repr differs from process to process, and says nothing.
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_NO_MATTER = ("optimizer", "max_plans", "streams", "num_streams")
"""Options that may differ between ranks, or that are compared piece by piece."""
_MOST_CHARACTERS = 120
_DIGEST_BYTES = 8
_MOST_NODES = 1 << 20

Said = tuple[str, str]
"""What a user has said, and how it is said: ("AdamW's lr", "0.01")."""


def digest_of_job(job_spec: JobSpec) -> str:
    """Return a digest of all that ranks must have in common, before any of them compiles."""
    graphs = [hash_graph(g) for g in (job_spec.graph, job_spec.evaluation) if g is not None]
    options = [row for row in job_spec.options.recorded() if row[0] not in _NO_MATTER]
    ranks = job_spec.hardware.ranks
    parts = [job_spec.options.name, str(ranks.mesh), str(ranks.hosts), *graphs, repr(options)]
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()


def raise_first_difference(
    group: ProcessGroup, job_spec: JobSpec, digests: Sequence[object]
) -> NoReturn:
    """Raise what differs first between rank 0 and the first rank that has another digest.

    All ranks call it together. Raises CompileError.
    """
    rank = next(r for r, digest in enumerate(digests) if digest != digests[0])
    # 8 bytes a node, so 8 MB at most travel.
    nodes = [*_nodes(job_spec)][:_MOST_NODES]
    what = f"find what differs in job {job_spec.options.name!r}"
    where, hashes = find_source(), b"".join([digest for digest, _ in nodes])
    # All ranks come to both gathers below, also those that are alike: a gather takes every rank.
    rows = group.all_gather_object(what, (str(where), tuple(_said(job_spec)), hashes))
    (line, ours, first), (there, theirs, other) = [cast("Any", rows[at]) for at in (0, rank)]
    number = _first_apart(first, other)
    row = _shown(nodes[number][1], job_spec) if number < len(nodes) else ()
    node_rows = cast("list[Any]", group.all_gather_object(what, row))
    text = _of_said(ours, theirs, rank) or _of_nodes(node_rows[0], node_rows[rank], rank)
    lines = "" if line == there else f" (rank {rank} is at {there}, and rank 0 at {line})"
    raise CompileError(
        f"{where}: ranks run job {job_spec.options.name!r} differently: {text}{lines}; {_MEND}"
    )


def _said(job_spec: JobSpec) -> Iterator[Said]:
    """Yield what was said, in the order in which it is to be compared."""
    ranks = job_spec.hardware.ranks
    yield "mesh=", str(ranks.mesh) or "none"
    yield "the link between hosts (ACTORFLOW_LINK)", str(ranks.hosts and ranks.hosts.between)
    yield from _of_optimizer(job_spec.job)
    for field in fields(JobOptions):
        if field.name not in (*_NO_MATTER, "mesh"):
            yield f"{field.name}=", _text(getattr(job_spec.job, field.name))
    steps, seconds = job_spec.options.snapshot_every, job_spec.options.snapshot_seconds
    periods = [f"every {seconds:g} s"] * bool(seconds) + [f"every {steps} steps"] * bool(steps)
    yield "checkpoint= (every= and keep=)", " and ".join(periods) or "none"
    for name, value in job_spec.options.recorded():
        if name not in (*_NO_MATTER, "snapshot_every", "snapshot_seconds"):
            words, text = in_words(name, value)
            yield words, _cut(text)
    yield from _of_batch(job_spec.graph, "batch")
    if job_spec.evaluation is not None:
        yield from _of_batch(job_spec.evaluation, "batch of the evaluation")


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
    # Two long texts that begin alike still differ in what is shown.
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


def _nodes(job_spec: JobSpec) -> Iterator[tuple[bytes, tuple[Graph, Node]]]:
    """Yield a digest of each node, by what it computes and not by its line."""
    for graph in [graph for graph in (job_spec.graph, job_spec.evaluation) if graph is not None]:
        for node in graph.nodes:
            types = [str(graph.types[value]) for value in node.outputs]
            row = [node.op.name, node.inputs, node.attrs.packed, node.stage, node.device, types]
            yield (
                hashlib.blake2b(to_msgpack(row), digest_size=_DIGEST_BYTES).digest(),
                (graph, node),
            )


def _first_apart(one: bytes, other: bytes) -> int:
    """Return the number of the first digest that two ranks have not in common."""
    for begin in range(0, max(len(one), len(other)), _DIGEST_BYTES):
        if one[begin : begin + _DIGEST_BYTES] != other[begin : begin + _DIGEST_BYTES]:
            return begin // _DIGEST_BYTES
    return _MOST_NODES


def _shown(found: tuple[Graph, Node], job_spec: JobSpec) -> tuple[Any, ...]:
    """Return the description of a node: what it is, its attributes, and the user's line."""
    graph, node = found
    types = ", ".join([str(graph.types[value]) for value in node.outputs])
    what = node.op.name
    if node.op is VARIABLE:
        what = f"{node.attrs.str_('role')} {node.attrs.str_('name')!r}"
    stage = f" on stage {node.stage}" if node.stage >= 0 else ""
    where = " of the evaluation" if graph is job_spec.evaluation else ""
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
        return f"rank {has} continues with {what} ({line}), and rank {lacks} has no further node"
    whats = [first[0], other[0]]
    if whats[0] == whats[1]:
        attrs = [dict(row[1]) for row in (first, other)]
        names = [n for n in attrs[0] | attrs[1] if attrs[0].get(n) != attrs[1].get(n)]
        more = [", ".join([f"{n}={pairs.get(n, 'none')}" for n in names]) for pairs in attrs]
        whats = [f"{what} with {m}" if m else what for what, m in zip(whats, more, strict=True)]
        if not names:
            whats[1] += " of other values"
    return f"rank {rank} has {whats[1]} ({other[2]}) where rank 0 has {whats[0]} ({first[2]})"


_TOLD = (CompileError, PlanFormatError, OutOfMemory, DeviceError)
"""Errors of one rank that all ranks raise. An InternalError is reported by its own rank."""

_AGREED = "agreed"
"""Said in place of a fingerprint by a rank that has what all agreed on before."""

_TellableError = CompileError | PlanFormatError | OutOfMemory | DeviceError


def plan_for(job_spec: JobSpec, plans: dict[str, Plan], group: ProcessGroup | None) -> Plan:
    """Return a plan out of those that this process has, or from the disk, or compile it.

    All ranks of `group` call this together; by default it is compiled here. A plan
    that one of several compiles so, by what it measured, is none that they agree on later.
    """
    is_alone = group is None or group.is_alone
    if is_alone:
        job_spec = job_spec.alone()
    # No function of the user runs while the choice of kernels is held: whoever it waits for might
    # want to compile. Nor is another rank waited for, which may be a thread of this process.
    with job_spec.choosing():
        key = job_spec.key
        in_memory = plans.get(key)
        plan = in_memory or cached_plan(job_spec)
        if group is None or is_alone:
            return plans.setdefault(key, plan or compiled_plan(job_spec))
    plans[key] = agreed_plan(group, job_spec, plan, is_agreed=in_memory is not None)
    return plans[key]


def agreed_plan(
    group: ProcessGroup, job_spec: JobSpec, found: Plan | None, *, is_agreed: bool = False
) -> Plan:
    """Return the plan of this rank; all ranks call this together.

    `found` is a plan that it has already: in memory, and agreed on, or on disk, where two launches
    at a time may have left ranks of a class different ones.

    Raises what a rank of them meets with that compiles, on every rank with its text, and
    CompileError where they have not the same job.
    """
    job = job_spec.options.name
    own_row = _AGREED if is_agreed else _fingerprint(found), digest_of_job(job_spec)
    rows = cast("list[tuple[str, str]]", group.all_gather_object(f"compile job {job!r}", own_row))
    has, digests = [has for has, _ in rows], [digest for _, digest in rows]
    # All ranks see the same digests, so all of them take this branch, or none.
    if len({*digests}) > 1:
        raise_first_difference(group, job_spec, digests)
    # One fingerprint on all: an empty one would say that nobody has a plan, and then none is found
    # here.
    if found is not None and len({*has}) == 1:
        return found
    own_key, local, error = "", None, None
    try:
        with job_spec.choosing():
            own_key, local = _own_class(job_spec)
    except _TOLD as caught:
        error = caught
    classes = _heard(group, f"tell its part of job {job!r}", own_key, error)
    members = [rank for rank, other in enumerate(classes) if other == own_key]
    # Who has a plan need not compile one.
    # The lowest rank of the class; every rank works that out by itself.
    first = next((rank for rank in members if has[rank]), members[0])
    is_first, payload, error = first == group.rank, b"", None
    # A rank with another plan from its disk takes this one, too: a class has one plan.
    lacking = [rank for rank in members if not has[first] or has[rank] != has[first]]
    if is_first:
        try:
            found = found or _compiled(
                job_spec, local, _are_apart(job_spec.hardware.ranks.mesh, classes)
            )
            payload = found.to_bytes() if {*lacking} - {first} else b""
        except _TOLD as caught:
            error = caught
    # Every rank gathers, whether it compiled or not; an error of one is raised on all here.
    plans = _heard(group, f"have the plan of job {job!r}", payload, error)
    if found is not None and (is_first or group.rank not in lacking):
        return found
    with job_spec.choosing():
        return _received(plans[first], job_spec, first)


def _fingerprint(plan: Plan | None) -> str:
    return "" if plan is None else plan.fingerprint


def plans_of_classes(job_spec: JobSpec) -> RankPlans:
    """Return the plans of all ranks of a mesh, each class of them compiled once, in this process.

    They are shown or simulated, not run: see `plan_for`. Raises CompileError.
    """
    job_spec = job_spec.alone()
    ranks = job_spec.hardware.ranks
    local: dict[Hashable, LocalGraphs] = {}
    with job_spec.choosing():
        keys = classes_of_ranks(job_spec, local)
        numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
        are_apart, plans = _are_apart(ranks.mesh, keys), []
        for key in numbers:
            other = _of_rank(job_spec, keys.index(key))
            plans.append(cached_plan(other) or _compiled(other, local.pop(key), are_apart))
    return RankPlans(ranks.mesh, tuple(plans), tuple([numbers[key] for key in keys]))


def _of_rank(job_spec: JobSpec, rank: int) -> JobSpec:
    hardware = job_spec.hardware
    return replace(job_spec, hardware=replace(hardware, ranks=replace(hardware.ranks, rank=rank)))


def classes_of_ranks(
    job_spec: JobSpec, local: dict[Hashable, LocalGraphs] | None = None
) -> tuple[Hashable, ...]:
    """Return, for each rank, the key that ranks with the same plan share; compile no plan.

    `local` gets the graphs of each class. Raises CompileError.
    """
    from compiler.pipeline.pipeline import LocalGraphs, graphs_of_ranks

    local = {} if local is None else local

    def seen(rank: int) -> Hashable:
        if job_spec.evaluation is not None:  # which may tell apart who trains alike
            key, graphs_of_it = _own_class(_of_rank(job_spec, rank))
            local.setdefault(key, graphs_of_it)
            return key
        graph = graphs.of(rank)
        hashes = _hashes(graph)
        local.setdefault(hashes, LocalGraphs(graph))
        return hashes

    with job_spec.choosing():
        if job_spec.evaluation is not None:
            return tuple([seen(rank) for rank in range(job_spec.hardware.ranks.count)])
        graphs = graphs_of_ranks(job_spec.graph, job_spec.hardware, job_spec.options)
        return graphs.told_apart(seen)


def _are_apart(mesh: Mesh, classes: Sequence[object]) -> bool:
    """Whether ranks of one stage, which have variables in common, are of several classes."""
    # Ranks of different stages have no variable in common, so they may differ as they like.
    axis = mesh.names.index(STAGE) if STAGE in mesh.names else None
    stages = [0 if axis is None else mesh.coordinates(rank)[axis] for rank in range(len(classes))]
    return len(set(zip(stages, classes, strict=True))) > len(set(stages))


def _compiled(job_spec: JobSpec, local: LocalGraphs | None, are_apart: bool) -> Plan:
    """Compile the plan of a class. What several of them all compute must have the same bits.

    So nothing that one class measures chooses the kernels then, which the others may measure
    differently: a product of parameters, as an optimizer makes, would part their values.
    """
    class_spec = job_spec
    if are_apart:
        class_spec = replace(job_spec, job=replace(job_spec.job, deterministic=True))
    with class_spec.choosing():
        plan = compiled_plan(class_spec, local)
    if are_apart:
        with job_spec.choosing():
            cache_plan(job_spec, plan)
    return plan


def _own_class(job_spec: JobSpec) -> tuple[str, LocalGraphs]:
    """Return the key that ranks with the same plan as this one share, and its local graphs."""
    from compiler.pipeline.pipeline import local_graphs

    hardware = job_spec.hardware
    # The key without the rank's own number, which is all that ranks of one class differ in.
    others = replace(hardware, ranks=replace(hardware.ranks, rank=0))
    common_key = replace(job_spec, hardware=others).key
    local = local_graphs(
        job_spec.graph, hardware, job_spec.options, job_spec.dump, job_spec.evaluation
    )
    parts = [common_key, *[text for graph in local if graph is not None for text in _hashes(graph)]]
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest(), local


def _hashes(graph: Graph) -> tuple[str, str]:
    phases = " ".join([node.phase.name for node in graph.nodes])  # no part of a graph's hash
    return hash_graph(graph, with_sources=True), phases


def _heard(
    group: ProcessGroup, what: str, value: PlainValue, error: _TellableError | None
) -> list[PlainValue]:
    """Gather a value from each rank; raise one rank's error on all, the own one as it was raised.

    Of several BudgetErrors the one with the largest budget is raised: it covers the others.
    """
    report: tuple[PlainValue, ...] = ()
    if error is not None:
        report = (type(error).__name__, str(error), getattr(error, "smallest_bytes", 0))
    rows = [_row(row, what) for row in group.all_gather_object(what, (value, report))]
    # In order of ranks, so `max` takes the first of equal sizes on every rank.
    reports = [report for _, report in rows if report]
    if reports:
        name, text, size = max(reports, key=lambda one: int(cast("int", one[2])))
        if error is not None and report[2] == size:
            raise error
        if name == BudgetError.__name__:
            raise BudgetError(str(text), smallest_bytes=int(cast("int", size)))
        kinds = {kind.__name__: kind for kind in _TOLD}
        raise kinds.get(str(name), CompileError)(str(text))
    return [value for value, _ in rows]


def _row(row: PlainValue, what: str) -> tuple[PlainValue, tuple[PlainValue, ...]]:
    if isinstance(row, tuple) and len(row) == 2 and isinstance(row[1], tuple):
        return row[0], row[1]
    raise PlanFormatError(f"a rank says {row!r} where it was to {what}; start all from one version")


def _received(data: PlainValue, job_spec: JobSpec, sender: int) -> Plan:
    """Return the plan that another rank has sent, held against what this one would compile.

    Raises PlanFormatError, CompileError or OutOfMemory where it is none that runs here.
    """
    where = f"the plan that rank {sender} has compiled"
    plan = Plan.from_bytes(data if isinstance(data, bytes) else b"", where)
    if plan.graph_hash != (ours := hash_graph(job_spec.graph)):
        raise PlanFormatError(
            f"{where} is of graph {plan.graph_hash}, and this rank's is {ours}; run the same script"
            " on all ranks"
        )
    if plan.mesh.axes != job_spec.hardware.ranks.mesh.axes:
        raise PlanFormatError(
            f"{where} is for the mesh {plan.mesh}, and this rank's is"
            f" {job_spec.hardware.ranks.mesh}; run the same script on all ranks"
        )
    prove(plan)
    if not build(plan):
        raise CompileError(
            f"{where} has kernels that the C compiler of this rank refuses (see the lines above);"
            " give all ranks the same compiler, or set ACTORFLOW_NATIVE=0 for all"
        )
    logger.info("plan %r comes from rank %d", plan.name, sender)
    cache_plan(job_spec, plan)
    return plan
