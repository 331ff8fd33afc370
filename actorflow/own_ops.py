"""Ops of one's own: `@af.op` for what a program can state, `@af.numpy_op` for all else.

    @af.op("x[*, D], gamma[D] -> y[*, D]")
    def rms_norm(x, gamma, *, eps: float = 1e-6):
        return x * ((x * x).mean() + eps).rsqrt() * gamma

    y = rms_norm(x, gamma, eps=1e-5)  # inside a job

The function becomes an op like those that are shipped: it is fused with its neighbours, has native
code and numpy's, a gradient, and is computed again where a budget asks for that. The function runs
while a job is traced and compiled, on expressions (`compiler.fusion.expressions`), never on arrays;
functions of `af` and other ops defined so may be called in it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from actorflow.tensor import Tensor, apply_many
from actorflow.trace.tracer import Trace, recording, source_of
from compiler.attrs import Attrs
from compiler.errors import CompileError
from compiler.fusion.define import attributes_of, fused_op, settings_of
from compiler.fusion.notation import read_signature
from compiler.graph import GraphBuilder, Node
from compiler.ops.signature import Types, expect_inputs
from compiler.registry import Op, OpTypeError, all_ops, define, infer_type, reference
from compiler.rules import gradient as gradients
from compiler.types import DType, TensorType, ValueId, numpy_dtype

Function = Callable[..., Any]

_MADE: dict[str, tuple[str, str, int]] = {}
"""Of each name given here the file and function that gave it first, and how often."""


def op(
    signature: str, *, gradient: Function | None = None, name: str | None = None
) -> Callable[[Function], Function]:
    """Make an op of a function over expressions.

    Args:
        signature: operands and outputs, see `compiler.fusion.notation`: "x, y -> z" where every
            element is computed alone, "x[*, D] -> y[*]" over rows `*` and columns `D`.
        gradient: a function over expressions in place of the derived gradient. It takes by name
            what it needs of operands, outputs and the outputs' gradients (`dy` for `y`), attributes
            after a `*`, and returns one expression per float operand.
        name: of the op in plans; by default the function's.

    Keyword-only arguments of the function are attributes: numbers, bools or texts, fixed in the
    plan. Returns a function of tensors. Raises CompileError, naming the function's line, for a
    signature or a function that make no op.
    """

    def decorate(function: Function) -> Function:
        called, where = _free_name(name, function), function.__code__.co_filename
        try:
            made = fused_op(
                called, signature, function, gradient=gradient, where=where, traces_at_once=True
            )
        except (ValueError, OpTypeError) as error:
            raise CompileError(f"{source_of(function)}: {called}: {error}") from None
        return _caller(made, function)

    return decorate


def numpy_op(
    types: str | Function, *, gradient: Function | None = None, name: str | None = None
) -> Callable[[Function], Function]:
    """Make an op of a function over numpy's arrays, for what no program can state.

    The function gets an array per operand, then one per output, which it fills, and the attributes
    by keyword; arrays lie in the plan's memory and must not be kept. It must depend on nothing else
    and give the same for the same operands: it may run again to save memory.

    Args:
        types: a signature as of `op`, or a function from the operands' `TensorType`s, and the
            attributes by keyword, to that of the output, or a tuple of them.
        gradient: a function over tensors that takes by name what it needs of the function's
            operands, outputs and the outputs' gradients (`dy` for `y`), and the attributes after a
            `*`; it returns a tensor, or None, per operand. Without one the op has no gradient.
        name: of the op in plans; by default the function's.

    Raises CompileError, naming the function's line, for a signature that is none.
    """

    def decorate(function: Function) -> Function:
        called, where = _free_name(name, function), function.__code__.co_filename
        try:
            infer = _types_of(types, function)
            made = define(called)
        except ValueError as error:
            raise CompileError(f"{source_of(function)}: {called}: {error}") from None
        infer_type.register(made, infer, where)
        reference.register(made, _reference(function, infer), where)
        # The kernels are a third of the time of `import actorflow`; only this kind of op has one.
        from actors.kernels import catalogue
        from actors.kernels.python_function import PythonKernel

        catalogue.register(PythonKernel(called, function), where)
        if gradient is not None:
            gradients.register(made, _gradient(function, gradient), where)
        return _caller(made, function)

    return decorate


def _caller(made: Op, function: Function) -> Function:
    """Return the function of tensors. The user's own is closed over, as a trace reads it there."""

    @functools.wraps(function)
    def call(*operands: Any, **attrs: Any) -> Any:
        plain = {k: v.item() if isinstance(v, np.generic) else v for k, v in attrs.items()}
        results = apply_many(made, *operands, **plain)
        return results if len(results) > 1 else results[0]

    call.__dict__["function"] = function
    return call


def _free_name(name: str | None, function: Function) -> str:
    """Return a name for an op: the one asked for, numbered where a function is defined again.

    As in a notebook, or where a module is loaded anew: jobs that were traced keep the old op.
    """
    wanted, own = name or function.__name__, (function.__code__.co_filename, function.__qualname__)
    taken = {op.name for op in all_ops()}
    if wanted in taken and _MADE.get(wanted, ("", "", 0))[:2] != own:
        raise CompileError(
            f"{source_of(function)}: there is an op {wanted!r} already; give yours another name,"
            " with name=..."
        )
    count = _MADE[wanted][2] + 1 if wanted in taken else 1
    _MADE[wanted] = (*own, count)
    return wanted if count == 1 else f"{wanted}#{count}"


def _types_of(types: str | Function, function: Function) -> Any:
    attributes = attributes_of(function)
    if isinstance(types, str):
        signature = read_signature(types)

        def by_signature(inputs: Types, attrs: Attrs) -> Types:
            expect_inputs(inputs, *[spec.name for spec in signature.inputs])
            settings_of(attributes, attrs)
            return signature.types_of(inputs)

        return by_signature

    def by_function(inputs: Types, attrs: Attrs) -> Types:
        made = types(*inputs, **settings_of(attributes, attrs))
        return (made,) if isinstance(made, TensorType) else tuple(made)

    return by_function


def _reference(function: Function, infer: Any) -> Any:
    def run(attrs: Attrs, *arrays: Any) -> tuple[Any, ...]:
        types = tuple([TensorType(DType(str(a.dtype)), a.shape) for a in map(np.asarray, arrays)])
        made = [np.empty(t.shape, numpy_dtype(t.dtype)) for t in infer(types, attrs)]
        function(*arrays, *made, **attrs)
        return tuple(made)

    return run


def _gradient(function: Function, rule: Function) -> Any:
    """Return the rule that runs a function over tensors in the graph that autodiff grows."""
    positional = [p for p in inspect.signature(function).parameters.values() if p.kind < 3]
    names = [p.name for p in positional if p.kind is not p.VAR_POSITIONAL]
    takes = inspect.signature(rule).parameters.values()

    def pull(
        b: GraphBuilder, node: Node, grads: tuple[ValueId | None, ...]
    ) -> tuple[ValueId | None, ...]:
        trace = _Beside(b)
        values = dict(zip(names, (*node.inputs, *node.outputs), strict=True))
        known: dict[str, Any] = {n: Tensor(trace, v) for n, v in values.items()}
        for output, value in zip(names[len(node.inputs) :], grads, strict=True):
            known[f"d{output}"] = None if value is None else Tensor(trace, value)
        settings = settings_of(attributes_of(function), node.attrs)
        own = {t.name: settings[t.name] for t in takes if t.kind is t.KEYWORD_ONLY}
        with recording(trace):
            made = rule(*[known[t.name] for t in takes if t.kind is not t.KEYWORD_ONLY], **own)
        results = made if isinstance(made, tuple) else (made,)
        return tuple([None if t is None else t._value_in(trace) for t in results])

    return pull


class _Beside(Trace):
    """Records into a builder that stands at some node already: its line and scope are kept."""

    def __init__(self, b: GraphBuilder) -> None:
        super().__init__({}, {}, {}, is_training=True)
        self.builder = b

    def emit(self, op: Op, inputs: list[ValueId], attrs: Attrs) -> tuple[ValueId, ...]:
        """Append a node where the builder stands."""
        return self.builder.emit(op, inputs, attrs)
