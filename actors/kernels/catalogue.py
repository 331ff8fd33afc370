"""All kernels of the host, by op and by name.

The order of `HOST_KERNELS` is the order of preference: the first kernel of an op that takes a
call is used. numpy's come last, for they take every call; a library's go before them. A kernel
from elsewhere is added with `register` and is preferred to ours.
"""

from __future__ import annotations

import math
import platform
import sys
from collections.abc import Mapping
from typing import Any, cast

import numpy as np

from actors.kernels.branch import BRANCH_KERNELS
from actors.kernels.interpret.along import ALONG_KERNELS
from actors.kernels.interpret.attention import ATTENTION_KERNELS
from actors.kernels.interpret.attention_grad import ATTENTION_GRAD_KERNELS
from actors.kernels.interpret.chunked import REGION_KERNELS
from actors.kernels.interpret.convolution import CONVOLUTION_KERNELS
from actors.kernels.interpret.embedding import EMBEDDING_KERNELS
from actors.kernels.interpret.embedding_update import EMBEDDING_UPDATE
from actors.kernels.interpret.fused import NUMPY_FUSED_KERNELS
from actors.kernels.interpret.matmul import MATMUL_KERNELS
from actors.kernels.interpret.pooling import POOLING_KERNELS
from actors.kernels.interpret.reduce import REDUCE_KERNELS
from actors.kernels.interpret.shape import SHAPE_KERNELS
from actors.kernels.interpret.upcast import upcast
from actors.kernels.kernel import Asked, Attrs, Kernel, KernelNeeds, OneOfSeveral, Operands
from actors.kernels.native import runtime
from actors.kernels.native.kernels import NATIVE_KERNELS, is_refused
from actors.kernels.scan import SCAN_KERNELS
from compiler.errors import CompileError

GENERATION = 9
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

HOST_KERNELS: tuple[Kernel, ...] = (
    *NATIVE_KERNELS,
    *NUMPY_KERNELS,
    *upcast(NUMPY_KERNELS),
    *SCAN_KERNELS,
    *BRANCH_KERNELS,
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
    holder = binders().get(kernel.name)
    if holder is not None:
        raise ValueError(
            f"a kernel called {kernel.name!r} exists already ({type(holder).__module__}."
            f"{type(holder).__qualname__}, for op {holder.op!r}); give {type(kernel).__qualname__}"
            " another name"
        )
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


def find(op: str) -> tuple[Kernel, ...]:
    """Return the kernels of an op in order of preference."""
    return tuple([kernel for kernel in (*_registered, *HOST_KERNELS) if kernel.op == op])


def choose(
    op: str, attrs: Attrs, inputs: Operands, outputs: Operands, runs_as: str = ""
) -> tuple[str, KernelNeeds]:
    """Return the name and needs of the first kernel that takes this call.

    Those of `runs_as` are asked after its own: what computes a program in the attributes.

    Raises LookupError, naming op, types and kernels asked, when none does.
    """
    asked = (*find(op), *find(runs_as))
    for kernel in asked:
        if kernel in _registered:
            needs = query_registered(kernel, attrs, inputs, outputs)
        else:
            needs = None if is_refused(kernel.name) else kernel.query(attrs, inputs, outputs)
        if needs is not None:
            return kernel.name, needs
    call = f"{op}({_types(inputs)}) -> ({_types(outputs)})"
    if not asked:
        raise LookupError(f"the host has no kernel for op {op!r}, called as {call}")
    names = ", ".join(kernel.name for kernel in asked)
    raise LookupError(f"no host kernel takes {call}; asked: {names}")


def query_registered(
    kernel: Kernel, attrs: Attrs, inputs: Operands, outputs: Operands
) -> KernelNeeds | None:
    """Ask a kernel from elsewhere. Raises CompileError where it fails or its needs are none."""
    who = f"kernel {kernel.name!r} ({_files[kernel.name][0]}), asked for {kernel.op}, "
    try:
        needs = kernel.query(attrs, inputs, outputs)
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
    known = [(output, i) for output in range(num_outputs) for i in range(num_inputs)]
    has_time = isinstance(needs.duration_ns, (int, float)) and 0 <= needs.duration_ns < math.inf
    return needs.workspace_bytes >= 0 and has_time and {*needs.in_place} <= {*known}


def needs_of(
    kernel: Asked, attrs: Attrs, inputs: Operands, outputs: Operands
) -> KernelNeeds | None:
    """Return the least that a kernel needs for a call of a plan; None where it cannot take it.

    The workspace is that of one thread: with more room, more threads take part.
    """
    ask = kernel.needs if isinstance(kernel, OneOfSeveral) else kernel.query
    with runtime.as_one_thread():
        return None if is_refused(kernel.name) else ask(attrs, inputs, outputs)


def _types(operands: Operands) -> str:
    return ", ".join(
        f"{operand.type}{'' if operand.is_dense else f' strides {operand.strides_bytes}'}"
        for operand in operands
    )


def binders() -> Mapping[str, Kernel]:
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
