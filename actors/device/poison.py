"""Scribble over bytes that a plan calls free, so that who reads them too late is seen.

A plan that is poisoned gets one more launch at the end of each chain on a device that the host
acts: a simulated one, or an emulated GPU. It fills with 0xFF, which is NaN for floating point, what
nobody may need when the firing ends: the chain's TEMPORARY registers, and every slot of an input
that has no other consumer. A right plan gives the same numbers with it; and since it is a plan,
`actors.race` proves that no poison hits what somebody else still uses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from types import MappingProxyType

import numpy as np

from actors.kernels.cuda.calls import DeviceCalls, FillBytes
from actors.kernels.cuda.kernel import CudaKernel
from actors.kernels.cuda.views import DeviceView, PlacedView, address_of
from actors.kernels.kernel import Attrs, Kernel, Operands
from actors.protocol import Array, Arrays, Launch
from compiler.placement import DeviceKind
from compiler.plan import Actor, Plan, Register, RegisterKind, View
from compiler.plan import Launch as PlannedLaunch
from compiler.types import DType, RegisterId, TensorType

_NAME = "poison"


def poison(plan: Plan, kinds: Collection[DeviceKind] = (DeviceKind.SIM,)) -> Plan:
    """Return the plan with poison at the end of each chain on devices of some kinds."""
    views = list(plan.views)
    num_consumers = Counter([port.register for actor in plan.actors for port in actor.inputs])
    actors = []
    for actor in plan.actors:
        if plan.streams[actor.stream].device.kind not in kinds:
            actors.append(actor)
            continue
        touched = [plan.registers[number] for number in _touched(plan, actor)]
        own = [port.register for port in actor.inputs if num_consumers[port.register] == 1]
        free = [r for r in touched if r.kind is RegisterKind.TEMPORARY or r.id in own]
        kept = [r for r in touched if r not in free]
        targets = []
        for register in free:
            if not any([_overlap(register, other) for other in kept]):
                type_ = TensorType(DType.UINT8, (register.size_bytes,))
                targets.append(len(views))
                views.append(View(register.id, 0, type_, (1,)))
        if targets:
            launch = PlannedLaunch(_NAME, _NAME, (), (), tuple(targets), None, "", 0, 0.0)
            actor = replace(actor, launches=(*actor.launches, launch))
        actors.append(actor)
    return replace(plan, views=tuple(views), actors=tuple(actors))


def _touched(plan: Plan, actor: Actor) -> tuple[RegisterId, ...]:
    """Return the registers of an actor's launches, each once, in order of first use."""
    views = [
        view
        for launch in actor.launches
        for view in (*launch.inputs, *launch.outputs, launch.workspace)
        if view is not None
    ]
    return tuple(dict.fromkeys([plan.views[view].register for view in views]))


def _overlap(one: Register, other: Register) -> bool:
    return one.arena == other.arena and any(
        [
            a < b + other.size_bytes and b < a + one.size_bytes
            for a in one.offsets_bytes
            for b in other.offsets_bytes
        ]
    )


class _Poison:
    """The kernel that fills its outputs with 0xFF; no graph has its op."""

    name = op = _NAME

    def query(self, attrs: Attrs, inputs: Operands, outputs: Operands) -> None:
        """Take no call of a graph."""

    def bind(
        self, attrs: Attrs, inputs: Arrays, outputs: Arrays, workspace: Array | None
    ) -> Launch:
        """Return the launch."""

        def scribble() -> None:
            for output in outputs:
                output[...] = np.uint8(0xFF)

        return scribble


class _CudaPoison:
    """The same on a GPU."""

    name = op = _NAME

    def query(self, attrs: Attrs, inputs: Operands, outputs: Operands) -> None:
        """Take no call of a graph."""

    def bind(
        self,
        attrs: Attrs,
        inputs: tuple[PlacedView, ...],
        outputs: tuple[PlacedView, ...],
        workspace: DeviceView | None,
    ) -> DeviceCalls:
        """Return the fills."""
        return tuple([FillBytes(address_of(x), 0xFF, x.shape[0]) for x in outputs if x.shape[0]])


POISON_KERNELS: Mapping[str, Kernel] = MappingProxyType({_NAME: _Poison()})
"""What a poisoned plan needs on simulated devices besides its own kernels."""

CUDA_POISON_KERNELS: Mapping[str, CudaKernel] = MappingProxyType({_NAME: _CudaPoison()})
"""What a poisoned plan needs on emulated GPUs besides its own kernels."""
