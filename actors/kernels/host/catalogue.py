"""All kernels of the host, by op and by name.

The order of `HOST_KERNELS` is the order of preference: the first kernel of an op that takes a
call is used. numpy's come last, for they take every call; a library's go before them. A kernel
from elsewhere is added with `register` and is preferred to ours; `PythonKernel` makes one of a
Python function. `prepare_plan` builds all C that a plan needs before the plan is loaded.
"""

from __future__ import annotations

import math
import platform
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol, cast

import numpy as np

from actors.kernels.common.host_memory import SHAPE_KERNELS
from actors.kernels.common.kernel import (
    Attrs,
    HostKernel,
    HostPlan,
    Kernel,
    KernelNeeds,
    KernelPlan,
    Operands,
    Workspace,
)
from actors.kernels.host.control import control_kernels
from actors.kernels.library import runtime
from actors.kernels.library.runtime import CFunction
from actors.kernels.native.attention import NATIVE_ATTENTION_KERNELS
from actors.kernels.native.convolution import NATIVE_CONVOLUTION_KERNELS, NATIVE_POOLING_KERNELS
from actors.kernels.native.embedding import EMBEDDING_UPDATE_KERNELS, NATIVE_EMBEDDING_KERNELS
from actors.kernels.native.fused import (
    FUSED_KERNELS,
    FUSED_PRODUCT_KERNELS,
    functions_of_product,
    functions_of_program,
)
from actors.kernels.native.matmul import NATIVE_MATMUL_KERNELS
from actors.kernels.native.movement import MOVEMENT_KERNELS
from actors.kernels.native.reduce import NATIVE_ALONG_KERNELS, NATIVE_REDUCE_KERNELS
from actors.kernels.native.region import CHUNKED_KERNELS, functions_of_region
from actors.kernels.reference.attention import ATTENTION_KERNELS
from actors.kernels.reference.attention_grad import ATTENTION_GRAD_KERNELS
from actors.kernels.reference.bfloat16 import upcast
from actors.kernels.reference.convolution import CONVOLUTION_KERNELS, POOLING_KERNELS
from actors.kernels.reference.embedding import EMBEDDING_KERNELS, EMBEDDING_UPDATE
from actors.kernels.reference.fused import NUMPY_FUSED_KERNELS
from actors.kernels.reference.linear_algebra import LINEAR_ALGEBRA_KERNELS
from actors.kernels.reference.matmul import MATMUL_KERNELS
from actors.kernels.reference.reduce import ALONG_KERNELS, REDUCE_KERNELS
from actors.kernels.reference.region import REGION_KERNELS
from actors.machine.protocol import Array, Arrays, Launch
from compiler.contract.errors import CompileError
from compiler.contract.plan import Plan, sub_plans
from compiler.contract.types import DType

_BY_FILES: tuple[tuple[tuple[str, ...], tuple[HostKernel, ...]], ...] = (
    (("gemm.c",), NATIVE_MATMUL_KERNELS),
    (("gemm.c",), NATIVE_CONVOLUTION_KERNELS),
    ((), FUSED_KERNELS),
    (("gemm.c", "fused_product.c"), FUSED_PRODUCT_KERNELS),
    (("gemm.c", "chunked.c"), CHUNKED_KERNELS),
    (("attention.c",), NATIVE_ATTENTION_KERNELS),
    (("embedding.c",), NATIVE_EMBEDDING_KERNELS),
    (("embedding.c",), EMBEDDING_UPDATE_KERNELS),
    (("along.c",), NATIVE_ALONG_KERNELS),
    (("copy.c",), MOVEMENT_KERNELS),
    (("reduce.c",), NATIVE_REDUCE_KERNELS),
    (("pooling.c",), NATIVE_POOLING_KERNELS),
)
"""Kernels, with the C files of `actors.kernels.native` that they call."""

NATIVE_KERNELS: tuple[HostKernel, ...] = tuple([k for _, kernels in _BY_FILES for k in kernels])

FILES = {kernel.name: files for files, kernels in _BY_FILES for kernel in kernels}
"""The C files of a kernel, by its name in the plan."""


def is_refused(kernel: str) -> bool:
    """Whether the compiler refused a file that a kernel calls: it takes no call any more."""
    return any([runtime.is_refused(file) for file in FILES.get(kernel, ())])


GENERATION = 11
"""Part of the fingerprint: raised when kernels change their results or their scratch."""

NUMPY_KERNELS: tuple[HostKernel, ...] = (
    *REDUCE_KERNELS,
    *SHAPE_KERNELS,
    *MATMUL_KERNELS,
    *CONVOLUTION_KERNELS,
    *POOLING_KERNELS,
    *ATTENTION_KERNELS,
    *ATTENTION_GRAD_KERNELS,
    *NUMPY_FUSED_KERNELS,
    *REGION_KERNELS,
    *EMBEDDING_KERNELS,
    EMBEDDING_UPDATE,
    *ALONG_KERNELS,
    *LINEAR_ALGEBRA_KERNELS,
)


def _all_binders() -> Mapping[str, HostKernel]:
    """Return what a body is bound with when it is bound: kernels are registered until then."""
    return kernels_by_name()


HOST_KERNELS: tuple[HostKernel, ...] = (
    *NATIVE_KERNELS,
    *NUMPY_KERNELS,
    *upcast(NUMPY_KERNELS),
    *control_kernels(_all_binders),
)

_registered: list[HostKernel] = []

_defined: dict[str, tuple[type, str]] = {}
"""Per registered name the class of the kernel, and the file that registered it."""

_times: dict[str, int] = {}
"""How often each name was registered in this process: the next kernel of a name is another one."""


def register(kernel: QueriedKernel, where: str | None = None) -> None:
    """Add a kernel, asked before ours, the latest first. Raises ValueError for a taken name.

    Ops with a program are fused, and meet no kernel of their own unless `af.kernel` adds it.

    `where` is the file that knows it, by default the caller's.
    """
    holder = kernels_by_name().get(kernel.name)
    if holder is not None:
        defined, _ = _defined.get(kernel.name, (None, ""))
        origin = f"{defined.__module__}.{defined.__qualname__}" if defined else "one of ours"
        raise ValueError(
            f"a kernel called {kernel.name!r} exists already ({origin}, for op {holder.op!r}); give"
            f" {type(kernel).__qualname__} another name"
        )
    file = where or sys._getframe(1).f_code.co_filename
    plan = partial(_plan_registered, kernel, file)
    # In front: the latest is asked first.
    _registered.insert(0, Kernel(kernel.name, kernel.op, plan))
    _defined[kernel.name] = type(kernel), file
    _times[kernel.name] = _times.get(kernel.name, 0) + 1


def unregister(name: str) -> None:
    """Take back a registered kernel. Raises LookupError when there is none of that name."""
    for index, kernel in enumerate(_registered):
        if kernel.name == name:
            del _registered[index], _defined[name]
            return
    raise LookupError(f"no kernel called {name!r} was registered")


def registered_files() -> tuple[str, ...]:
    """Return the files that decide what registered kernels do, sorted; `<...>` has no file."""
    modules = [defined.__module__ for defined, _ in _defined.values()]
    files = [getattr(sys.modules.get(m), "__file__", None) or f"<{m}>" for m in modules]
    return tuple(sorted({*files, *[file for _, file in _defined.values()]}))


def identity() -> str:
    """Return what a plan depends on besides those files: which kernels of a name are registered."""
    return " ".join([f"{kernel.name}#{_times[kernel.name]}" for kernel in _registered])


def registered(op: str) -> tuple[HostKernel, ...]:
    """Return the kernels of an op that were registered, the latest first."""
    return tuple([kernel for kernel in _registered if kernel.op == op])


def kernels_for(op: str) -> tuple[HostKernel, ...]:
    """Return the kernels of an op in order of preference."""
    return tuple([kernel for kernel in (*_registered, *HOST_KERNELS) if kernel.op == op])


def select_kernel(
    op: str, attrs: Attrs, inputs: Operands, outputs: Operands, kernel_op: str = ""
) -> tuple[str, KernelNeeds]:
    """Return the name and needs of the first kernel that takes this call.

    Those of `kernel_op` are asked after its own: what computes a program in the attributes.

    Raises LookupError, naming op, types and kernels asked, when none does.
    """
    candidates = (*kernels_for(op), *kernels_for(kernel_op))
    for kernel in candidates:
        if is_refused(kernel.name) or not kernel.is_chosen(attrs, inputs, outputs):
            continue
        plan = kernel.plan(attrs, inputs, outputs)
        if plan is not None:
            return kernel.name, plan.needs
    call = f"{op}({_types(inputs)}) -> ({_types(outputs)})"
    if not candidates:
        raise LookupError(f"the host has no kernel for op {op!r}, called as {call}")
    names = ", ".join(kernel.name for kernel in candidates)
    raise LookupError(f"no host kernel takes {call}; candidates: {names}")


class QueriedKernel(Protocol):
    """A kernel from elsewhere, with a method for each of its two lives.

    `query` is called when a program is compiled, and again when it is loaded, before `bind`.
    """

    @property
    def name(self) -> str:
        """Name in the plan, unique on the host."""
        ...

    @property
    def op(self) -> str:
        """Name of the op computed."""
        ...

    def query(self, attrs: Attrs, inputs: Operands, outputs: Operands) -> KernelNeeds | None:
        """Return what this call needs, or None when this kernel does not take it."""
        ...

    def bind(self, attrs: Attrs, inputs: Arrays, outputs: Arrays, workspace: Workspace) -> Launch:
        """Return the launch on these arrays.

        `workspace` is a dense vector of uint8, aligned to 64 bytes, of at least the bytes that
        `query` named for the same types and layouts (None when it named 0).
        """
        ...


def _plan_registered(
    kernel: QueriedKernel, file: str, attrs: Attrs, inputs: Operands, outputs: Operands
) -> HostPlan | None:
    """Ask a kernel from elsewhere. Raises CompileError where it fails or its needs are none."""
    who = f"kernel {kernel.name!r} ({file}), asked for {kernel.op}, "
    try:
        needs = kernel.query(attrs, inputs, outputs)
    # The user's code: whatever it raises is told with the kernel's name and file.
    except Exception as error:
        raise CompileError(f"{who}failed: {type(error).__name__}: {error}") from error
    if needs is None:
        return None
    if not _is_right(needs, len(inputs), len(outputs)):
        raise CompileError(
            f"{who}answered {needs!r:.160}, expected None or KernelNeeds with bytes of 0 or more,"
            " pairs (output, input) of the call, and a finite time"
        )
    return KernelPlan(needs, partial(kernel.bind, attrs))


def _is_right(needs: object, num_inputs: int, num_outputs: int) -> bool:
    if not isinstance(needs, KernelNeeds) or type(needs.workspace_bytes) is not int:
        return False
    pairs = [(output, i) for output in range(num_outputs) for i in range(num_inputs)]
    has_time = isinstance(needs.duration_ns, (int, float)) and 0 <= needs.duration_ns < math.inf
    return needs.workspace_bytes >= 0 and has_time and {*needs.in_place} <= {*pairs}


def needs_of(
    kernel: Kernel[object], attrs: Attrs, inputs: Operands, outputs: Operands
) -> KernelNeeds | None:
    """Return the least that a kernel needs for a call of a plan; None where it cannot take it.

    The workspace is that of one thread: with more room, more threads take part.
    """
    # The plan may come from a machine with fewer threads and have no more room.
    with runtime.at_most_threads(1):
        plan = None if is_refused(kernel.name) else kernel.plan(attrs, inputs, outputs)
    return None if plan is None else plan.needs


def _types(operands: Operands) -> str:
    return ", ".join(
        f"{operand.type}{'' if operand.is_dense else f' strides {operand.strides_bytes}'}"
        for operand in operands
    )


def kernels_by_name() -> Mapping[str, HostKernel]:
    """Return every kernel by its name in the plan."""
    return {kernel.name: kernel for kernel in (*_registered, *HOST_KERNELS)}


def fingerprint() -> str:
    """Return what needs and results depend on: our generation, numpy, its BLAS, the machine."""
    config = cast("dict[str, Any]", np.show_config(mode="dicts"))
    blas = config.get("Build Dependencies", {}).get("blas", {})
    parts = [
        f"host-{GENERATION}",
        f"numpy-{np.__version__}",
        f"{blas.get('name', 'blas')}-{blas.get('version', 'unknown')}",
        platform.machine(),
        *[text for text in (runtime.fingerprint(),) if text],
        *sorted(f"{kernel.op}:{kernel.name}" for kernel in _registered),
    ]
    return " ".join(parts)


# The C of a plan: its files, which all plans share, and the functions that its kernels generate, in
# one start of the compiler. What is missing is built side by side. A kernel also binds without
# this: its function is built then.


_FUNCTIONS: Mapping[str, Callable[[Attrs], tuple[CFunction, ...]]] = {
    **{kernel.name: functions_of_program for kernel in (*FUSED_KERNELS, *EMBEDDING_UPDATE_KERNELS)},
    **{kernel.name: functions_of_product for kernel in FUSED_PRODUCT_KERNELS},
    **{kernel.name: functions_of_region for kernel in CHUNKED_KERNELS},
}
"""What kernels generate for the attributes of a call, by their names in the plan."""


def prepare_plan(plan: Plan) -> None:
    """Build what the launches of a plan need. Raises CompilerError; see `runtime.prepare`."""
    files, functions = files_of(plan), functions_of(plan, kernels_by_name())
    runtime.build_ahead(files, functions)
    for file in files:
        runtime.load_file(file)
    runtime.prepare(functions)


def files_of(plan: Plan) -> tuple[str, ...]:
    """Return the C files that the kernels of a plan call, each once, in the order of first use."""
    plans = [*[inner.plan for inner in sub_plans(plan)], plan]
    launches = [launch for part in plans for actor in part.actors for launch in actor.launches]
    names = dict.fromkeys([launch.kernel for launch in launches])
    return tuple(dict.fromkeys([file for name in names for file in FILES.get(name, ())]))


def functions_of(plan: Plan, kernels: Mapping[str, object]) -> tuple[CFunction, ...]:
    """Return what these kernels generate for a plan, each once, in the order of first use."""
    functions: dict[str, CFunction] = {}
    for part in (*[inner.plan for inner in sub_plans(plan)], plan):
        for launch in [launch for actor in part.actors for launch in actor.launches]:
            if launch.kernel in _FUNCTIONS and launch.kernel in kernels:
                for function in _FUNCTIONS[launch.kernel](MappingProxyType(dict(launch.attrs))):
                    functions.setdefault(function.name, function)
    return tuple(functions.values())


@dataclass(frozen=True, slots=True)
class PythonKernel:
    """Computes `op` by a function. It takes every call but those of bfloat16, which numpy lacks.

    The function gets inputs and outputs as they lie in the plan's memory, outputs last, and the
    op's attributes by keyword. It reads the inputs, which are read-only, and fills the outputs.
    """

    op: str
    function: Callable[..., object]

    @property
    def name(self) -> str:
        """Name in the plan."""
        return f"python.{self.op}"

    def query(self, attrs: Attrs, inputs: Operands, outputs: Operands) -> KernelNeeds | None:
        """Estimate a nanosecond per byte: no one knows what the function does."""
        operands = (*inputs, *outputs)
        if DType.BFLOAT16 in [operand.type.dtype for operand in operands]:
            return None
        return KernelNeeds(duration_ns=float(sum([o.type.size_bytes for o in operands])))

    def bind(self, attrs: Attrs, inputs: Arrays, outputs: Arrays, workspace: Workspace) -> Launch:
        """Return the call of the function.

        It raises TypeError where the function returns an array that is no part of an output, and
        where it leaves an output as it was: what nobody fills holds what lay there before.
        """
        call = partial(self.function, *[_read_only(x) for x in inputs], *outputs, **attrs)
        is_known = False

        def launch() -> None:
            nonlocal is_known
            if not is_known:
                self._expect_filled(call, outputs)
                is_known = True
                return
            return_value = call()
            if return_value is not None:
                self._expect_outputs(return_value, outputs)

        return launch

    def _expect_outputs(self, made: object, outputs: Arrays) -> None:
        for item in made if isinstance(made, (tuple, list)) else (made,):
            is_data = isinstance(item, (np.ndarray, np.generic))
            if is_data and not any([np.may_share_memory(item, out) for out in outputs]):
                raise self._unfilled(f"returned an array of {item.dtype}{list(item.shape)}")

    def _expect_filled(self, call: Launch, outputs: Arrays) -> None:
        """Call, once more with another pattern where an output is what it was filled with."""
        suspects = list(range(len(outputs)))
        # Two patterns that differ in every bit: a function may well write one of them, but not
        # both.
        for pattern in (0xABABABABABABABAB, 0x5454545454545454):
            words = [outputs[i].view(f"u{outputs[i].itemsize}") for i in suspects]
            marks = [w.dtype.type(pattern & (1 << 8 * w.itemsize) - 1) for w in words]
            for word, mark in zip(words, marks, strict=True):
                word[...] = mark
            self._expect_outputs(call(), outputs)
            checks = zip(suspects, words, marks, strict=True)
            suspects = [i for i, word, mark in checks if word.size and (word == mark).all()]
            if not suspects:
                return
        raise self._unfilled(f"did not write its output {suspects[0] + 1}")

    def _unfilled(self, what: str) -> TypeError:
        code = self.function.__code__
        return TypeError(
            f"{self.op} ({code.co_filename}:{code.co_firstlineno}) {what}: a function of"
            " af.numpy_op fills the arrays that it gets for its outputs, as in y[...] = x + 1"
        )


def _read_only(array: Array) -> Array:
    """Return a view that refuses to be written: others read the same bytes."""
    view = array.view()
    view.flags.writeable = False
    return view
