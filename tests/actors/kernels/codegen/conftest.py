"""Groups for tests: how a launch is run as in a plan, and compared with the interpreter."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from fused_programs import Builder, compare, interpret, operands, results_of
from kernel_calls import run_typed

from actors.kernels.codegen.emit import emit
from actors.kernels.codegen.fused_kernel import FusedKernel
from actors.kernels.interpret.fused import NumpyFusedKernel
from actors.kernels.native import runtime


def run(kernel, program, rows, columns, arrays, **options):
    """Run a kernel of a program, see `run_typed`; returns (outputs, needs)."""
    attrs = {"program": program, "rows": rows, "columns": columns}
    dtypes = [entry.dtype for entry in program.inputs]
    return run_typed(kernel, attrs, dtypes, arrays, results_of(program, rows, columns), **options)


def check(kernel, program, rows, columns, tolerance=3e-5, **options):
    arrays = operands(program, rows, columns)
    got, needs = run(kernel, program, rows, columns, arrays, **options)
    compare(program, got, interpret(program, rows, columns, arrays), tolerance)
    return got, needs


def prepare(kernel, programs):
    """Build all in one start of the compiler."""
    if isinstance(kernel, FusedKernel):
        runtime.prepare([emit(program) for program in programs])


@pytest.fixture(params=["c.fused", "numpy.fused"])
def kernel(request):
    """Both kernels of groups; numpy's needs no compiler."""
    if request.param == "numpy.fused":
        return NumpyFusedKernel()
    request.getfixturevalue("native")
    return FusedKernel()


@pytest.fixture(scope="session")
def groups():
    """The functions above, for tests (importlib mode has no sibling imports)."""
    return SimpleNamespace(
        Builder=Builder, interpret=interpret, run=run, compare=compare, results_of=results_of,
        operands=operands, check=check, prepare=prepare,
    )  # fmt: skip
