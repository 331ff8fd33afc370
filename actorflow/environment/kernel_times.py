"""How long a convolution and a product take here, by numpy's kernels and by native ones.

The product is OpenBLAS's in both, so it tells the machine; the convolution tells what a C compiler
is worth on it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from actorflow.environment.native import kernel_choice_lock
from actorflow.environment.settings import Settings
from actors.kernels.common.kernel import Operand
from actors.kernels.host.calibration import Probe
from actors.machine.protocol import Launch
from compiler.contract.placement import HOST
from compiler.contract.types import DType, TensorType, contiguous_strides

_BATCH, _CHANNELS, _SIDE, _PRODUCT = 2, 16, 32, 512
_RUNS = 30

FLOPS = {
    "convolution": 2 * _BATCH * _CHANNELS**2 * _SIDE**2 * 9,
    "product": 2 * _PRODUCT**3,
}
"""Multiplications and additions of each call."""


@dataclass(frozen=True, slots=True)
class KernelTimes:
    """Milliseconds of each call of `FLOPS`; `native` is empty where nothing native runs."""

    numpy: Mapping[str, float] = field(default_factory=dict)
    native: Mapping[str, float] = field(default_factory=dict)


def measured_kernels(settings: Settings, *, has_compiler: bool) -> KernelTimes:
    """Measure both in about a second, with what has to be built before."""
    wanted = replace(settings, native=settings.native and has_compiler)
    # Deterministic: which library multiplies fastest is measured for jobs, and not for this.
    with kernel_choice_lock(wanted, (HOST,), deterministic=True) as is_native:
        native = _milliseconds() if is_native else {}
    with kernel_choice_lock(replace(wanted, native=False), (HOST,), deterministic=True):
        return KernelTimes(_milliseconds(), native)


def _milliseconds() -> dict[str, float]:
    launches = {name: probe.bind(on_all_threads=True) for name, probe in _probes().items()}
    runs = [{name: _timed(launch) for name, launch in launches.items()} for _ in range(_RUNS)]
    # The least: what other processes do on the machine only adds, to some runs more than all takes.
    return {name: min([run[name] for run in runs]) for name in launches}


def _timed(launch: Launch) -> float:
    before = time.perf_counter()
    launch()
    return (time.perf_counter() - before) * 1e3


def _probes() -> dict[str, Probe]:
    image, matrix = _dense(_BATCH, _CHANNELS, _SIDE, _SIDE), _dense(_PRODUCT, _PRODUCT)
    weight = _dense(_CHANNELS, _CHANNELS, 3, 3)
    attrs = dict.fromkeys(("strides", "dilation", "low", "high"), (1, 1)) | {"groups": 1}
    return {
        "convolution": Probe("conv", attrs, (image, weight), (image,)),
        "product": Probe("matmul", {}, (matrix, matrix), (matrix,)),
    }


def _dense(*shape: int) -> Operand:
    return Operand(TensorType(DType.FLOAT32, shape), 0, contiguous_strides(shape, 4))
