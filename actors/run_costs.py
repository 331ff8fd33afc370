"""What a firing costs beside its launches, and the machine that all firings of a plan share.

A chain that runs on the dispatcher's thread costs a *turn* besides: the messages of its end, and
the next begin. Between threads a message costs a *hop*: one thread lets the other go on, which
sleeps. A port is Python on a thread of its own, and keeps one core busy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from actors.contention import SharedHost
from actors.kernels.c_rates import Price
from actors.table import MachineTable
from compiler.plan import PORTED, Actor, ActorKind, Plan


@dataclass(frozen=True, slots=True)
class RunCosts:
    """What a run of any plan costs here, beside its launches.

    `source_ns` and `sink_ns` are for one firing of a port, `port_byte_ns` for a byte of a batch.
    """

    turn_ns: float = 0.0
    hop_ns: float = 0.0
    source_ns: float = 0.0
    sink_ns: float = 0.0
    port_byte_ns: float = 0.0


def on_host(
    plan: Plan, firings: Sequence[Price], capacity: float, costs: RunCosts
) -> tuple[tuple[float, ...], SharedHost]:
    """Return the durations of a plan's firings with all that they cost, and who shares the cores.

    `firings` has the launches alone, by actor; `capacity` is as in `SharedHost`.
    """
    has_threads = MachineTable.of(plan).is_detached
    full: list[Price] = []
    for actor, own, has_thread in zip(plan.actors, firings, has_threads, strict=True):
        if actor.kind in PORTED:
            port = _port_ns(plan, actor, costs)
            full.append(Price(port, port))
        else:
            turn = 0.0 if has_thread else costs.turn_ns
            full.append(Price(own.duration_ns + turn, own.busy_ns + turn))
    wakes = costs.hop_ns + (costs.turn_ns if all(has_threads) else 0.0)
    return tuple([x.duration_ns for x in full]), SharedHost(
        capacity,
        tuple([x.busy_ns / x.duration_ns if x.duration_ns else 1.0 for x in full]),
        tuple([wakes if has_thread else 0.0 for has_thread in has_threads]),
        tuple([costs.hop_ns if has_thread else 0.0 for has_thread in has_threads]),
    )


def _port_ns(plan: Plan, actor: Actor, costs: RunCosts) -> float:
    ports = (*actor.inputs, *actor.outputs)
    size = sum([plan.registers[port.register].size_bytes * port.rate for port in ports])
    own = costs.source_ns if actor.kind is ActorKind.SOURCE else costs.sink_ns
    return own + size * costs.port_byte_ns
