"""The edges of a program to and from the threads of the host that feed it and read from it.

A source fills a register of batches; sinks read registers of outputs, one for each chain that makes
some. How many slots these have follows from how long either end takes, and from the bytes.
"""

from __future__ import annotations

from compiler.lowering.chain_actors import ChainActors
from compiler.ops.sources import INPUT, declared_part
from compiler.placement import HOST_SIDE
from compiler.plan import ActorKind, RegisterKind
from compiler.types import RegisterId, ValueId
from memory.slots import choose_slots

IO_NS = 50_000.0
"""What a host thread is assumed to need per firing, besides its bytes; only slots depend on it."""

IO_BYTES_PER_NS = 1.0
"""Bytes that a host thread is assumed to read or write per nanosecond."""

IO_LATENCY_NS = 1e6
"""How late a source may be now and then: the batches of that time need slots.

Outputs get none for it: every step under way there is one that a check of its loss comes too late.
"""

MAX_IO_SLOTS = 16
"""Slots of an edge to or from a host thread, at most, and a power of two where more than 2.

Every slot binds the launches that touch it once more; powers of two come round together.
"""

EDGE_BUDGET_BYTES = 64 << 20
"""Slots of one edge to or from a host thread may take this much; a larger slot stays single."""


def add_source(chains: ChainActors, source: str, name: str) -> tuple[int, RegisterId]:
    """Add the source of a program's batches; return it and its register."""
    program = chains.program
    nodes = [n for n in program.graph.nodes if n.op is INPUT]
    types = [program.graph.types[n.outputs[0]] for n in nodes]
    place = chains.place_of([n.outputs[0] for n in nodes])
    offsets, size = chains.plan.stack(types, place)
    reader = "feed" if place == HOST_SIDE else "compute"
    ends = (source, _io_ns(size)), (reader, program.batch_ns)
    slots, reason = _slots(size, 1, *ends, place, latency_ns=IO_LATENCY_NS)
    if program.is_pipelined and slots < program.in_flight + 1:
        slots, reason = program.in_flight + 1, "batches under way read it until they are done"
    register = chains.plan.register(
        name,
        RegisterKind.DATA,
        size,
        num_slots=slots,
        reason=reason,
        place=place,
    )
    for node, offset in zip(nodes, offsets, strict=True):
        label = node.attrs.str_("name")
        part = declared_part(node.attrs)
        chains.add_field(label, node.outputs[0], (register, offset), node.source, part)
    actor = chains.actors.add(source, ActorKind.SOURCE, chains.plan.port(source))
    chains.actors.produce(actor, register)
    return actor, register


def place_outputs(chains: ChainActors, name: str, rate: int) -> dict[int, RegisterId]:
    """Add a register of outputs for each chain that makes some; return them by chain.

    A sink will consume those of `rate` batches per firing.
    """
    program = chains.program
    producers = program.graph.producers()
    by_chain: dict[int, list[tuple[str, ValueId]]] = {}
    for output in program.graph.outputs:
        chain = program.maker[output.value]
        by_chain.setdefault(chain, []).append((output.name, output.value))
    registers: dict[int, RegisterId] = {}
    for chain, items in by_chain.items():
        place = chains.place_of([value for _, value in items])
        offsets, size = chains.plan.stack([program.graph.types[v] for _, v in items], place)
        maker = "fetch" if place == HOST_SIDE else "compute"
        taken = _taken(chains, chain, rate)
        slots, reason = _slots(
            size, taken, (maker, program.batch_ns), (name, taken * _io_ns(size)), place
        )
        register = chains.plan.register(
            name if len(by_chain) == 1 else f"{name}.{len(registers)}",
            RegisterKind.DATA,
            size,
            num_slots=slots,
            reason=reason,
            place=place,
        )
        registers[chain] = register
        for (label, value), offset in zip(items, offsets, strict=True):
            source = program.graph.nodes[producers[value]].source
            chains.add_field(label, value, (register, offset), source)
        chains.actors.produce(chains.numbers[chain], register)
        for _, value in items:
            for other in chains.readers(value):
                if other != chain and not chains.actors.reads(chains.numbers[other], register):
                    number = chains.numbers[other]
                    chains.actors.consume(number, register, chains.numbers[chain])
    return registers


def add_sink(
    chains: ChainActors,
    name: str,
    outputs: dict[int, RegisterId],
    rate: int,
    *,
    is_flushed: bool,
) -> int:
    """Add an actor that reads outputs of `rate` batches per firing; return it."""
    sink = chains.actors.add(name, ActorKind.SINK, chains.plan.port(name), is_flushed=is_flushed)
    for chain, register in outputs.items():
        number = chains.numbers[chain]
        chains.actors.consume(sink, register, number, _taken(chains, chain, rate))
    return sink


def _taken(chains: ChainActors, chain: int, batches: int) -> int:
    """Return how often a chain fires for some batches: once for all of a step, or for each."""
    program = chains.program
    return batches // (program.batches_per_step if program.chains[chain].is_per_step else 1)


def _slots(
    size: int,
    consume: int,
    producer: tuple[str, float],
    consumer: tuple[str, float],
    place: int,
    latency_ns: float = 0.0,
) -> tuple[int, str]:
    """Return the slots of an edge to or from a host thread, and why so many.

    Pinned memory always has two: a link would else stand still while a port works.
    """
    least = consume * (2 if place == HOST_SIDE else 1)
    return choose_slots(
        consume,
        producer[1],
        consumer[1],
        size_bytes=size,
        budget_bytes=max(EDGE_BUDGET_BYTES, least * size),
        most=MAX_IO_SLOTS,
        latency_ns=latency_ns,
        names=(producer[0], consumer[0]),
    )


def _io_ns(size_bytes: int) -> float:
    return IO_NS + size_bytes / IO_BYTES_PER_NS
