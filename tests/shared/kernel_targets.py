"""Kernels of numpy, of C and of a GPU, which is emulated: called in one way and held to one oracle.

A call runs among guard bytes and on garbage in its scratch. Its results are compared with those of
a formula in float64, and then bit by bit with what the same kernel makes in another order (of
threads in C, of threads and blocks on a GPU) and over each input that it offers to lie over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from emulated_run import emulated_run, loaded, stored
from kernel_calls import Declined, guarded, operand, run_typed, spoiled, strided

from actors.kernels.cuda import catalogue as cuda
from actors.kernels.host import catalogue as host
from actors.kernels.library import runtime
from compiler.contract.attrs import Attrs
from compiler.contract.types import DType, TensorType, numpy_dtype
from compiler.graph.registry import find_op, infer_type

TARGETS = ("numpy", "c", "cuda")
GPU = "h200"
MANY = 10_000
"""Elements from which on a kernel is not tried over its inputs."""

NO_NUMBER = -1e30
"""What stands for the logarithm of no weight at all lies below."""


class Target:
    """The kernels of one target."""

    def __init__(self, name: str, toolchain: Any = None) -> None:
        self.name, self.toolchain = name, toolchain
        kernels = cuda.kernels_by_name(GPU).values() if name == "cuda" else host.HOST_KERNELS
        self.all = {k.name: k for k in kernels if k.name.startswith("numpy.") == (name == "numpy")}

    def kernels(self, op: str) -> list:
        """Return the kernels of an op, in the order of the catalogue."""
        return [kernel for kernel in self.all.values() if kernel.op == op]

    def run(
        self,
        kernel,
        attrs,
        dtypes,
        arrays,
        results,
        *,
        lie="dense",
        in_place=(),
        other=False,
        way=0,
    ):
        """Run a kernel; return (outputs, needs).

        `lie` is the layout of the outputs, `other` the order. Raises Declined, and the error of the
        launch, whose outputs are then in `left`.
        """
        most = max([len(t.shape) for t in results])  # statistics of rows stay dense
        kinds = [lie if len(t.shape) == most else "dense" for t in results]
        empty = [
            strided(
                None, t.shape, numpy_dtype(t.dtype), kind, spoiled(t.shape, numpy_dtype(t.dtype))
            )
            for t, kind in zip(results, kinds, strict=True)
        ]
        if self.name != "cuda":
            guards = [guarded(x) for x in empty]
            with runtime.at_most_threads(1) if other else nullcontext():
                made = run_typed(
                    kernel, attrs, dtypes, arrays, results, in_place=in_place,
                    outputs=[x for x, _ in guards],
                )  # fmt: skip
            for _, check in guards:
                check()
            return made
        operands = [tuple(map(operand, xs, ts)) for xs, ts in (
            (arrays, dtypes), (empty, [t.dtype for t in results]))]  # fmt: skip
        if kernel.plan(attrs, *operands) is None:
            raise Declined(kernel.name)
        is_apart = other and not kernel.name.startswith(("cudnn.", "cuda.flash_"))
        found = emulated_run(
            self.toolchain, kernel, attrs, tuple(arrays), tuple(results), dtypes=dtypes,
            output_strides=[x.strides for x in empty], in_place=in_place, seeds=(int(other),),
            way=way, offset_bytes=max([d.itemsize for d in dtypes]) if is_apart else 0,
        )  # fmt: skip
        if found.error is not None:
            self.left = found.outputs
            raise found.error
        return list(found.outputs), found.needs


class Problem(NamedTuple):
    """A call of an op whose floats are float64 here, and become the type under test.

    `formula` takes the numbers that the inputs are then, and returns the outputs. `error` is what
    the results may differ by, relative to `size`: of what the formula says (`whole`: its largest
    number, at least 1; `each`: every number), or a function of the inputs.
    """

    op: str
    attrs: Mapping[str, Any]
    inputs: tuple[np.ndarray, ...]
    formula: Callable[..., Any]
    size: str | Callable[..., Any] = "whole"
    single: tuple[int, ...] = ()
    """Inputs that are float32 where the type under test is shorter."""
    writes: tuple[tuple[int, int], ...] = ()
    """Pairs of output and input that are one tensor, of which the kernel may leave parts alone."""
    launched: tuple[str, Mapping[str, Any]] | None = None
    """The op and attributes of the launch, where they are others."""

    def stored(self, dtype: str, kinds: Any) -> tuple[list[np.ndarray], list[DType]]:
        """Return the inputs and their types; a layout for all, or one for each."""
        kinds = [kinds] * len(self.inputs) if isinstance(kinds, str) else kinds
        arrays, dtypes = [], []
        for place, (x, kind) in enumerate(zip(self.inputs, kinds, strict=True)):
            own = dtype if x.dtype == np.float64 else str(x.dtype)
            if place in self.single and dtype in ("float16", "bfloat16"):
                own = "float32"
            values = stored(x, own) if x.dtype == np.float64 else x
            if kind == "own":
                arrays.append(lying_as(x, values))
            else:
                arrays.append(strided(None, x.shape, values.dtype, kind, values))
            dtypes.append(DType(own))
        return arrays, dtypes


def lying_as(like, values):
    """Return values in an array that lies as another does, whose elements are of other bytes."""
    steps = [s // like.itemsize * values.itemsize for s in like.strides]
    spans = [(n - 1) * s for n, s in zip(like.shape, steps, strict=True) if n]
    raw = np.zeros(sum(spans) + values.itemsize, np.uint8)
    array = np.ndarray(like.shape, values.dtype, raw, 0, steps)
    array[...] = values
    return array


def numbers(array, dtype):
    """Return what an array holds: floats as float64."""
    return loaded(array) if dtype.is_float else array


def compare(got, want, error, size, where):
    """Hold an output against what a formula says."""
    want = np.asarray(want)
    if got.dtype.kind != "f":
        np.testing.assert_array_equal(got, want, where)
        return
    hidden = want == -np.inf
    assert (got[hidden] < NO_NUMBER).all(), where
    got, want = np.where(hidden, 0, got), np.where(hidden, 0, want)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want), where)
    if isinstance(size, str) and size == "whole":
        size = max(1.0, float(np.abs(want[np.isfinite(want)]).max(initial=0)))
    elif isinstance(size, str):
        size = np.abs(want)
    same = (got == want) | np.isnan(want)
    off = np.abs(np.where(same, 0, got) - np.where(same, 0, want))
    share = off / np.maximum(np.where(same, 1, size), 1e-300)
    assert (share <= error).all(), f"{where}: off by {share.max()}, not {error}"


def results_of(problem, dtypes):
    """Return the types of the results, as the op infers them."""
    types = tuple([TensorType(d, x.shape) for d, x in zip(dtypes, problem.inputs, strict=True)])
    return infer_type.get(find_op(problem.op))(types, Attrs(problem.attrs))


def hold(target, kernel, problem, dtype, error, lie="dense", out="dense"):
    """Run a kernel on a problem and check all that the module promises; Declined is raised."""
    arrays, dtypes = problem.stored(dtype, lie)
    results, attrs = results_of(problem, dtypes), (problem.launched or (None, problem.attrs))[1]
    run = partial(target.run, kernel, attrs, dtypes, arrays, results, lie=out)
    outputs, needs = run(in_place=problem.writes)
    exact = [numbers(x, d) for x, d in zip(arrays, dtypes, strict=True)]
    with np.errstate(all="ignore"):
        wanted = problem.formula(*exact)
        size = problem.size(*exact) if callable(problem.size) else problem.size
    wanted = wanted if isinstance(wanted, tuple) else (wanted,)
    where = f"{kernel.name} {problem.attrs} {[x.shape for x in arrays]} {dtype} {lie} {out}"

    def check(outputs):
        for got, want, type_ in zip(outputs, wanted, results, strict=True):
            compare(numbers(got, type_.dtype), want, error, size, where)

    check(outputs)
    if kernel.name.startswith("cudnn."):
        check(run(way=-1)[0])
    if lie not in ("dense", "own") or out != "dense":
        return
    same_bits(run(in_place=problem.writes, other=True)[0], outputs, where)
    if sum([x.size for x in arrays]) < MANY:
        for pair in {*needs.in_place} - {*problem.writes}:
            same_bits(run(in_place=(pair,))[0], outputs, f"{where} over {pair}")


def same_bits(got, want, where=""):
    for a, b in zip(got, want, strict=True):
        assert a.tobytes() == b.tobytes(), where
