"""Fused groups for tests: a launch is run as in a plan, and compared with the interpreter."""

from __future__ import annotations

from dataclasses import replace

from emulated_run import emulated_run
from fused_programs import Builder, compare, interpret, operands, results_of  # noqa: F401
from kernel_calls import run_typed

from actors.kernels.cuda.catalogue import kernels_by_name
from actors.kernels.library import runtime
from actors.kernels.native.emit import emit
from actors.kernels.native.fused import FUSED_KERNELS

CUDA = kernels_by_name("h200")["cuda.fused"]


class OnHost:
    """The kernel of a GPU, run on the host."""

    def __init__(self, toolchain):
        self.toolchain = toolchain
        self.plan = CUDA.plan

    def run(self, attrs, dtypes, arrays, results, *, outputs=None, in_place=(), launches=None):
        strides = None if outputs is None else [out.strides for out in outputs]
        if outputs is not None:
            results = [replace(r, shape=out.shape) for r, out in zip(results, outputs, strict=True)]
        options = {"dtypes": dtypes, "output_strides": strides, "in_place": in_place}
        trial = emulated_run(self.toolchain, CUDA, attrs, tuple(arrays), tuple(results), **options)
        if trial.error is not None:
            raise trial.error
        for out, array in zip(outputs or (), trial.outputs, strict=outputs is not None):
            out[...] = array
        return trial.outputs, trial.needs


def run(kernel, program, rows, columns, arrays, **options):
    """Run a kernel of a program, see `run_typed`; returns (outputs, needs)."""
    attrs = {"program": program, "rows": rows, "columns": columns}
    dtypes = [entry.dtype for entry in program.inputs]
    if isinstance(kernel, OnHost):
        return kernel.run(attrs, dtypes, arrays, results_of(program, rows, columns), **options)
    return run_typed(kernel, attrs, dtypes, arrays, results_of(program, rows, columns), **options)


def check(kernel, program, rows, columns, tolerance=3e-5, **options):
    arrays = operands(program, rows, columns)
    got, needs = run(kernel, program, rows, columns, arrays, **options)
    compare(program, got, interpret(program, rows, columns, arrays), tolerance)
    return got, needs


def prepare(kernel, programs):
    """Build all in one start of the compiler."""
    if kernel in FUSED_KERNELS:
        runtime.prepare([emit(program) for program in programs])


def fitting(kernel, shape):
    """Return fewer rows where threads are emulated, which takes a microsecond an element."""
    return (min(shape[0], 70), min(shape[1], 17_000)) if isinstance(kernel, OnHost) else shape
