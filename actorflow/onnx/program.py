"""A model that was read: steps, ports and constants as plain Python; and how a step is bound.

An operator of ONNX is a Python function whose parameters have ONNX's own names: positional ones are
inputs, keyword-only ones attributes with their defaults. So the signature says what is known, and a
step with anything else is refused by name. An annotation says more of an input:

    x: Tensor          data; a constant comes as a tensor too
    index: Operand     data or a constant, as it is
    shape: Known       an array: what decides shapes, and must not depend on data

A parameter called `step` is given the `StepCall`. An attribute of an older version that has become
an input is bound to that input.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np

from actorflow.tensor.tensor import as_tensor
from compiler.contract.errors import CompileError

Known = np.ndarray[Any, Any]
Operand = Any
Value = Any
"""A tensor, an array, or None for an input or output that is left out."""

TRAINING_DOMAIN = "ai.onnx.preview.training"

DTYPES = {
    1: "float32",
    2: "uint8",
    3: "int8",
    4: "uint16",
    5: "int16",
    6: "int32",
    7: "int64",
    9: "bool",
    10: "float16",
    11: "float64",
    12: "uint32",
    13: "uint64",
    16: "bfloat16",
}
"""Element types by ONNX's numbers; others are refused."""


class OnnxError(CompileError):
    """A model of ONNX that cannot be read, run or written; the text names what and where."""


@dataclass(frozen=True, slots=True)
class ModelPort:
    """An input or output of a model: its dtype, and extents: numbers, symbols, None if unknown."""

    name: str
    dtype: str
    shape: tuple[int | str | None, ...] | None


@dataclass(frozen=True, slots=True)
class Step:
    """One node: an operator of some version on values by name ("" for one that is left out)."""

    op_type: str
    domain: str
    opset: int
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]

    def __str__(self) -> str:
        return f"{self.op_type} {self.name or (self.outputs or ('',))[0]!r}"


@dataclass(frozen=True, slots=True)
class OnnxGraph:
    """A graph: of a model, or of the body of a loop or branch."""

    inputs: tuple[ModelPort, ...]
    outputs: tuple[ModelPort, ...]
    steps: tuple[Step, ...]
    constants: Mapping[str, np.ndarray[Any, Any]]


@dataclass
class StepCall:
    """A step while its operator is called.

    `run` calls a block among the values around it. `most` is the largest constant in bytes.
    """

    step: Step
    run: Callable[..., tuple[Value, ...]]
    evaluate: Callable[[Step, list[Any]], list[Any]]
    most: int
    rounded: set[str] = field(default_factory=set)
    """Outputs of the model that are bfloat16 in the file: float32 here, to be rounded outside."""

    @property
    def opset(self) -> int:
        """Version of the operator set."""
        return self.step.opset

    def wants(self, place: int) -> bool:
        """Whether an output is asked for."""
        return len(self.step.outputs) > place and bool(self.step.outputs[place])

    def arange(self, count: int) -> np.ndarray[Any, Any]:
        """Return the numbers of an axis, int64. Raises OnnxError where they need too many bytes."""
        if 8 * count > self.most:
            self.refuse(f"makes {count:,} numbers, more than the bound of {self.most:,} bytes")
        return np.arange(count, dtype=np.int64)

    def refuse(self, why: str) -> NoReturn:
        """Raise OnnxError that names the step."""
        raise OnnxError(f"{self.step} (opset {self.opset}): {why}")


Operator = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class OperatorSignature:
    """What an operator takes, from the signature of its function."""

    operands: tuple[tuple[str, str, bool], ...]
    """(name, annotation, is optional) of each input."""
    rest: str
    """The annotation of any more inputs; "" for none."""
    attributes: frozenset[str]
    required: frozenset[str]
    wants_step: bool


def taking(*names: str) -> Callable[[Operator], Operator]:
    """Let an operator take attributes of these names as `**keywords`; a decorator."""

    def marked(operator: Operator) -> Operator:
        operator.__dict__["attributes"] = names
        return operator

    return marked


@functools.cache
def signature_of(operator: Operator) -> OperatorSignature:
    """Return the signature of an operator."""
    parameters = inspect.signature(operator).parameters.values()
    places = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    rest = [str(p.annotation) for p in parameters if p.kind is p.VAR_POSITIONAL]
    keywords = [p for p in parameters if p.kind is p.KEYWORD_ONLY and p.name != "step"]
    required = frozenset([p.name for p in keywords if p.default is p.empty])
    names = {p.name for p in keywords}
    names |= {*vars(operator).get("attributes", ())}
    operands = [
        (p.name, str(p.annotation).removesuffix(" | None"), str(p.annotation).endswith(" | None"))
        for p in places
    ]
    wants_step = any(p.name == "step" for p in parameters)
    return OperatorSignature(
        tuple(operands), rest[0] if rest else "", frozenset(names), required, wants_step
    )


def known_places(operator: Operator, step: Step) -> list[str]:
    """Return the values that must be constants for a step."""
    operands = signature_of(operator).operands
    pairs = zip(operands, step.inputs, strict=False)
    return [name for (_, annotation, _), name in pairs if annotation == "Known" and name]


def call(operator: Operator, given: StepCall, values: list[Value]) -> tuple[Value, ...]:
    """Return the outputs of a step. Raises OnnxError for what its operator does not know."""
    signature, step = signature_of(operator), given.step
    while values and values[-1] is None:
        values = values[:-1]
    if len(values) > len(signature.operands) and not signature.rest:
        given.refuse(f"takes up to {len(signature.operands)} inputs, got {len(values)}")
    by_name: dict[str, Any] = {}
    rest: list[Any] = []
    for place, value in enumerate(values):
        if place < len(signature.operands):
            name, annotation, is_optional = signature.operands[place]
            if value is None and not is_optional:
                given.refuse(f"needs its input {name!r}")
            by_name[name] = _as(annotation, value, name, given)
        else:
            rest.append(_as(signature.rest, value, str(place), given))
    named: dict[str, Any] = {"step": given} if signature.wants_step else {}
    inputs = {name: annotation for name, annotation, _ in signature.operands}
    for name, value in step.attributes.items():
        if name in signature.attributes:
            named[name] = value
        elif name in inputs and by_name.get(name) is None:
            by_name[name] = _as(inputs[name], np.asarray(value), name, given)
        else:
            given.refuse(f"has the attribute {name!r}, which is not known here")
    for name, _, is_optional in signature.operands:
        if name not in by_name and not is_optional:
            given.refuse(f"needs its input {name!r}")
    for name in signature.required - {*named}:
        given.refuse(f"needs the attribute {name!r}")
    ordered = [by_name.get(name) for name in inputs]
    # Defaults of inputs are all None, so that what is left out and what comes as None are one.
    made = operator(*ordered, *rest, **named)
    return made if isinstance(made, tuple) else (made,)


def _as(annotation: str, value: Value, name: str, given: StepCall) -> Value:
    """Return an input in the form that its annotation says."""
    if value is None:
        return None
    if annotation == "Known":
        if isinstance(value, np.ndarray):
            return value
        given.refuse(
            f"its input {name!r} decides a shape and depends on data; shapes are static here, so"
            " it must be a constant of the model"
        )
    if annotation == "Tensor":
        return as_tensor(value) if isinstance(value, np.ndarray) else value
    return value
