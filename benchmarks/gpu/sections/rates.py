"""The rates of the card, measured on what plans launch, as a description of it.

What is found becomes OUT_DIR/<gpu>.json: a file for actors/kernels/cuda. Its `measured` has every
launch that was timed, in a graph as plans have it, beside what the description in use said.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial
from statistics import median
from types import MappingProxyType
from typing import cast

import numpy as np

from actors.device.cuda import cudnn
from actors.device.cuda.device import CudaDevice
from actors.device.cuda.driver import CudaDriver
from actors.device.cuda.streams import CudaStream
from actors.kernels.cuda.kernel import DeviceView, Gpu, gpu_named
from actors.kernels.program.phases import weight
from compiler.contract.program import FusedProgram, Instruction, Kind, ProgramInput
from compiler.contract.types import DType, TensorType, ValueId, numpy_dtype
from gpu.launched import Emitter, Probe, ProbeLaunch, Tensor, bind_probe, fill_random, launch_ns
from gpu.opened import GPU, device_seconds, open_device, open_driver
from gpu.section import RATES, Findings, Place
from gpu.sections.ceilings import event_gap_s, graph_of, small_launch

_BF16, _FP16, _FP32, _FP64 = DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32, DType.FLOAT64
_SPACE = 2 << 30
_MOVED, _IN_CACHE, _NODES, _COPIES = 256 << 20, 8 << 20, 500, 20
_LINK_BYTES = 256 << 20
_ROWS, _WIDTH, _VOCAB = 65_536, 768, 50_304
_TINY = 12
_HEADS = (64, 12, 1024, 64), (16, 12, 4096, 64), (1, 12, 1024, 64)
"""Heads of attention: of GPT-2's step, longer ones, and few."""

_LARGE_FLOPS = 2e10
"""Products of so many reach the rate that they are given; smaller ones tell what they fall short.
"""


def _product(m: int, k: int, n: int, dtype: DType = _BF16, first: str = "") -> Probe:
    """Return a product [m, k] [k, n], of which `first` or both lie the other way round."""
    name = f"product {dtype.value} {m}x{k}x{n}{' ' * bool(first)}{first}"
    sides = Tensor(dtype, (m, k), "a" in first), Tensor(dtype, (k, n), "b" in first)
    return Probe(name, sides, lambda emit, a, b: emit("matmul", a, b))


PRODUCTS = (
    _product(8192, 8192, 8192),
    _product(4096, 4096, 4096, _FP16),
    _product(4096, 4096, 4096, _FP32),
    *[_product(_ROWS, k, n, first="b") for k, n in ((768, 768), (768, 2304), (768, 3072))],
    _product(_ROWS, 3072, 768, first="b"),
    _product(_ROWS, 2304, 768),
    *[_product(n, _ROWS, 768, first="a") for n in (768, 2304, 3072)],
    *[_product(8192, k, n, first="b") for k, n in ((768, 768), (768, 3072), (3072, 768))],
    *[_product(1024, k, n, first="b") for k, n in ((768, 768), (768, 2304), (768, 3072))],
    _product(1024, 3072, 768, first="b"),
    _product(768, 1024, 768, first="a"),
    _product(3072, 1024, 768, first="a"),
    _product(1024, 768, _VOCAB, first="b"),
    _product(1024, 768, 768, _FP32),
    _product(20, 512, 2048, _FP32),
    _product(20, 2048, 512, _FP32),
)


def _bias_gelu(emit: Emitter, x: ValueId, bias: ValueId) -> tuple[ValueId, ...]:
    return emit("gelu", *emit("add", x, bias))


def _many_gelus(emit: Emitter, x: ValueId) -> tuple[ValueId, ...]:
    for _ in range(4):
        (x,) = emit("gelu", x)
    return (x,)


def _sum_of_rows(emit: Emitter, x: ValueId) -> tuple[ValueId, ...]:
    return emit("sum", x, axes=(0,), keepdims=False)


_ADAM = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}
_ONE = Probe("one element", (Tensor(_FP32, (1,)),), lambda emit, x: emit("neg", x))
GELUS = Probe("work of 4 gelus in float32", (Tensor(_FP32, (1024, 2048)),), _many_gelus)


def _wide(dtype: DType = _BF16, rows: int = _ROWS, columns: int = _WIDTH) -> Tensor:
    return Tensor(dtype, (rows, columns))


def _slope_of_gelu(emit: Emitter, dy: ValueId, x: ValueId) -> tuple[ValueId, ...]:
    (dx,) = emit("gelu_grad", dy, x)
    return dx, *emit("sum", dx, axes=(0,), keepdims=False)


def _attention(heads: tuple[int, ...], *, gradient: bool = False, kernel: str = "") -> Probe:
    """Return causal attention of heads [.., rows, width], or its gradient.

    Products that the mask hides are not counted, and those computed twice are counted once.
    """
    *outer, rows, width = heads
    scores = math.prod(outer) * rows * (rows + 1) / 2
    one, attrs = Tensor(_BF16, heads), {"scale": width**-0.5, "causal": True}
    op, count = ("attention_grad", 5) if gradient else ("attention", 2)
    inputs = (one,) * 3
    if gradient:
        inputs = (*(one,) * 5, *(Tensor(_FP32, heads[:-1]),) * 2)
    name = f"{op} {'x'.join(map(str, heads))}{' ' * bool(kernel)}{kernel}"

    def emit_attention(emit: Emitter, *values: ValueId) -> tuple[ValueId, ...]:
        return emit(op, *values, **attrs)

    return Probe(name, inputs, emit_attention, 2.0 * count * scores * width, kernel)


def _norm_gradient(rows: int, dtype: DType = _BF16) -> Probe:
    def emit_gradient(emit: Emitter, *values: ValueId) -> tuple[ValueId, ...]:
        return emit("layer_norm_grad", *values, eps=1e-5, given=(0,), shape=emit.shape(values[0]))

    numbers = [Tensor(dtype, (rows,))] * 3
    inputs = *[_wide(dtype, rows)] * 2, Tensor(dtype, (_WIDTH,)), *numbers
    of = "" if dtype is _BF16 else f"{dtype.value} "
    return Probe(f"layer norm backward {of}{rows}x{_WIDTH}", inputs, emit_gradient)


def _norm(rows: int) -> Probe:
    inputs = _wide(rows=rows), *[Tensor(_BF16, (_WIDTH,))] * 2
    return Probe(f"layer norm {rows}x{_WIDTH}", inputs,
                 lambda emit, *values: emit("layer_norm", *values, eps=1e-5))  # fmt: skip


_OTHERS = (
    _ONE,
    GELUS,
    Probe("bias and gelu 65536x3072", (_wide(columns=3072), Tensor(_BF16, (3072,))), _bias_gelu),
    Probe("bias and gelu 1024x3072",
          (_wide(rows=1024, columns=3072), Tensor(_BF16, (3072,))), _bias_gelu),
    *[_norm(rows) for rows in (_ROWS, 1024)],
    *[_norm_gradient(rows) for rows in (_ROWS, 1024)],
    _norm_gradient(_ROWS, _FP32),
    Probe("slope of gelu with bias gradient 65536x3072", (_wide(columns=3072),) * 2,
          _slope_of_gelu),
    *[_attention(heads, gradient=gradient) for gradient in (False, True) for heads in _HEADS],
    *[Probe(f"column sums {rows}x2304", (_wide(rows=rows, columns=2304),), _sum_of_rows)
      for rows in (_ROWS, 1024)],
    Probe("sum over a batch 64x1024x768", (Tensor(_BF16, (64, 1024, 768)),), _sum_of_rows),
    Probe("losses 8192x50304", (_wide(rows=8192, columns=_VOCAB), Tensor(DType.INT32, (8192,))),
          lambda emit, x, y: emit("cross_entropy_rows", x, y)),
    Probe("embedding 65536 of 50304x768",
          (_wide(rows=_VOCAB), Tensor(DType.INT32, (_ROWS,))),
          lambda emit, w, ids: emit("embedding", w, ids)),
    Probe("embedding gradient 65536 of 50304x768",
          (_wide(), Tensor(DType.INT32, (_ROWS,))),
          lambda emit, dy, ids: emit("embedding_grad", dy, ids, rows=_VOCAB)),
    Probe("transposed 64x1024x768", (Tensor(_BF16, (64, 768, 1024), True),),
          lambda emit, x: emit("copy", x)),
    Probe("cast to bfloat16 50304x768", (_wide(_FP32, _VOCAB),),
          lambda emit, x: emit("cast", x, dtype="bfloat16")),
    Probe("adamw 50304x768",
          (*[_wide(_FP32, _VOCAB)] * 4, Tensor(_FP32, ()), Tensor(DType.INT64, ())),
          lambda emit, *values: emit("adamw_update", *values, **_ADAM)),
)  # fmt: skip

PROBES = (*_OTHERS, *PRODUCTS)
"""All that is launched."""

_BY_CUDNN = (_attention(_HEADS[0], gradient=True, kernel="cudnn.attention_grad"),)
"""What is launched besides, with cuDNN: its gradient with scores kept, which plans do not select.
"""


@dataclass(frozen=True, slots=True)
class Card:
    """A card that is measured: random numbers, and a space as large for what is launched."""

    driver: CudaDriver
    device: CudaDevice
    stream: CudaStream
    numbers: int
    space: int
    size_bytes: int
    num_ids: int

    def elements(self, dtype: DType, op: str, size: int, offset: int) -> ProbeLaunch:
        """Return a launch of one instruction on two vectors, the first bytes of each left out."""
        count = size // dtype.itemsize - 1
        program = FusedProgram((ProgramInput(dtype, Kind.FULL),),
                               (Instruction(op, (0,), dtype, Kind.FULL),), (1,))  # fmt: skip
        lies = TensorType(dtype, (1, count)), (dtype.itemsize * count, dtype.itemsize)
        views = [DeviceView(self.space + n * size + offset, *lies) for n in (0, 1)]
        attrs = MappingProxyType({"program": program, "rows": 1, "columns": count})
        launch = self.device.bind(
            "cuda.fused", attrs, (views[0],), (views[1],), None, (lies[0], lies[0])
        )
        planned_ns = 2 * size / gpu_named(GPU).bytes_per_ns
        return ProbeLaunch("", launch, planned_ns, 2 * size, attrs, (views[0],))

    def took_ns(self, bound: ProbeLaunch) -> float:
        """Return what a launch takes, on random numbers; integers are rows of its tables."""
        size = min(bound.size_bytes, self.size_bytes)
        self.driver.copy_later(self.space, self.numbers, size, self.stream.handle)
        self.driver.synchronize()
        for view in bound.inputs:
            if view.dtype.is_integer:
                ids = np.random.default_rng(1).integers(0, self.num_ids, view.type.num_elements)
                array = ids.astype(numpy_dtype(view.dtype))
                self.driver.copy(view.address, array.ctypes.data, array.nbytes)
        return launch_ns(self.driver, self.device, self.stream, bound.launch, bound.planned_ns)


def run(found: Findings, place: Place) -> None:
    is_tiny = place.is_emulated
    driver = open_driver(place)
    device = open_device(place, driver)
    stream = device.make_stream("rates")
    size = 8 << 20 if is_tiny else _SPACE
    numbers = driver.allocate(size)
    fill_random(driver, numbers, size)
    space, num_ids = driver.allocate(size), _TINY if is_tiny else _VOCAB
    card = Card(driver, device, stream, numbers, space, size, num_ids)
    rates, took = Rates(gpu_named(GPU)), {}
    with found.part("launches, events and the link"):
        _calls(rates, driver, stream.handle, is_tiny=is_tiny)
    with found.part("memory"):
        _memory(rates, card, is_tiny=is_tiny)
    bound = []
    for probe in (*PROBES, *(_BY_CUDNN if not is_tiny and cudnn.can_run() else ())):
        with found.part(probe.name):
            bound.append(bind_probe(device, _small(probe) if is_tiny else probe, card.space))
    for launch in bound:
        with found.part(launch.name):
            took[launch.name] = launch, card.took_ns(launch)
            found.fact(launch.name, _told(*took[launch.name]))
    fit_rates(rates, took)
    for name, value in rates.changed.items():
        for part, number in value.items() if isinstance(value, Mapping) else (("", value),):
            found.metric(f"{name}{' ' * bool(part)}{part}", number)
    seen, now = driver.seen(), time.strftime("%Y-%m-%d", time.gmtime())
    where = f"one {'emulated ' * is_tiny}{seen.name} on {now} (CUDA {seen.driver_version})"
    place.tell(RATES, rates.description(took, where))


Took = Mapping[str, tuple[ProbeLaunch, float]]
"""Launches by the names of their probes, and what they took in ns."""


class Rates:
    """A description of the GPU, and what of it was measured."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.changed: dict[str, object] = {}

    def now(self, name: str) -> float:
        """Return a number as it is known by now."""
        return cast("float", self.changed.get(name, getattr(self.gpu, name)))

    def description(self, took: Took, where: str) -> dict[str, object]:
        """Return what is a file of actors/kernels/cuda."""
        known = {field.name: getattr(self.gpu, field.name) for field in fields(Gpu)} | self.changed
        return {
            **{n: dict(v) if isinstance(v, Mapping) else v for n, v in known.items()},
            "note": f"Measured on {where} by the section rates of benchmarks/gpu:"
            f" {', '.join(self.changed)}. The rest is as it was.",
            "measured": {name: _told(*pair) for name, pair in took.items()},
        }  # fmt: skip


def _calls(rates: Rates, driver: CudaDriver, stream: int, *, is_tiny: bool) -> None:
    """Measure a kernel of a graph, an event between streams, and the link to the host."""
    put, nodes = small_launch(driver, stream), 5 if is_tiny else _NODES
    launch = partial(driver.graph_later, graph_of(driver, stream, put, nodes), stream)
    rates.changed["call_ns"] = _short(1e9 * device_seconds(driver, launch) / nodes)
    gap_s = event_gap_s(driver, stream, driver.make_stream("other"), put, is_tiny=is_tiny)
    rates.changed["event_ns"] = _short(1e9 * gap_s)
    size = 1 << 16 if is_tiny else _LINK_BYTES
    there, here = driver.allocate(size), driver.allocate_pinned(size)
    copy = partial(driver.copy_later, there, here, size, stream)
    rates.changed["link_bytes_per_ns"] = _short(size / device_seconds(driver, copy, 0.05) / 1e9)
    one = partial(driver.copy_later, there, here, 4, stream)
    copies = partial(driver.graph_later, graph_of(driver, stream, one, _COPIES), stream)
    rates.changed["link_latency_ns"] = _short(1e9 * device_seconds(driver, copies) / _COPIES)
    driver.free(there)
    driver.free_pinned(here)


def _memory(rates: Rates, card: Card, *, is_tiny: bool) -> None:
    """Measure copies, the cache, and what threads reach that move few bytes at a time."""
    driver, half = card.driver, card.size_bytes // 2
    copy = partial(driver.copy_later, card.space, card.space + half, half, card.stream.handle)
    rate = 2 * half / device_seconds(driver, copy, 0.05) / 1e9
    rates.changed["bytes_per_ns"] = _short(rate)
    size = 1 << 12 if is_tiny else _MOVED
    # From an odd address on elements are moved one by one.
    ways = {1: (DType.BOOL, "not", 1), 2: (_BF16, "neg", 2), 4: (_FP32, "neg", 4),
            8: (_FP64, "neg", 8), 16: (_BF16, "neg", 0)}  # fmt: skip
    launches = {n: card.elements(dtype, op, size, at) for n, (dtype, op, at) in ways.items()}
    cached = card.elements(_BF16, "neg", min(size, _IN_CACHE), 0)
    call_ns = rates.now("call_ns")
    shares = {n: _short(b.size_bytes / _less(card.took_ns(b), call_ns) / rate)
              for n, b in launches.items()}  # fmt: skip
    rates.changed["narrow_rates"] = shares
    fast = cached.size_bytes / _less(card.took_ns(cached), call_ns) / shares[16]
    rates.changed["l2_bytes_per_ns"] = _short(max(fast, rate))


def fit_rates(rates: Rates, took: Took) -> None:
    """Give products and other work the rates with which the estimates of plans come out."""
    call_ns = rates.now("call_ns")
    if _ONE.name in took:
        rates.changed["latency_ns"] = _short(_less(took[_ONE.name][1], call_ns))
    if GELUS.name in took:
        bound, ns = took[GELUS.name]
        program = cast("FusedProgram", bound.attrs["program"])
        elements = bound.size_bytes / 8
        rates.changed["flops_per_ns"] = _short(elements * weight(program) / _less(ns, call_ns))
    products = dict(rates.gpu.product_flops_per_ns)
    for dtype, rate in products.items():
        those = [took[p.name] for p in PRODUCTS if p.name in took
                 and p.inputs[0].dtype.value == dtype and _flops(p) >= _LARGE_FLOPS]  # fmt: skip
        times = [_less(b.planned_ns, rates.gpu.call_ns) / _less(ns, call_ns) for b, ns in those]
        if times:
            products[dtype] = _short(rate * median(times))
    rates.changed["product_flops_per_ns"] = products


def _flops(probe: Probe) -> float:
    (m, k), (_, n) = [x.shape for x in probe.inputs]
    return 2.0 * m * k * n


def _less(ns: float, call_ns: float) -> float:
    return max(ns - call_ns, 1.0)


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def _told(bound: ProbeLaunch, ns: float) -> str:
    rate = f"{bound.size_bytes / ns / 1e3:.3f} TB/s"
    if bound.flops:
        rate += f", {bound.flops / ns / 1e3:.0f} TFLOP/s"
    return f"{ns / 1e3:.2f} us, planned {bound.planned_ns / 1e3:.2f}, {rate}"


def _small(probe: Probe) -> Probe:
    """Return a probe at the sizes at which the check itself is tried."""
    tensors = [
        Tensor(x.dtype, tuple([min(n, _TINY) for n in x.shape]), x.is_transposed)
        for x in probe.inputs
    ]
    return Probe(probe.name, tuple(tensors), probe.emit)
