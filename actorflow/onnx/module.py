"""A model of ONNX as a module: its steps are called one after the other while a job is traced.

What a step is given is a tensor or, where it is known at the trace, an array: initialisers of
integers, shapes of tensors, and what ONNX's reference evaluator makes of them. So chains that
exporters write to compute a shape end in numbers.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np

from actorflow.nn.module import Module
from actorflow.nn.parameter import Buffer, Parameter
from actorflow.onnx import reading
from actorflow.onnx.arranging import ARRANGING
from actorflow.onnx.attention import ATTENTION, TRAINING
from actorflow.onnx.control import CONTROL
from actorflow.onnx.elementwise import ELEMENTWISE
from actorflow.onnx.layers import LAYERS
from actorflow.onnx.program import (
    TRAINING_DOMAIN,
    ModelPort,
    OnnxError,
    OnnxGraph,
    Operator,
    Step,
    StepCall,
    Value,
    call,
    known_places,
)
from actorflow.tensor.tensor import Tensor, as_tensor
from actorflow.tensor.tracer import current_trace, find_source
from actorflow.trace.job_graph import RESERVED, Batch
from compiler.contract.errors import CompileError
from compiler.contract.types import DType

OPERATORS: dict[str, Operator] = {**ELEMENTWISE, **ARRANGING, **LAYERS, **ATTENTION, **CONTROL}

_FEW = 4096
"""Elements of results that are computed at the trace: shapes, axes and the like are smaller."""

_STATISTICS = {"BatchNormalization": (3, 4)}
"""Inputs that are statistics, which no optimizer changes."""


_SINCE = {"BatchNormalization": 7, "Concat": 4, "Dropout": 7, "PRelu": 7, "Selu": 6}
"""Versions before which an operator of the same form means something else."""


def operator_of(step: Step) -> Operator:
    """Return the operator of a step. Raises OnnxError for one that is not known."""
    table = TRAINING if step.domain == TRAINING_DOMAIN else OPERATORS
    if step.op_type not in table:
        raise OnnxError(f"{step} (opset {step.opset}): this operator is not known here")
    if not step.domain and step.opset < _SINCE.get(step.op_type, 1):
        raise OnnxError(
            f"{step} (opset {step.opset}): known is this operator of opset"
            f" {_SINCE[step.op_type]} and later"
        )
    return table[step.op_type]


class Execution:
    """The run of a model's steps inside a trace. `rounded`: see `StepCall`."""

    def __init__(self, most: int, rounded: Iterable[str] = ()) -> None:
        self._most = most
        self._rounded = {*rounded}

    def run(self, block: OnnxGraph, values: dict[str, Value]) -> list[Value]:
        """Return the outputs of a block; `values` has what its steps may read."""
        values = {**values, **{k: v for k, v in block.constants.items() if k not in values}}
        for step in block.steps:
            self._run_step(step, values)
        return [_named(values, port.name, "the outputs") for port in block.outputs]

    def _run_step(self, step: Step, values: dict[str, Value]) -> None:
        operator = operator_of(step)
        given = [_named(values, name, str(step)) if name else None for name in step.inputs]

        def run(block: OnnxGraph, *arguments: Value) -> tuple[Value, ...]:
            inner = dict(zip([port.name for port in block.inputs], arguments, strict=True))
            return tuple(self.run(block, {**values, **inner}))

        at = StepCall(step, run, reading.evaluate, self._most, self._rounded)
        trace = current_trace()
        try:
            with trace.scope(step.name or step.op_type) if trace else nullcontext():
                made = call(operator, at, given)
        except OnnxError:
            raise
        except CompileError as error:
            raise OnnxError(f"{step} (opset {step.opset}): {error}") from error
        made = self._folded(step, given, made)
        values.update({n: v for n, v in zip(step.outputs, made, strict=False) if n})

    def _folded(self, step: Step, given: list[Value], made: tuple[Value, ...]) -> tuple[Value, ...]:
        """Return the numbers of a step whose inputs are all known, if they are few."""
        is_known = all(value is None or isinstance(value, np.ndarray) for value in given)
        tensors = [value for value in made if isinstance(value, Tensor)]
        if (
            not is_known
            or not tensors
            or any(isinstance(a, OnnxGraph) for a in step.attributes.values())
        ):
            return made
        if sum(t.type.num_elements for t in tensors) > _FEW or step.outputs[0] in self._rounded:
            return made
        numbers = reading.evaluate(step, given)
        for tensor, array in zip(made, numbers, strict=False):
            is_tensor = array is not None and isinstance(tensor, Tensor)
            if is_tensor and (str(array.dtype), array.shape) != (tensor.dtype.value, tensor.shape):
                raise OnnxError(f"{step}: {tensor.type} here is {array.dtype} {array.shape} there")
        return tuple(numbers)


def _named(values: Mapping[str, Value], name: str, where: str) -> Value:
    if name not in values:
        raise OnnxError(f"{where}: the value {name!r} is not there")
    return values[name]


def needed_as_constants(block: OnnxGraph) -> set[str]:
    """Return the values that decide shapes, as far back as they are computed from."""
    needed: set[str] = set()
    for step in reversed(block.steps):
        needed.update(known_places(operator_of(step), step))
        if needed.intersection(step.outputs) and step.op_type not in ("Shape", "Size"):
            needed.update(filter(None, step.inputs))
    return needed


class OnnxModule(Module):
    """A model of ONNX; call it with a batch, or with tensors in the order of its inputs.

    Its float initialisers are parameters under their own names, running statistics buffers; what
    has no axes is a constant. It returns the tensor of its output, or a dict of them by name.

    Attributes:
        inputs: names of its inputs, in order.
        outputs: names of its outputs.
        paths: the path of each initialiser that is a parameter or buffer; it differs from the name
            where Python or the engine has the name for something else.
    """

    def __init__(self, block: OnnxGraph, most: int) -> None:
        self.inputs = tuple([port.name for port in block.inputs])
        self.outputs = tuple([port.name for port in block.outputs])
        self.paths: dict[str, str] = {}
        self._ports = block.inputs
        self._most = most
        for step in _all_steps(block):
            operator_of(step)  # named now, and not at the first trace
        for name, stored in _stored(block).items():
            path = name
            while path in RESERVED or hasattr(self, path) or path.startswith("_"):
                path = f"onnx_{path.lstrip('_')}" if path.startswith("_") else f"{path}_"
            vars(self)[path] = stored
            self.paths[name] = path
        left = {k: v for k, v in block.constants.items() if k not in self.paths}
        self._program = Program(OnnxGraph(block.inputs, block.outputs, block.steps, left))

    def __call__(self, *given: Any, **named: Any) -> Any:
        """Return the model's output for a batch, or for tensors in order or by name."""
        if len(given) == 1 and isinstance(given[0], (Batch, Mapping)):
            values = {name: given[0][name] for name in self.inputs}
        elif len(given) > len(self.inputs):
            raise OnnxError(
                f"{find_source()}: the model has {len(self.inputs)} inputs, got {len(given)}"
            )
        else:
            values = dict(zip(self.inputs, given, strict=False)) | named
        tensors = {name: as_tensor(value) for name, value in values.items()}
        check_ports(self._ports, tensors)
        stored: dict[str, Value] = {name: vars(self)[path] for name, path in self.paths.items()}
        made = Execution(self._most).run(self._program.block, {**stored, **tensors})
        results = [as_tensor(value) for value in made]
        if len(results) == 1:
            return results[0]
        return dict(zip(self.outputs, results, strict=True))

    def __repr__(self) -> str:
        """The ports of the model, its steps by operator, and how many numbers it trains."""
        block = self._program.block
        ports = [f"{port.name} {_shown(port)}" for port in self._ports]
        counts = Counter([step.op_type for step in block.steps])
        steps = ", ".join([f"{count} {name}" for name, count in counts.most_common()])
        return (
            f"OnnxModule({', '.join(ports)} -> {', '.join(self.outputs)})\n  steps: {steps}\n"
            f"{self.num_parameters():,} parameters in {len(self.paths)} arrays"
        )


class Program:
    """The steps of a module. They never change, so that a trace need not look at each of them."""

    __slots__ = ("block",)

    def __init__(self, block: OnnxGraph) -> None:
        self.block = block


def _all_steps(block: OnnxGraph) -> Iterator[Step]:
    for step in block.steps:
        yield step
        for value in step.attributes.values():
            if isinstance(value, OnnxGraph):
                yield from _all_steps(value)


def _stored(block: OnnxGraph) -> dict[str, Parameter | Buffer]:
    """Return what a module keeps, by name: floats that are not constants of a shape."""
    known, statistics = needed_as_constants(block), set[str]()
    for step in block.steps:
        places = _STATISTICS.get(step.op_type, ())
        statistics.update([name for i, name in enumerate(step.inputs) if i in places])
    found: dict[str, Parameter | Buffer] = {}
    for name, array in block.constants.items():
        if array.dtype.kind != "f" or not array.ndim or name in known:
            continue
        if name in statistics:
            found[name] = Buffer(array)
        else:
            found[name] = Parameter(array.shape, (("kind", "given"),), DType(str(array.dtype)))
            found[name].load(array)
    return found


def _shown(port: ModelPort) -> str:
    return f"{port.dtype}{['?' if n is None else n for n in port.shape or ()]}"


def check_ports(ports: Sequence[ModelPort], tensors: Mapping[str, Tensor]) -> None:
    """Hold tensors against the inputs of a model. Raises OnnxError with the user's line."""
    symbols: dict[str, tuple[int, str]] = {}
    unknown = [name for name in tensors if name not in {port.name for port in ports}]
    missing = [port.name for port in ports if port.name not in tensors]
    if unknown or missing:
        raise OnnxError(
            f"{find_source()}: the model has the inputs {[p.name for p in ports]}: missing"
            f" {missing or 'nothing'}, unknown {unknown or 'nothing'}"
        )
    for port in ports:
        tensor = tensors[port.name]
        fits = tensor.dtype.value == port.dtype
        if port.shape is not None:
            fits = fits and len(port.shape) == tensor.ndim
            for extent, n in zip(port.shape, tensor.shape, strict=False):
                if isinstance(extent, str) and extent:
                    first, where = symbols.setdefault(extent, (n, port.name))
                    if first != n:
                        raise OnnxError(
                            f"{find_source()}: {extent!r} is {first} in the input {where!r}, and"
                            f" {n} in {port.name!r}"
                        )
                elif isinstance(extent, int) and extent != n:
                    fits = False
        if not fits:
            raise OnnxError(
                f"{find_source()}: the input {port.name!r} of the model is {_shown(port)}, got"
                f" {tensor.type}"
            )


def load(
    source: str | os.PathLike[str] | bytes | Any, *, max_bytes: int | None = None
) -> OnnxModule:
    """Return a model of ONNX as a module that can be trained.

        model = af.onnx.load("resnet50.onnx")

        @af.job(train=False)
        def predict(model, batch):
            return model(batch)

    Args:
        source: a path, the bytes of a file, or an onnx.ModelProto.
        max_bytes: of the file, and of its constants; 2 GiB more than the file by default.

    Raises OnnxError, a CompileError, for what is not known here: it names node and attribute.
    """
    if isinstance(source, os.PathLike):
        source = os.fspath(source)
    return OnnxModule(*reading.read(source, max_bytes))
