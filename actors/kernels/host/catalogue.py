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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np

from actors.kernels.common.host_memory import SHAPE_KERNELS
from actors.kernels.common.kernel import (
    Attrs,
    Kernel,
    KernelNeeds,
    KernelSpec,
    Operand,
    Operands,
    SelectableKernel,
    Workspace,
)
from actors.kernels.host.control import CondKernel, ScanKernel, WhileKernel
from actors.kernels.library import runtime
from actors.kernels.library.runtime import CFunction
from actors.kernels.native.attention import NATIVE_ATTENTION_KERNELS
from actors.kernels.native.convolution import NATIVE_CONVOLUTION_KERNELS, NATIVE_POOLING_KERNELS
from actors.kernels.native.embedding import EMBEDDING_UPDATE_KERNELS, NATIVE_EMBEDDING_KERNELS
from actors.kernels.native.fused import FUSED_KERNELS, FUSED_PRODUCT_KERNELS
from actors.kernels.native.matmul import NATIVE_MATMUL_KERNELS
from actors.kernels.native.movement import MOVEMENT_KERNELS
from actors.kernels.native.reduce import NATIVE_ALONG_KERNELS, NATIVE_REDUCE_KERNELS
from actors.kernels.native.region import CHUNKED_KERNELS
from actors.kernels.reference.attention import ATTENTION_KERNELS
from actors.kernels.reference.attention_grad import ATTENTION_GRAD_KERNELS
from actors.kernels.reference.bfloat16 import upcast
from actors.kernels.reference.convolution import CONVOLUTION_KERNELS, POOLING_KERNELS
from actors.kernels.reference.embedding import EMBEDDING_KERNELS, EMBEDDING_UPDATE
from actors.kernels.reference.fused import NUMPY_FUSED_KERNELS
from actors.kernels.reference.matmul import MATMUL_KERNELS
from actors.kernels.reference.reduce import ALONG_KERNELS, REDUCE_KERNELS
from actors.kernels.reference.region import REGION_KERNELS
from actors.machine.protocol import Array, Arrays, Launch
from compiler.contract.errors import CompileError
from compiler.contract.plan import Plan, sub_plans
from compiler.contract.plan_tables import Launch as PlanLaunch
from compiler.contract.types import DType

_BY_FILES: tuple[tuple[tuple[str, ...], tuple[Kernel, ...]], ...] = (
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

NATIVE_KERNELS: tuple[Kernel, ...] = tuple([k for _, kernels in _BY_FILES for k in kernels])

FILES = {kernel.name: files for files, kernels in _BY_FILES for kernel in kernels}
"""The C files of a kernel, by its name in the plan."""


def is_refused(kernel: str) -> bool:
    """Whether the compiler refused a file that a kernel calls: it takes no call any more."""
    return any([runtime.is_refused(file) for file in FILES.get(kernel, ())])


GENERATION = 10
"""Part of the fingerprint: raised when kernels change their results or their scratch."""

NUMPY_KERNELS: tuple[Kernel, ...] = (
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
)


def _all_binders() -> Mapping[str, Kernel]:
    """Return what a body is bound with when it is bound: kernels are registered until then."""
    return kernels_by_name()


HOST_KERNELS: tuple[Kernel, ...] = (
    *NATIVE_KERNELS,
    *NUMPY_KERNELS,
    *upcast(NUMPY_KERNELS),
    ScanKernel(_all_binders),
    CondKernel(_all_binders),
    WhileKernel(_all_binders),
)

_registered: list[Kernel] = []

_times: dict[str, int] = {}
"""How often each name was registered in this process: the next kernel of a name is another one."""

_files: dict[str, tuple[str, ...]] = {}
"""Per registered name the file that registered the kernel, and the one that defines its class."""


def register(kernel: Kernel, where: str | None = None) -> None:
    """Add a kernel, asked before ours, the latest first. Raises ValueError for a taken name.

    Ops with a program are fused, and meet no kernel of their own unless `af.kernel` adds it.

    `where` is the file that knows it, by default the caller's.
    """
    holder = kernels_by_name().get(kernel.name)
    if holder is not None:
        raise ValueError(
            f"a kernel called {kernel.name!r} exists already ({type(holder).__module__}."
            f"{type(holder).__qualname__}, for op {holder.op!r}); give {type(kernel).__qualname__}"
            " another name"
        )
    # In front: the latest is asked first.
    _registered.insert(0, kernel)
    _times[kernel.name] = _times.get(kernel.name, 0) + 1
    module = sys.modules.get(type(kernel).__module__)
    defined = getattr(module, "__file__", None) or f"<{type(kernel).__module__}>"
    _files[kernel.name] = (where or sys._getframe(1).f_code.co_filename, defined)


def unregister(name: str) -> None:
    """Take back a registered kernel. Raises LookupError when there is none of that name."""
    for index, kernel in enumerate(_registered):
        if kernel.name == name:
            del _registered[index], _files[name]
            return
    raise LookupError(f"no kernel called {name!r} was registered")


def registered_files() -> tuple[str, ...]:
    """Return the files that decide what registered kernels do, sorted; `<...>` has no file."""
    return tuple(sorted({file for files in _files.values() for file in files}))


def identity() -> str:
    """Return what a plan depends on besides those files: which kernels of a name are registered."""
    return " ".join([f"{kernel.name}#{_times[kernel.name]}" for kernel in _registered])


def registered(op: str) -> tuple[Kernel, ...]:
    """Return the kernels of an op that were registered, the latest first."""
    return tuple([kernel for kernel in _registered if kernel.op == op])


def kernels_for(op: str) -> tuple[Kernel, ...]:
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
        if kernel in _registered:
            needs = query_registered(kernel, attrs, inputs, outputs)
        else:
            needs = None if is_refused(kernel.name) else kernel.query(attrs, inputs, outputs)
        if needs is not None:
            return kernel.name, needs
    call = f"{op}({_types(inputs)}) -> ({_types(outputs)})"
    if not candidates:
        raise LookupError(f"the host has no kernel for op {op!r}, called as {call}")
    names = ", ".join(kernel.name for kernel in candidates)
    raise LookupError(f"no host kernel takes {call}; asked: {names}")


def query_registered(
    kernel: Kernel, attrs: Attrs, inputs: Operands, outputs: Operands
) -> KernelNeeds | None:
    """Ask a kernel from elsewhere. Raises CompileError where it fails or its needs are none."""
    who = f"kernel {kernel.name!r} ({_files[kernel.name][0]}), asked for {kernel.op}, "
    try:
        needs = kernel.query(attrs, inputs, outputs)
    # The user's code: whatever it raises is told with the kernel's name and file.
    except Exception as error:
        raise CompileError(f"{who}failed: {type(error).__name__}: {error}") from error
    if needs is not None and not _is_right(needs, len(inputs), len(outputs)):
        raise CompileError(
            f"{who}answered {needs!r:.160}, expected None or KernelNeeds with bytes of 0 or more,"
            " pairs (output, input) of the call, and a finite time"
        )
    return needs


def _is_right(needs: object, num_inputs: int, num_outputs: int) -> bool:
    if not isinstance(needs, KernelNeeds) or type(needs.workspace_bytes) is not int:
        return False
    pairs = [(output, i) for output in range(num_outputs) for i in range(num_inputs)]
    has_time = isinstance(needs.duration_ns, (int, float)) and 0 <= needs.duration_ns < math.inf
    return needs.workspace_bytes >= 0 and has_time and {*needs.in_place} <= {*pairs}


def needs_of(
    kernel: KernelSpec, attrs: Attrs, inputs: Operands, outputs: Operands
) -> KernelNeeds | None:
    """Return the least that a kernel needs for a call of a plan; None where it cannot take it.

    The workspace is that of one thread: with more room, more threads take part.
    """
    ask = kernel.needs if isinstance(kernel, SelectableKernel) else kernel.query
    # The plan may come from a machine with fewer threads and have no more room.
    with runtime.as_one_thread():
        return None if is_refused(kernel.name) else ask(attrs, inputs, outputs)


def _types(operands: Operands) -> str:
    return ", ".join(
        f"{operand.type}{'' if operand.is_dense else f' strides {operand.strides_bytes}'}"
        for operand in operands
    )


def kernels_by_name() -> Mapping[str, Kernel]:
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


@runtime_checkable
class Generated(Protocol):
    """What a kernel has besides (see `kernel.Kernel`) when it generates functions."""

    def functions(self, attrs: Attrs, inputs: Operands, outputs: Operands) -> tuple[CFunction, ...]:
        """Return the functions that `bind` needs for a call which `query` takes."""


def prepare_plan(plan: Plan, kernels: Mapping[str, object]) -> None:
    """Build what the launches of a plan need. Raises CompilerError; see `runtime.prepare`."""
    files, functions = files_of(plan), functions_of(plan, kernels)
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
    """Return the generated functions of a plan, each once, in the order of first use."""
    functions: dict[str, CFunction] = {}
    for part in (*[inner.plan for inner in sub_plans(plan)], plan):
        for actor in part.actors:
            for launch in actor.launches:
                for function in _functions(part, launch, kernels):
                    functions.setdefault(function.name, function)
    return tuple(functions.values())


def _functions(
    plan: Plan, launch: PlanLaunch, kernels: Mapping[str, object]
) -> Iterator[CFunction]:
    kernel = kernels.get(launch.kernel)
    if isinstance(kernel, Generated):
        attrs = MappingProxyType(dict(launch.attrs))
        inputs, outputs = _operands(plan, launch.inputs), _operands(plan, launch.outputs)
        yield from kernel.functions(attrs, inputs, outputs)


def _operands(plan: Plan, views: tuple[int, ...]) -> Operands:
    plan_views = [plan.views[index] for index in views]
    return tuple([Operand(v.type, v.offset_bytes, v.strides_bytes) for v in plan_views])


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
        raise self._unfilled(f"left its output {suspects[0] + 1} as it was")

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
