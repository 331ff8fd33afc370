"""Plans of the check's jobs, and the launches of a plan on memory of one's own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from engines.actorflow_models import FAMILIES, OnDemand, job_of
from rows.all_rows import find_row
from rows.bert import SIZES as BERT
from rows.bert import bert_row
from rows.gpt2 import SIZES as GPT2
from rows.gpt2 import gpt2_row
from rows.row import Arrays, Row

from actors.kernels.cuda import catalogue
from actors.kernels.cuda.calls import DeviceCalls
from actors.kernels.cuda.views import DeviceView
from compiler.placement import DeviceKind, Memory
from compiler.plan import Launch, Plan
from gpu.opened import GPU

MEASURED = ("tiny", "gpt2-b1", "gpt2-b8", "gpt2-b64", "bert-base")
SMALL = {"layers": 2, "width": 64, "heads": 2, "seq": 42, "batch": 3, "vocab": 384}
"""Sizes at which the large models are compared with the host."""

TINY = GPT2 | {"layers": 1, "width": 32, "heads": 2, "seq": 14, "batch": 2, "vocab": 64}
"""Sizes at which the check itself is tried."""


def proven_rows(*, is_tiny: bool) -> tuple[tuple[Row, str], ...]:
    """Return rows and precisions whose steps are compared with the host's."""
    if is_tiny:
        return (_short(find_row("tiny"), 3), "fp32"), (gpt2_row("tiny-gpt2", TINY), "bf16")
    return (
        (find_row("tiny"), "fp32"),
        (gpt2_row("small-gpt2", GPT2 | SMALL), "fp32"),
        (gpt2_row("small-gpt2", GPT2 | SMALL), "bf16"),
        (bert_row("small-bert", BERT | SMALL), "bf16"),
        *[(find_row(name), "fp32") for name in ("mlp", "char-gpt", "wide-deep")],
        (find_row("mlp"), "bf16"),
    )


def measured_rows(*, is_tiny: bool) -> tuple[tuple[Row, str], ...]:
    """Return rows and precisions that are timed."""
    if is_tiny:
        return proven_rows(is_tiny=True)
    rows = [find_row(name) for name in MEASURED]
    return tuple([(row, row.precisions[-1]) for row in rows])


def _short(row: Row, layers: int) -> Row:
    """Return a row of fewer layers."""
    gone = tuple([f"layers.{i}." for i in range(layers, row.sizes["layers"])])

    def weights() -> Arrays:
        return {n: a for n, a in row.weights().items() if not n.startswith(gone)}

    return replace(row, sizes=dict(row.sizes) | {"layers": layers}, weights=weights)


def plan_of(row: Row, precision: str) -> Plan:
    """Return the plan of a row for the GPU that the check is made for; none is needed."""
    model, loss = FAMILIES[row.family](row)
    job = job_of(row, precision, loss, device="cuda", gpu=GPU)
    return job.compile(model, OnDemand(row.batches()))


@dataclass(frozen=True, slots=True)
class BoundCalls:
    """A launch of a plan, with the views that it is bound on and what it asks of the device."""

    launch: Launch
    inputs: tuple[DeviceView, ...]
    outputs: tuple[DeviceView, ...]
    workspace: DeviceView | None
    calls: DeviceCalls

    @property
    def key(self) -> str:
        """The same for launches that take equally long."""
        lie = [(str(v.type), v.strides_bytes) for v in (*self.inputs, *self.outputs)]
        return f"{self.launch.kernel} {self.launch.attrs} {lie}"


def bound_launches(
    plan: Plan, base: int = 1 << 40, host_base: int = 1 << 44
) -> Iterator[BoundCalls]:
    """Yield the launches of a plan on a GPU, whose arena lies at `base`; nothing is asked of it.

    Of registers with several slots it is the first. `host_base` is where pinned memory begins.
    """
    kernels = catalogue.binders(GPU)

    def view(index: int) -> DeviceView:
        said = plan.views[index]
        register = plan.registers[said.register]
        is_device = plan.arenas[register.arena].memory is Memory.DEVICE
        offset = register.offsets_bytes[0] + said.offset_bytes
        address = (base if is_device else host_base) + offset
        return DeviceView(address, said.type, said.strides_bytes)

    for actor in plan.actors:
        if plan.streams[actor.stream].device.kind is not DeviceKind.CUDA:
            continue
        for launch in actor.launches:
            inputs = tuple([view(v) for v in launch.inputs])
            outputs = tuple([view(v) for v in launch.outputs])
            workspace = None if launch.workspace is None else view(launch.workspace)
            kernel = kernels[launch.kernel]
            calls = kernel.bind(dict(launch.attrs), inputs, outputs, workspace)
            yield BoundCalls(launch, inputs, outputs, workspace, calls)


def device_bytes(plan: Plan) -> int:
    """Return the bytes of a plan's arena on the GPU."""
    return sum([a.size_bytes for a in plan.arenas if a.memory is Memory.DEVICE])
