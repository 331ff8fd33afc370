"""What the definition of an op says: its functions, how one call lies, the columns that follow.

The program of an op, a gradient of its own, the types of an op of numpy: functions of somebody
else. What is wrong with one is told as an `OpTypeError`, with the line of it where there is one.
`compiler.ops.language.define.fused_op` makes and registers the definition.
"""

from __future__ import annotations

import inspect
import math
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import BuiltinFunctionType, CodeType, FunctionType
from typing import Any, ParamSpec, Protocol, TypeGuard, TypeVar

import numpy as np

from compiler.contract.attrs import Attrs, AttrValue
from compiler.contract.errors import ActorflowError, InternalError
from compiler.contract.program import (
    ELEMENTWISE,
    FusedProgram,
    Kind,
    ProgramError,
    ProgramInput,
    check_program,
    joined,
)
from compiler.contract.spaces import Space
from compiler.contract.types import DType, TensorType, numpy_dtype
from compiler.graph import program_builder
from compiler.graph.program_builder import ProgramBuilder
from compiler.graph.registry import (
    Array,
    Check,
    Cost,
    Op,
    OpAttr,
    OpTypeError,
    Types,
    cost,
    expect_inputs,
    reference,
)
from compiler.ops.language.expressions import (
    Expression,
    Extents,
    OperandSpec,
    Signature,
    as_expression,
    plain,
)
from compiler.ops.language.program_ops import evaluate, program_flops

P = ParamSpec("P")
R = TypeVar("R")

Function = Callable[..., Any]
"""Operands, and attributes by keyword -> one result, or a tuple of them."""

Settings = dict[str, AttrValue]
"""Attributes by name."""


_REMEMBERED: list[Any] = []

FOREIGN: list[object] = []
"""Definitions of somebody whose functions may read what changes, as a global of a notebook."""


def definition_cache(most: int) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that caches by definition, until `clear_definition_caches`."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        cached = lru_cache(maxsize=most)(function)
        _REMEMBERED.append(cached)
        return cached  # type: ignore[return-value]  # mypy knows nothing of its parameters

    return decorate


def clear_definition_caches() -> None:
    """Let functions of definitions run again, where there are such as may give something else.

    For a job that is traced: then it is seen what they read, and a change of it is a change of the
    job.
    """
    if FOREIGN:
        for cached in _REMEMBERED:
            cached.cache_clear()


@dataclass(frozen=True, slots=True)
class Attribute:
    """A keyword-only argument of a function."""

    name: str
    type: type
    default: AttrValue
    is_required: bool


_TYPES: dict[object, type] = {t.__name__: t for t in (int, float, bool, str)}


def parameters_of(function: object) -> list[inspect.Parameter]:
    """Return what a function takes. Raises OpTypeError for what is no function, or does not say."""
    try:
        return list(inspect.signature(function).parameters.values())  # type: ignore[arg-type]  # told
    except (TypeError, ValueError):
        raise OpTypeError(
            f"needs a function written in Python, got {function!r:.60}; wrap it in a lambda"
        ) from None


def _is_plain(function: object) -> TypeGuard[FunctionType]:
    """Whether the code of a function says what it takes, which costs a tenth of a signature."""
    is_wrapping = hasattr(function, "__wrapped__") or hasattr(function, "__signature__")
    return isinstance(function, FunctionType) and not is_wrapping


_OPERATOR = re.compile(r"\(\$?\w+((?:, \w+)*), /\)")


def _num_positional(function: object) -> int | None:
    """Return how many arguments a function takes by position, all required; None if unknown.

    Of one in C, such as `operator.add`, its text of the arguments tells, which `inspect.signature`
    would parse as Python: 0.3 ms of each op that is defined when actorflow is imported.
    """
    if isinstance(function, BuiltinFunctionType):
        match = _OPERATOR.fullmatch(getattr(function, "__text_signature__", None) or "")
        return None if match is None else match[1].count(",")
    if not _is_plain(function) or function.__defaults__:
        return None
    return function.__code__.co_argcount


def attributes_of(function: Function) -> tuple[Attribute, ...]:
    """Return the keyword-only arguments of a function. Raises OpTypeError for a strange default."""
    if _is_plain(function) and not function.__code__.co_kwonlyargcount:
        return ()
    if isinstance(function, BuiltinFunctionType) and _num_positional(function) is not None:
        return ()
    attributes: list[Attribute] = []
    for p in parameters_of(function):
        if p.kind is not p.KEYWORD_ONLY:
            continue
        is_required = p.default is p.empty
        default = None if is_required else plain(p.default)
        _expect_plain(p.name, default)
        typed = object if default is None else type(default)
        type_name = str(getattr(p.annotation, "__name__", p.annotation))  # a text, in most files
        attributes.append(Attribute(p.name, _TYPES.get(type_name, typed), default, is_required))
    return tuple(attributes)


def settings_of(attributes: tuple[Attribute, ...], attrs: Mapping[str, Any]) -> Settings:
    """Return every attribute, defaults put in. Raises OpTypeError for wrong ones."""
    names = sorted([a.name for a in attributes])
    for name in attrs:
        if name not in names:
            raise OpTypeError(
                f"knows no attribute {name!r}; it has {names}: what its function takes by keyword"
                " only, after a *. Operands are given by position"
            )
    return {a.name: _checked(a, attrs) for a in attributes}


def _checked(attribute: Attribute, attrs: Mapping[str, Any]) -> AttrValue:
    if attribute.name not in attrs:
        if attribute.is_required:
            raise OpTypeError(f"needs the attribute {attribute.name!r}")
        return attribute.default
    value: AttrValue = attrs[attribute.name]
    _expect_plain(attribute.name, value)
    types = (int, float) if attribute.type is float else (attribute.type,)
    if attribute.type is not object and type(value) not in types:
        raise OpTypeError(
            f"needs {attribute.name} of type {attribute.type.__name__}, got {value!r:.60}"
        )
    return value


def _expect_plain(name: str, value: object) -> None:
    """Check that a plan, which may become a file, can hold an attribute."""
    if type(value) is tuple:
        for item in value:
            _expect_plain(name, item)
    elif type(value) not in (int, float, bool, str, bytes, type(None)) or (
        type(value) is int and not -(2**63) <= value < 2**64
    ):
        raise OpTypeError(
            f"needs {name} as a number of 64 bits, a bool, a text or a tuple of such, got"
            f" {value!r:.60} of type {type(value).__name__}"
        )


def expect_takes(function: Function, names: Sequence[str], what: str) -> None:
    """Check that a function can be called with one operand for each name."""
    if _num_positional(function) == len(names):
        return  # as almost all
    takes = inspect.signature(function)
    required = {a.name: None for a in attributes_of(function) if a.is_required}
    try:
        takes.bind(*names, **required)
    except TypeError as error:
        raise OpTypeError(
            f"has a {what} of {takes}, which cannot be called with ({', '.join(names)}): {error}"
        ) from None


def results_of(
    says: str, function: Function, *operands: object, **named: object
) -> tuple[Any, ...]:
    """Call a function; return what it returns as a tuple.

    Raises OpTypeError, which begins with `says`, naming the line where the function failed.
    """
    try:
        results = function(*operands, **named)
    except (ActorflowError, OpTypeError):
        raise
    except Exception as error:
        code = getattr(function, "__code__", None)
        frames = traceback.extract_tb(error.__traceback__)
        where = ""
        if isinstance(code, CodeType):
            lines = [f.lineno for f in frames if f.filename == code.co_filename]
            where = f" at {code.co_filename}:{lines[-1] if lines else code.co_firstlineno}"
        raise OpTypeError(f"{says}fails{where}: {type(error).__name__}: {error}") from error
    return tuple(results) if isinstance(results, (tuple, list)) else (results,)


@dataclass(frozen=True, slots=True, eq=False)
class CustomGradient:
    """A gradient that is stated: a function of what it takes by name."""

    function: Function
    takes: tuple[str, ...]
    attributes: tuple[str, ...]

    def results(
        self, values: Mapping[str, Any], settings: Settings, operands: Sequence[str]
    ) -> tuple[Any, ...]:
        """Return its results, one per operand. Raises OpTypeError for another number of them."""
        for name in self.takes:
            if name not in values:
                raise OpTypeError(f"takes {name!r}; it may take {', '.join(sorted(values))}")
        arguments = {n: values[n] for n in self.takes} | {n: settings[n] for n in self.attributes}
        grads = results_of("", self.function, **arguments)
        if len(grads) != len(operands):
            each = ", ".join(operands)
            raise OpTypeError(f"returns {len(grads)} results, expected one for each of ({each})")
        return grads


def read_gradient(
    function: Function,
    values: Sequence[str],
    outputs: Sequence[str],
    attributes: tuple[Attribute, ...],
) -> CustomGradient:
    """Return a gradient that takes by name `values`, gradients of `outputs` and attributes.

    Raises OpTypeError where it takes anything else, or no gradient.
    """
    grads = [f"d{name}" for name in outputs]
    settings = sorted([a.name for a in attributes])
    takes: list[str] = []
    keywords: list[str] = []
    for p in parameters_of(function):
        is_setting = p.kind is p.KEYWORD_ONLY
        allowed = settings if is_setting else sorted({*values, *grads})
        if p.name in allowed and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            (keywords if is_setting else takes).append(p.name)
        elif p.default is p.empty:  # what has a default is the function's own business
            kind = "the attribute " if is_setting else ""
            listed = ", ".join(allowed) or "none"
            raise OpTypeError(f"has a gradient that takes {kind}{p.name!r}; it may take {listed}")
    if not {*takes} & {*grads}:
        raise OpTypeError(
            f"has a gradient that takes no output's gradient; it may take {', '.join(grads)}"
        )
    return CustomGradient(function, tuple(takes), tuple(keywords))


@dataclass(frozen=True, slots=True)
class ProgramOperand:
    """An operand or output of one call: how it lies in the program, and its dtype."""

    name: str
    kind: Kind
    dtype: DType


@dataclass(frozen=True, slots=True)
class ProgramSignature:
    """One call of a fused op: its operands and outputs, and where they lie.

    `extents` is None for an elementwise op, whose slots are all FULL.
    """

    inputs: tuple[ProgramOperand, ...]
    outputs: tuple[ProgramOperand, ...]
    extents: Extents | None

    def builder(self) -> ProgramBuilder:
        """Return an empty program in the form's space."""
        e = self.extents
        return ProgramBuilder(1, 1) if e is None else ProgramBuilder(e.rows, e.columns)


class Fused(Protocol):
    """A fused op that was written down or derived."""

    @property
    def signature(self) -> Signature:
        """What the op, or what it was derived from, reads and makes."""
        ...

    def __hash__(self) -> int:
        """Definitions are equal to themselves alone."""
        ...

    def form(self, inputs: Types, attrs: Attrs) -> ProgramSignature:
        """Return how the operands of a call lie."""
        ...

    def emit(
        self, p: ProgramBuilder, attrs: Attrs, extents: Extents | None, values: tuple[int, ...]
    ) -> tuple[int, ...]:
        """Emit the program on values; return one value per output."""
        ...


def output_of(p: ProgramBuilder, made: Any, kind: Kind) -> int:
    """Return a result as a value of a kind that an instruction makes."""
    if not isinstance(made, Expression):
        raise OpTypeError(f"has a program that returns a {type(made).__name__}, no expression")
    value, actual = made.value, p.kind_of(made.value)
    if kind is Kind.FULL or actual is Kind.SCALAR:
        value = p.widened(value, kind)
    # In one row whatever has columns is a column.
    elif actual is not kind and not (p.rows == 1 and kind is Kind.COLUMN):
        is_row = kind is Kind.ROW
        mend = "reduce it over the columns, e.g. with .mean()" if is_row else "sum rows outside"
        raise OpTypeError(
            f"has a program with a result for each {_EACH[actual]} where its signature has one for"
            f" each {_EACH[kind]}; {mend}"
        )
    if p.is_input(value):  # a copy: the larger of x and x
        return p.op("or" if made.dtype is DType.BOOL else "max", value, value)
    return int(value)


_EACH = {Kind.FULL: "element", Kind.ROW: "row", Kind.COLUMN: "column", Kind.SCALAR: "call"}


def register_program(op: Op, found: Fused, where: str) -> None:
    """Fill the columns that follow from `found.form` and `found.emit`."""
    is_elementwise = found.signature.is_elementwise

    def expand(
        p: ProgramBuilder, attrs: Attrs, types: Types, values: tuple[int, ...]
    ) -> tuple[int, ...]:
        outputs = p.replay(trace(found, types, attrs), values)
        if not is_elementwise:
            return outputs
        kind = joined([p.kind_of(v) for v in values])  # a lesser value where an operand is unused
        return tuple(
            [
                v
                if p.kind_of(v) is kind and not p.is_input(v)
                else output_of(p, Expression(p, v), kind)
                for v in outputs
            ]
        )

    @lru_cache(maxsize=512)  # asked again and again, in every pass
    def frame(
        inputs: Types, outputs: Types, attrs: Attrs
    ) -> program_builder.IterationDomain | None:
        return _frame_of(found.form(inputs, attrs))

    def run(attrs: Attrs, *arrays: Array) -> tuple[Array, ...]:
        attrs = Attrs(attrs)  # whoever asks for a reference by hand may have a dict
        operands = [np.asarray(a) for a in arrays]
        types = tuple([TensorType(DType(str(a.dtype)), a.shape) for a in operands])
        form = found.form(types, attrs)
        results = _interpret(form, trace(found, types, attrs), [_widened(a) for a in operands])
        return tuple(
            [a.astype(numpy_dtype(s.dtype)) for a, s in zip(results, form.outputs, strict=True)]
        )

    def work(inputs: Types, outputs: Types, attrs: Attrs) -> Cost:
        e = found.form(inputs, attrs).extents
        elements = Space(1, max([t.num_elements for t in outputs]))
        space = elements if e is None else Space(e.rows, e.columns)
        moved_bytes = sum([t.size_bytes for t in (*inputs, *outputs)])
        return Cost(program_flops(trace(found, inputs, attrs), space), float(moved_bytes))

    program_builder.expand.register(op, expand, where)
    if not is_elementwise:
        program_builder.frame.register(op, frame, where)
    reference.register(op, run, where)
    cost.register(op, work, where)


def _widened(array: Array) -> Array:
    """Return float16 as float32: a sum of its largest numbers is none of its own."""
    return array.astype(np.float32) if array.dtype == np.float16 else array


def _frame_of(form: ProgramSignature) -> program_builder.IterationDomain | None:
    """Return how the operands of a call with rows and columns lie."""
    e = form.extents
    if e is None:
        raise InternalError("elementwise ops have the pointwise frame")
    sums = [i for i, slot in enumerate(form.outputs) if slot.kind is Kind.COLUMN and e.rows != 1]
    outputs = [
        e.shape if slot.kind is Kind.COLUMN and e.rows == 1 else e.stretchable(slot.kind)
        for slot in form.outputs
    ]
    return program_builder.IterationDomain(
        e.shape,
        tuple([e.stretchable(slot.kind) for slot in form.inputs]),
        tuple(outputs),
        num_trailing=len(e.named),
        write_only=tuple(sums),
    )


def _interpret(
    form: ProgramSignature, program: FusedProgram, arrays: list[Array]
) -> tuple[Array, ...]:
    """Follow a program in numpy, in the width of the arrays."""
    e = form.extents
    if e is None:
        shape = np.broadcast_shapes(*[a.shape for a in arrays])
        arrays = [np.broadcast_to(a, shape) for a in arrays]
        outputs = evaluate(program, Space(1, math.prod(shape)), tuple(arrays))
        return tuple([array.reshape(shape) for array in outputs])
    if 0 in e.shape:  # of empty rows nothing is summed, and no rows have no largest element
        return tuple([np.zeros(e.of(slot.kind), arrays[0].dtype) for slot in form.outputs])
    outputs = evaluate(program, Space(e.rows, e.columns), tuple(arrays))
    return tuple([a.reshape(e.of(s.kind)) for a, s in zip(outputs, form.outputs, strict=True)])


def trace(found: Fused, inputs: Types, attrs: Attrs) -> FusedProgram:
    """Return the program of one call; the same one again for a call like it."""
    if found.signature.is_elementwise:  # one for all shapes
        return _traced_elementwise(found, tuple([t.dtype for t in inputs]), attrs)
    return _traced(found, inputs, attrs)


@definition_cache(4096)
def _traced_elementwise(found: Fused, dtypes: tuple[DType, ...], attrs: Attrs) -> FusedProgram:
    return _traced(found, tuple([TensorType(dtype, ()) for dtype in dtypes]), attrs)


@definition_cache(4096)
def _traced(found: Fused, inputs: Types, attrs: Attrs) -> FusedProgram:
    form = found.form(inputs, attrs)
    p = form.builder()
    values = tuple([p.input(ProgramInput(slot.dtype, slot.kind)) for slot in form.inputs])
    return p.whole(found.emit(p, attrs, form.extents, values))


"""What the signature cannot say; raises OpTypeError."""


_OF_ELEMENTS = (*ELEMENTWISE, "constant", "cast")
"""Instructions that are the same whatever rows and columns there are."""


@dataclass(frozen=True, slots=True, eq=False)
class FusedOp:
    """What a definition says. Equal to itself alone."""

    op: Op
    signature: Signature
    program: Function
    attributes: tuple[Attribute, ...]
    gradient: CustomGradient | None
    check: Check | None
    where: str
    traces_at_once: bool

    def settings(self, attrs: Attrs) -> Settings:
        """Return every attribute, defaults put in. Raises OpTypeError for wrong ones."""
        return settings_of(self.attributes, attrs)

    def infer(self, inputs: Types, attrs: Attrs) -> Types:
        """Return the types of the outputs."""
        expect_inputs(inputs, *[spec.name for spec in self.signature.inputs])
        outputs = self.signature.types_of(inputs)
        if self.attributes or attrs:
            self.settings(attrs)
        if self.check is not None:
            self.check(inputs, attrs)
        if self.traces_at_once and 0 not in [t.num_elements for t in inputs]:
            self._expect(trace(self, inputs, attrs), outputs)
        return outputs

    def _expect(self, program: FusedProgram, made: Types) -> None:
        """Check that a program is what the signature says. Raises OpTypeError."""
        for spec, value, type_ in zip(self.signature.outputs, program.outputs, made, strict=True):
            dtype = program.dtype_of(value)
            if dtype is not type_.dtype:
                is_bool = dtype is DType.BOOL
                mend = f"say '{spec.name}: bool'" if is_bool else "cast it with .to(...)"
                raise OpTypeError(
                    f"has a program that makes {spec.name} of {dtype}, where its signature says"
                    f" {type_.dtype}; {mend}"
                )
        for instruction in program.instructions:
            if self.signature.is_elementwise and instruction.op not in _OF_ELEMENTS:
                raise OpTypeError(
                    f"has a program with {instruction.op}, and its signature has no rows and"
                    " columns; say how operands lie, as in 'x[*, D] -> y[*, D]'"
                )
        try:
            check_program(program)
        except ProgramError as error:
            raise OpTypeError(f"has a program that cannot be computed: {error}") from None

    def form(self, inputs: Types, attrs: Attrs) -> ProgramSignature:
        """Return how the operands of a call lie."""
        signature = self.signature
        outputs = signature.types_of(inputs)
        extents = None if signature.is_elementwise else signature.extents_of(inputs)
        return ProgramSignature(
            _slots(signature.inputs, inputs), _slots(signature.outputs, outputs), extents
        )

    def emit(
        self, p: ProgramBuilder, attrs: Attrs, extents: Extents | None, values: tuple[int, ...]
    ) -> tuple[int, ...]:
        """Emit the program on values; return one value per output."""
        specs = self.signature.inputs
        shapes = [() if extents is None else extents.of(s.kind or Kind.FULL) for s in specs]
        expressions = [Expression(p, v, shape) for v, shape in zip(values, shapes, strict=True)]
        says = "has a program that "
        results = results_of(says, self.program, *expressions, **self.settings(attrs))
        if len(results) != len(self.signature.outputs):
            raise OpTypeError(
                f"{says}returns {len(results)} values for {len(self.signature.outputs)} outputs"
            )
        wide = joined([p.kind_of(v) for v in values])
        kinds = [s.kind or wide for s in self.signature.outputs]
        return tuple([output_of(p, r, k) for r, k in zip(results, kinds, strict=True)])


definition = OpAttr[FusedOp]("definition", "the op's program and signature; read by derivation")


OP_OF_INSTRUCTION: dict[str, Op] = {}
"""The ops that are one instruction of their operands, in order; the first of each."""


def inlined(op: Op, operands: tuple[object, ...], attrs: Attrs) -> tuple[Expression, ...]:
    """Return the outputs of an op inside another's program. Raises OpTypeError for one of none."""
    if not definition.has(op):
        raise OpTypeError(f"has a program that uses {op}, which is not defined by a program")
    fused = definition.get(op)
    if fused.traces_at_once:  # by somebody who may call methods of numbers
        first = next(o for o in operands if isinstance(o, Expression))
        operands = tuple([as_expression(o, first) for o in operands])
    return results_of("has a program that ", fused.program, *operands, **fused.settings(attrs))


def _slots(specs: tuple[OperandSpec, ...], types: Types) -> tuple[ProgramOperand, ...]:
    pairs = zip(specs, types, strict=True)
    return tuple([ProgramOperand(s.name, s.kind or Kind.FULL, t.dtype) for s, t in pairs])
