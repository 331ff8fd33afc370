"""Small plans of ranks that meet, from rows: actors on streams, edges, and what is moved."""

from dataclasses import dataclass, replace

from compiler.contract.placement import HOST, Memory, StreamRole
from compiler.contract.plan import Plan
from compiler.contract.plan_tables import (
    Actor,
    ActorKind,
    Arena,
    DeviceMemory,
    Launch,
    Port,
    Register,
    RegisterKind,
    SourceLine,
    Stream,
    View,
)
from compiler.contract.types import (
    ActorId,
    DType,
    RegisterId,
    StreamId,
    TensorType,
    contiguous_strides,
)


@dataclass(frozen=True)
class Moved:
    """A launch of a COMM actor: shapes of what it reads and makes, and attributes."""

    op: str
    order: int
    read: tuple[int, ...] = (4,)
    made: tuple[int, ...] = (4,)
    num_ranks: int = 2
    group: str = "data"
    name: str = "w"
    dtype: DType = DType.FLOAT32
    attrs: tuple[tuple[str, object], ...] = (("by", "sum"),)


def reduced(order, size=4, **options):
    return Moved("all_reduce", order, (size,), (size,), **options)


def scattered(order, whole, rows, **options):
    attrs = (("axis", 0), ("by", "sum"), ("rows", rows))
    return Moved("reduce_scatter", order, (whole, 2), (rows, 2), attrs=attrs, **options)


def gathered(order, whole, rows, **options):
    attrs = (("axis", 0), ("rows", whole))
    return Moved("all_gather", order, (rows, 2), (whole, 2), attrs=attrs, **options)


def exchanged(order, whole, rows, to_whole, to_rows, **options):
    attrs = (("axis", 0), ("rows", whole), ("to_axis", 1), ("to_rows", to_rows))
    return Moved("all_to_all", order, (rows, to_whole), (whole, to_rows), attrs=attrs, **options)


def sent(order, peer, size=4, op="send", **options):
    return Moved(op, order, (size,), (size,), attrs=(("peer", peer),), **options)


@dataclass(frozen=True)
class Row:
    """An actor: no `moves` is one that computes, but for the first of a plan, its source."""

    name: str
    moves: tuple[Moved, ...] = ()
    stream: str = ""
    duration_ns: float = 1000.0


def plan_of_rows(rows, edges, name="job", options=()):
    """Return a plan of actors and `edges`: producer, consumer, and slots with rates, or none."""
    views, registers, sources, actors = [], [], [SourceLine("model.py", 0)], []
    streams = list(dict.fromkeys(row.stream or row.name for row in rows))
    ports = [([], []) for _ in rows]
    for producer, consumer, *rest in edges:
        slots, produce, consume = (*rest, 1, 1, 1)[:3] if rest else (1, 1, 1)
        register = RegisterId(len(registers))
        names = f"{rows[producer].name}>{rows[consumer].name}"
        registers.append(
            Register(register, names, RegisterKind.CONTROL, 0, 0, slots, (0,) * slots, (0, 1), "")
        )
        ports[producer][1].append(Port(register, produce))
        ports[consumer][0].append(Port(register, consume))
    pool = RegisterId(len(registers))
    registers.append(Register(pool, "all", RegisterKind.TEMPORARY, 0, 1 << 20, 1, (0,), (0, 1), ""))

    def view(dtype, shape):
        type_ = TensorType(dtype, shape)
        views.append(View(pool, 0, type_, contiguous_strides(shape, dtype.itemsize)))
        return len(views) - 1

    def launch(moved):
        sources.append(SourceLine("model.py", 10 + moved.order))
        attrs = {"num_ranks": moved.num_ranks, "group": moved.group, "bucket": moved.order}
        attrs |= {"order": moved.order} | dict(moved.attrs)
        return Launch(
            moved.op, moved.op, tuple(sorted(attrs.items())), (view(moved.dtype, moved.read),),
            (view(moved.dtype, moved.made),), None, moved.name, len(sources) - 1, 10.0,
            reads=(0,), writes=(0,),
        )  # fmt: skip

    for index, (row, (inputs, outputs)) in enumerate(zip(rows, ports, strict=True)):
        kind = ActorKind.COMM if row.moves else ActorKind.COMPUTE
        if not index:
            kind = ActorKind.SOURCE
        actors.append(
            Actor(
                ActorId(index), row.name, kind, StreamId(streams.index(row.stream or row.name)),
                tuple(map(launch, row.moves)), tuple(inputs), tuple(outputs), False,
                row.duration_ns,
            )
        )  # fmt: skip
    return Plan(
        name,
        tuple([Stream(StreamId(i), HOST, StreamRole.COMM, i, s) for i, s in enumerate(streams)]),
        (Arena(HOST, Memory.HOST, 1 << 20, 64),),
        tuple(registers), tuple(views), tuple(actors), (), (), (), tuple(sources),
        (DeviceMemory(*[0] * 16, ""),), "", "",
        tuple(options),
    )  # fmt: skip


def chain_plan(*moves, slots=1, **options):
    """Return a plan that computes and meets in turns, one step at a time; comm on one stream."""
    rows = [Row("data", duration_ns=0.0)]
    for index, group in enumerate(moves):
        group = group if isinstance(group, tuple) else (group,)
        rows += [Row(f"compute.{index}"), Row(f"comm.{index}", group, "comm")]
    rows.append(Row("end"))
    edges = [(i, i + 1) for i in range(len(rows) - 1)]
    return plan_of_rows(rows, [*edges, (0, len(rows) - 1, slots)], **options)


def with_moves(plan, name, moves):
    """Return a plan whose actor moves something else."""
    other = chain_plan(moves)
    launches = next(a for a in other.actors if a.name == "comm.0").launches
    base = len(plan.views)
    views = (*plan.views, *[replace(v, register=plan.views[0].register) for v in other.views])
    launches = [
        replace(
            launch,
            inputs=tuple(base + v for v in launch.inputs),
            outputs=tuple(base + v for v in launch.outputs),
            source=len(plan.sources) + launch.source,
        )
        for launch in launches
    ]
    actors = [replace(a, launches=tuple(launches)) if a.name == name else a for a in plan.actors]
    sources = (*plan.sources, *other.sources)
    return replace(plan, views=views, actors=tuple(actors), sources=sources)
