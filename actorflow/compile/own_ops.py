"""Ops of one's own: `@af.op` for what a program can state, `@af.numpy_op` for all else.

    @af.op("x[*, D], gamma[D] -> y[*, D]")
    def rms_norm(x, gamma, *, eps: float = 1e-6):
        return x * ((x * x).mean() + eps).rsqrt() * gamma

    y = rms_norm(x, gamma, eps=1e-5)  # inside a job

The function becomes an op like those that are shipped: it is fused with its neighbours, has native
code and numpy's, a gradient, and is computed again where a budget asks for that. The function runs
while a job is traced and compiled, on expressions (`compiler.ops.language.expressions`), never on
arrays; functions of `af` and other ops defined so may be called in it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any

import numpy as np

from actorflow.tensor.gradient_rules import Grads, Tensors, rule_over_tensors
from actorflow.tensor.tensor import Tensor, apply_many, as_tensor
from actorflow.tensor.tracer import Trace, current_trace, find_source, source_of
from compiler.contract.attrs import Attrs
from compiler.contract.errors import CompileError
from compiler.contract.types import DType, TensorType, ValueId
from compiler.graph.graph import Gradient, Graph, GraphBuilder, Maybe, Node
from compiler.graph.graph import gradient as gradients
from compiler.graph.registry import (
    InferType,
    Op,
    OpTypeError,
    Types,
    define,
    expect_inputs,
    find_op,
    free_name,
    infer_type,
)
from compiler.ops.language.define import fused_op
from compiler.ops.language.definition import (
    Attribute,
    Function,
    attributes_of,
    expect_takes,
    parameters_of,
    read_gradient,
    results_of,
    settings_of,
)
from compiler.ops.language.expressions import read_signature
from compiler.ops.primitives.sources import INPUT

_MODULES: dict[str, str] = {}
"""Op name -> the module that defined it last."""


def op(
    signature: str, *, gradient: Function | None = None, name: str | None = None
) -> Callable[[Function], Function]:
    """Make an op of a function over expressions.

    Args:
        signature: operands and outputs, see `compiler.ops.language.expressions`: "x, y -> z" where
            every element is computed alone, "x[*, D] -> y[*]" over rows `*` and columns `D`.
        gradient: a function over expressions in place of the derived gradient. It takes by name
            what it needs of operands, outputs and the outputs' gradients (`dy` for `y`), attributes
            after a `*`, and returns one expression per float operand.
        name: of the op in plans; by default the function's.

    Keyword-only arguments of the function are attributes: numbers, bools or texts, fixed in the
    plan. Returns a function of tensors. Raises CompileError, naming the function's line, for a
    signature or a function that make no op.
    """
    if not isinstance(signature, str):
        raise CompileError(
            f"{source_of(signature)}: af.op needs a signature first, as in @af.op('x, y -> z'),"
            f" got {signature!r:.60}"
        )

    def define_it(function: Function, called: str, where: str) -> Op:
        return fused_op(
            called, signature, function, gradient=gradient, where=where, traces_at_once=True
        )

    return _decorator("af.op('x, y -> z')", name, define_it, gradient)


def numpy_op(
    types: str | Function, *, gradient: Function | None = None, name: str | None = None
) -> Callable[[Function], Function]:
    """Make an op of a function over numpy's arrays, for what no program can state.

    The function gets an array per operand, which it only reads, then one per output, which it
    fills, and the attributes by keyword; arrays lie in the plan's memory and must not be kept. It
    must depend on nothing else and give the same for the same operands: it may run again to save
    memory. What it returns is nothing, or the outputs.

    Args:
        types: a signature as of `op`, or a function from the operands' `TensorType`s, and such
            attributes as it names, to that of the output, or a tuple of them.
        gradient: a function over tensors that takes by name what it needs of the function's
            operands, outputs and the outputs' gradients (`dy` for `y`), and the attributes after a
            `*`; it returns a tensor, or None, per operand. Without one the op has no gradient.
        name: of the op in plans; by default the function's.

    Raises CompileError, naming the function's line, for a signature that is none, and for a
    gradient that takes what it may not.
    """

    def define_it(function: Function, called: str, where: str) -> Op:
        attributes = attributes_of(function)
        infer, names = _types_of(types, function, attributes)
        pull = None if gradient is None else _gradient(gradient, *names, attributes)
        op = define(called)
        infer_type.register(op, infer, where)
        # The kernels are a third of the time of `import actorflow`; only this kind of op has one.
        from actors.kernels.host import catalogue
        from actors.kernels.host.catalogue import PythonKernel

        catalogue.register(PythonKernel(called, function), where)
        if pull is not None:
            gradients.register(op, pull, where)
        return op

    return _decorator("af.numpy_op('x, y -> z')", name, define_it, types, gradient)


def _decorator(
    usage: str,
    name: str | None,
    define_it: Callable[[Function, str, str], Op],
    *stated: object,
) -> Callable[[Function], Function]:
    """Return what makes a function of tensors of a function, by defining an op."""

    def decorate(*given: Any, **named: Any) -> Function:
        function: Any = given[0] if len(given) == 1 and not named else None
        code = getattr(function, "__code__", None)
        if not isinstance(code, CodeType):  # also where the decorator stands without its brackets
            raise CompileError(
                f"{find_source()}: @{usage} decorates one function written in Python; got"
                f" {', '.join([f'{g!r:.60}' for g in given]) or 'nothing'}"
            )
        called = _free_name(name, function)
        try:
            op = define_it(function, called, code.co_filename)
            attributes = attributes_of(function)
        except (ValueError, OpTypeError) as error:
            raise CompileError(f"{source_of(function)}: {called}: {error}") from error.__cause__

        @functools.wraps(function)
        def call(*operands: Any, **attrs: Any) -> Any:
            settings = {k: v.item() if isinstance(v, np.generic) else v for k, v in attrs.items()}
            try:
                settings_of(attributes, settings)  # before a plan has to hold them
            except OpTypeError as error:
                raise CompileError(f"{find_source()}: {called} {error}") from None
            results = apply_many(op, *operands, **settings)
            trace = current_trace()
            if type(trace) is Trace and trace.is_training and gradients.has(op):
                # Run here, what the gradient reads is seen: a change of that is one of the job.
                # The call above has just emitted it; the exact type leaves out the traces of
                # gradients themselves.
                node = trace.builder.nodes[-1]
                gradient_alone(node, [trace.builder.type_of(v) for v in node.inputs])
            return results if len(results) > 1 else results[0]

        call.__dict__["stated"] = (function, *stated)  # a trace reads the user's own there
        return call

    return decorate


def _free_name(name: str | None, function: Function) -> str:
    """Return a name for an op: the one asked for, numbered where a function is defined again.

    As in a notebook, where each cell is a file, or where a module is loaded anew: jobs that were
    traced keep the old op.
    """
    stem = name or function.__name__
    if not isinstance(stem, str) or not stem.isprintable():
        raise CompileError(
            f"{source_of(function)}: the name of an op is a line of text, got {stem!r:.60}"
        )
    called, module = free_name(stem), function.__module__
    if called != stem and _MODULES.get(stem) != module:
        file = infer_type.where(find_op(stem))  # of a gradient that was derived, too
        if file != function.__code__.co_filename:
            raise CompileError(
                f"{source_of(function)}: there is an op {stem!r} already, of {file}; give yours"
                " another name, with name=..."
            )
    # The same module may define a name anew (a notebook's cell, a reload); another one may not.
    _MODULES[stem] = module
    return called


def _types_of(
    types: str | Function, function: Function, attributes: tuple[Attribute, ...]
) -> tuple[InferType, tuple[list[str], list[str]]]:
    """Return what infers the types, and the names of all operands and of (what may be) outputs."""
    names = [p.name for p in parameters_of(function) if p.kind is p.POSITIONAL_OR_KEYWORD]
    if isinstance(types, str):
        signature = read_signature(types)
        stated = [spec.name for spec in (*signature.inputs, *signature.outputs)]
        num_inputs = len(signature.inputs)
        expect_takes(function, stated, "function")

        def by_signature(inputs: Types, attrs: Attrs) -> Types:
            expect_inputs(inputs, *stated[:num_inputs])
            settings_of(attributes, attrs)
            return signature.types_of(inputs)

        names += stated[len(names) :]  # of a function of any number of arrays
        return by_signature, (names, names[num_inputs:])
    takes = parameters_of(types)
    takes_all = takes and takes[-1].kind is inspect.Parameter.VAR_KEYWORD

    def by_function(inputs: Types, attrs: Attrs) -> Types:
        says = "has a types function that "
        settings = settings_of(attributes, attrs).items()
        options = {k: v for k, v in settings if takes_all or k in [p.name for p in takes]}
        outputs = results_of(says, types, *inputs, **options)
        for type_ in outputs or (None,):
            if not _is_type(type_):
                raise OpTypeError(
                    f"{says}returns {type_!r:.80}, expected a TensorType(DType, tuple of extents)"
                    " for each output"
                )
        expect_takes(function, [str(type_) for type_ in (*inputs, *outputs)], "function")
        return outputs

    return by_function, (names, names)


def _is_type(made: object) -> bool:
    """Whether somebody's result is a type that a plan can hold."""
    if not isinstance(made, TensorType) or not isinstance(made.dtype, DType):
        return False
    # Exact types: a plan is packed as msgpack, which has no integers of numpy.
    return type(made.shape) is tuple and all([type(n) is int and n >= 0 for n in made.shape])


def _gradient(
    rule: Function, names: list[str], outputs: list[str], attributes: tuple[Attribute, ...]
) -> Gradient:
    """Return the gradient that a function over tensors is, which takes what it names."""
    spec = read_gradient(rule, names, outputs, attributes)

    def named(attrs: Attrs, inputs: Tensors, results: Tensors, grads: Grads) -> Grads:
        operands = names[: len(inputs)]
        # strict=False: a function of any number of arrays has fewer names than values.
        values = dict(zip(names, (*inputs, *results), strict=False))
        for name, output, grad in zip(names[len(operands) :], results, grads, strict=False):
            if grad is None and f"d{name}" in spec.takes:  # nothing flows back to this output
                grad = as_tensor(0.0, output.dtype).broadcast_to(output.shape)
            if grad is not None:
                values[f"d{name}"] = grad
        returned = spec.results(values, settings_of(attributes, attrs), operands)
        for name, operand, tensor in zip(operands, inputs, returned, strict=True):
            _check(name, operand.type, tensor)
        return tuple(returned)

    return rule_over_tensors(named)


def gradient_alone(node: Node, types: Sequence[TensorType]) -> tuple[Graph, Maybe]:
    """Return what a node's gradient emits where the node is all there is, and its results.

    Raises CompileError, with the node's line, where the gradient is none.
    """
    b = GraphBuilder()

    def fed(type_: TensorType) -> ValueId:
        name = str(len(b.nodes))
        return b.emit_one(INPUT, name=name, dtype=type_.dtype.value, shape=type_.shape)

    with b.like_node(node):
        b.emit(node.op, [fed(type_) for type_ in types], node.attrs)
        alone = b.nodes[-1]
        grads = tuple([fed(b.type_of(v)) for v in alone.outputs])
        results = gradients.get(node.op)(b, alone, grads)
    return b.freeze(), results


def _check(name: str, type_: TensorType, returned: object) -> None:
    """Raise OpTypeError for what is neither the gradient of an operand nor None."""
    if returned is not None and not isinstance(returned, Tensor):
        raise OpTypeError(
            f"returns a {type(returned).__name__} for {name}, expected a tensor of {type_}, or None"
        )
    if isinstance(returned, Tensor) and returned.type != type_:
        raise OpTypeError(f"returns {returned.type} for {name}, which is {type_}")
