"""A GPU's choice between two bodies: both run, and what the flag did not choose is left behind.

The host would have to wait for the flag to look at it. So the calls of both bodies go into the
graph of the chain, one after the other in one frame, and a kernel that reads the flag on the device
copies the results of the one that was chosen: no bit of the other is seen, NaN or not. A bad index
counts where the flag, and those of the choices around it, chose its body (`StatusWord.guards`).

Conditional nodes of graphs (CUDA 12.4) would leave the other body out. They are not used: a body of
theirs is a graph of its own, with fewer kinds of nodes, that the driver takes apart in its own way,
and nothing that runs without a GPU could show that it does what is meant.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from actors.kernels.branch import plan_in
from actors.kernels.cuda.calls import DeviceCall, KernelText, LaunchCalls, OneOf, RunKernel
from actors.kernels.cuda.gpu import Gpu
from actors.kernels.cuda.scan import BodyCalls
from actors.kernels.cuda.strided_copy import ELEMENT_TYPES
from actors.kernels.cuda.views import DeviceView, PlacedView, on_device
from actors.kernels.kernel import Attrs, KernelNeeds, Operands
from compiler.sub_plan import SubPlan, frame_of

_THREADS = 256
_BODIES = (("then", 1), ("otherwise", 0))
"""The bodies of a choice, each with the value of the flag that chooses it."""


@functools.cache
def choose_text(item: int) -> KernelText:
    """Return the kernel that copies elements of 1, 2, 4, 8 or 16 bytes where a bool says so."""
    text = Path(__file__).with_name("choose.cuh").read_text(encoding="utf-8")
    text = text.replace("NAME_TYPE", ELEMENT_TYPES[item])
    about = f"copies elements of {item} bytes where a bool says so"
    return KernelText.of("af_choose", text, ("NAME",), about, has_exchanges=False)


@dataclass(frozen=True, slots=True)
class CudaCond:
    """Runs two sub-plans, and keeps the results of one. It takes dense operands."""

    gpu: Gpu
    name: str = "cuda.cond"
    op: str = "cond"

    def query(self, attrs: Attrs, inputs: Operands, outputs: Operands) -> KernelNeeds | None:
        """Ask for the larger frame: a body's results are taken before the next one runs."""
        bodies = [body for name, _ in _BODIES if isinstance(body := attrs[name], SubPlan)]
        moved = sum([2 * operand.type.size_bytes for operand in outputs])
        copies = 2 * len(outputs) * self.gpu.call_ns + self.gpu.bytes_ns(moved)
        if len(bodies) != len(_BODIES):  # a device is chosen before there are plans
            return KernelNeeds(duration_ns=copies)
        if not all([x.is_dense for x in (*inputs, *outputs)]):
            return None
        return KernelNeeds(
            workspace_bytes=max([frame_of(body.plan).size_bytes for body in bodies]),
            duration_ns=sum([body.duration_ns for body in bodies]) + copies,
        )

    def bind(
        self,
        attrs: Attrs,
        inputs: tuple[PlacedView, ...],
        outputs: tuple[PlacedView, ...],
        workspace: DeviceView | None,
    ) -> LaunchCalls:
        """Return the calls of both bodies. Raises InternalError where one is no plan."""
        given, made = on_device(inputs), on_device(outputs)
        calls: list[DeviceCall | OneOf] = []
        for name, wanted in _BODIES:
            guard = given[0].address, wanted
            body = BodyCalls(self.gpu, plan_in(attrs, name), given, made, workspace)
            calls += [_guarded(call, guard) for call in body.calls(-1)]
            calls += self._kept(
                [*zip(made, map(body.result, range(len(made))), strict=True)], guard
            )
        return tuple(calls)

    def _kept(
        self, moves: list[tuple[DeviceView, DeviceView]], guard: tuple[int, int]
    ) -> Iterator[RunKernel]:
        """Yield copies of results that do something where the flag chose their body."""
        most = 4 * self.gpu.num_sms * self.gpu.threads_per_sm // _THREADS
        for target, source in moves:
            size = target.type.size_bytes
            if not size:
                continue
            item = math.gcd(max(ELEMENT_TYPES), target.address, source.address, size)
            text, count = choose_text(item), size // item
            words = (target.address, source.address, count, *guard)
            blocks = min(-(-count // _THREADS), most)
            yield RunKernel(text, text.kernels[0], blocks, _THREADS, words)


def _guarded(call: DeviceCall | OneOf, guard: tuple[int, int]) -> DeviceCall | OneOf:
    """Return a call whose bad indices count where a bool has a value; ways report none."""
    if not isinstance(call, RunKernel) or call.status is None:
        return call
    return replace(call, status=replace(call.status, guards=(*call.status.guards, guard)))
