"""The C of a plan, built before it is loaded: all generated functions in one start of the compiler.

Files of this folder are shared by all plans. What is missing is built side by side. Whoever loads a
plan first collects the functions that are made for a call, not written in a file, from its kernels.
A kernel binds as well without: its function is built then.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Protocol, runtime_checkable

from actors.kernels.kernel import Attrs, Operand, Operands
from actors.kernels.native import runtime
from actors.kernels.native.kernels import FILES
from actors.kernels.native.runtime import CFunction
from compiler.plan import Launch, Plan
from compiler.sub_plan import sub_plans


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
    launches = [launch for own in plans for actor in own.actors for launch in actor.launches]
    names = dict.fromkeys([launch.kernel for launch in launches])
    return tuple(dict.fromkeys([file for name in names for file in FILES.get(name, ())]))


def functions_of(plan: Plan, kernels: Mapping[str, object]) -> tuple[CFunction, ...]:
    """Return the generated functions of a plan, each once, in the order of first use."""
    found: dict[str, CFunction] = {}
    for own in (*[inner.plan for inner in sub_plans(plan)], plan):
        for actor in own.actors:
            for launch in actor.launches:
                for function in _functions(own, launch, kernels):
                    found.setdefault(function.name, function)
    return tuple(found.values())


def _functions(plan: Plan, launch: Launch, kernels: Mapping[str, object]) -> Iterator[CFunction]:
    kernel = kernels.get(launch.kernel)
    if isinstance(kernel, Generated):
        attrs = MappingProxyType(dict(launch.attrs))
        inputs, outputs = _operands(plan, launch.inputs), _operands(plan, launch.outputs)
        yield from kernel.functions(attrs, inputs, outputs)


def _operands(plan: Plan, views: tuple[int, ...]) -> Operands:
    seen = [plan.views[index] for index in views]
    return tuple([Operand(v.type, v.offset_bytes, v.strides_bytes) for v in seen])
