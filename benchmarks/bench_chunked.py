"""The loss of a language model with its gradients, as one region, against its products alone.

`python benchmarks/bench_chunked.py [--torch]`: 1,024 rows of width 384, 50,257 classes, float32 and
bfloat16. The products are what no implementation can do without: three, each of 2 x rows x width x
classes operations, timed one after the other in chunks of the region's. Rounds are interleaved, the
best of each is printed. `--torch` times torch's, if it is installed.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

import numpy as np

import actorflow as af
from actorflow.environment.native import enable_native
from actorflow.environment.settings import Settings
from actors.kernels.common.kernel import Operand, require_plan
from actors.kernels.host import catalogue
from actors.kernels.library.launch import NativeChain, NativeLaunch
from actors.kernels.native.region import CHUNKED_KERNELS
from compiler.contract.plan import Plan
from compiler.contract.plan_tables import Launch
from compiler.contract.types import DType, TensorType

ROWS, WIDTH, CLASSES, ROUNDS = 1024, 384, 50_257, 5


def main() -> None:
    """Print one line for each precision."""
    enable_native(Settings.from_env(os.environ))
    for precision in ("fp32", "bf16"):
        launch, _ = bound(precision)
        calls = region_calls(launch)
        timed: dict[str, Callable[[], object]] = {"region": launch}
        if "--torch" in sys.argv and precision == "fp32":
            timed["torch"] = torch_step()
        best = {name: min([seconds(call) for _ in range(ROUNDS)]) for name, call in timed.items()}
        each = np.min([calls.timed() for _ in range(ROUNDS)], axis=0) / 1e6
        steps = each.reshape(-1, len(each) // chunks_of(precision)).sum(0)
        flops = 6.0 * ROWS * WIDTH * CLASSES
        for name, least in best.items():
            print(f"{precision} {name}: {least * 1e3:.0f} ms, {flops / least / 1e9:.0f} GFLOP/s")
        print(f"{precision} by step of the region, ms: {', '.join(f'{x:.1f}' for x in steps)}")


class Head(af.nn.Module):
    """A head on top of given features: x gets a gradient as a parameter."""

    def __init__(self) -> None:
        self.x = af.nn.Parameter((ROWS, WIDTH), (("kind", "zeros"),))
        self.head = af.nn.Linear(WIDTH, CLASSES, bias=False)

    def __call__(self) -> af.Tensor:
        """Return the logits."""
        return self.head(self.x)


def region_launch(precision: str) -> tuple[Plan, Launch]:
    """Return the plan of a training step, and its launch of the region."""

    @af.job(optimizer=af.optim.SGD(0.1), precision=precision)
    def train(model: Head, batch: af.Batch) -> af.Tensor:
        return af.cross_entropy(model(), batch.y)

    plan = train.compile(Head(), {"y": TensorType(DType.INT32, (ROWS,))})
    return plan, next(x for a in plan.actors for x in a.launches if x.kernel == "c.chunked")


def chunks_of(precision: str) -> int:
    """Return how many chunks the region has."""
    _, launch = region_launch(precision)
    return len(dict(launch.attrs)["region"].chunks())  # type: ignore[union-attr]  # a region


def bound(precision: str) -> tuple[NativeLaunch, tuple[np.ndarray, ...]]:
    """Return the launch of the region on random numbers, and its operands."""
    plan, launch = region_launch(precision)
    attrs = dict(launch.attrs)
    views = [plan.views[i] for i in (*launch.inputs, *launch.outputs)]
    operands = [Operand(v.type, 0, v.strides_bytes) for v in views]
    arrays = tuple([_array(operand) for operand in operands])
    count = len(launch.inputs)
    sides = tuple(operands[:count]), tuple(operands[count:])
    name, needs = catalogue.select_kernel("region", attrs, *sides)
    kernel = catalogue.kernels_by_name()[name]
    assert kernel in CHUNKED_KERNELS, name
    raw = np.empty(needs.workspace_bytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    block = raw[start : start + needs.workspace_bytes]
    bind = require_plan(kernel, attrs, *sides).bind
    return bind(arrays[:count], arrays[count:], block), arrays


def region_calls(launch: NativeLaunch) -> NativeChain:
    """Return the table of a region's calls."""
    return next(x for x in launch.keep if isinstance(x, NativeChain))


def _array(operand: Operand) -> np.ndarray:
    rng, dtype = np.random.default_rng(0), operand.type.dtype
    if dtype.is_integer:
        return rng.integers(0, CLASSES, operand.shape).astype(operand.dtype)
    dense = (rng.standard_normal(operand.shape) / 16).astype(np.float32)
    if dtype is DType.BFLOAT16:
        dense = (dense.view(np.uint32) >> 16).astype(np.uint16)
    if operand.is_dense:
        return dense
    return np.ascontiguousarray(dense.T).T


def torch_step() -> Callable[[], object]:
    """Return torch's loss and gradients."""
    import torch

    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    weight = (torch.randn(CLASSES, WIDTH) / 16).requires_grad_()
    labels = torch.randint(0, CLASSES, (ROWS,))

    def step() -> None:
        x.grad = weight.grad = None
        torch.nn.functional.cross_entropy(x @ weight.T, labels).backward()

    return step


def seconds(call: Callable[[], object]) -> float:
    """Return how long a call takes."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
