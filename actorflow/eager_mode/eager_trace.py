"""The trace of eager mode: each op is computed as it is emitted.

Functions, layers, rules of gradients and optimizers emit ops into a trace, whatever trace it is.
So none of them is written twice: this one runs the op (`launches`), and keeps a record of it that
lives as long as what was computed from it (`values`). Batches and values of the model are copied
when they are first read, so that nothing here is written by anybody else.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, cast

import numpy as np

from actorflow.eager_mode.launches import Kernels, ValueStorage
from actorflow.eager_mode.tape import GradientCache
from actorflow.eager_mode.values import EagerValue, OpRecord, Place
from actorflow.environment.settings import Settings
from actorflow.nn.lease import assign_values, frozen, newest
from actorflow.nn.module import Module, initialise
from actorflow.nn.parameter import ModelTensor
from actorflow.tensor.initial_values import initial_value
from actorflow.tensor.literals import dtype_named
from actorflow.tensor.probes import ProbeEvent, fire
from actorflow.tensor.tracer import InitSpec, Trace, find_source
from actors.kernels.host import catalogue
from actors.kernels.library.launch import NativeError
from actors.machine.protocol import DeviceFault
from compiler.contract.attrs import NO_ATTRS, Attrs, AttrValue
from compiler.contract.errors import CompileError, InternalError
from compiler.contract.placement import Device
from compiler.contract.probe import ProbeKind, TensorProbe
from compiler.contract.sbp import Layout
from compiler.contract.types import (
    DType,
    Phase,
    TensorType,
    ValueId,
    from_bits,
)
from compiler.graph.graph import GraphBuilder, Node, SourceLocation
from compiler.graph.registry import Op, OpTypeError
from compiler.ops.primitives.sources import CONSTANT, INPUT, VARIABLE, scalar

Array = np.ndarray[Any, Any]


class EagerBuilder(GraphBuilder):
    """A builder whose nodes are computed at once; its values are `EagerValue`s."""

    def __init__(self, kernels: Kernels, gradients: GradientCache) -> None:
        super().__init__()
        self.kernels = kernels
        self._gradients = gradients

    def emit(
        self,
        op: Op,
        inputs: Sequence[ValueId],
        attrs: Attrs | Mapping[str, AttrValue] = NO_ATTRS,
    ) -> tuple[ValueId, ...]:
        """Compute an op. Raises CompileError on wrong input types."""
        its = attrs if isinstance(attrs, Attrs) else Attrs(attrs)
        scope, source, phase, *_ = self.place
        values = self.run(op, its, _values(inputs), (scope, source, phase))
        return cast("tuple[ValueId, ...]", values)

    def run(
        self,
        op: Op,
        attrs: Attrs,
        inputs: tuple[EagerValue, ...],
        place: Place,
    ) -> tuple[EagerValue, ...]:
        """Compute an op on values and record it. Raises CompileError for what it cannot take."""
        if op is CONSTANT:
            return self._constant(attrs, place).values()
        stored = tuple([self.stored(value) for value in inputs])
        try:
            call = self.kernels.call(op, attrs, tuple([x.form for x in stored]))
            made = self.kernels.run(call, stored)
        except OpTypeError as error:
            operands = ", ".join([str(x.form.type) for x in stored])
            raise CompileError(
                f"{place[1]}: {op}({operands}){_in_scope(place[0])}: {error}"
            ) from error.__cause__
        except DeviceFault as error:
            # A GPU that has failed says the same of every later op: the first one is at fault.
            where = f"{place[1]}: {op}{_in_scope(place[0])}"
            self.kernels.failed_at = self.kernels.failed_at or where
            raise CompileError(f"{self.kernels.failed_at}: {error}") from error
        except (NativeError, IndexError) as error:
            raise CompileError(f"{place[1]}: {op}{_in_scope(place[0])}: {error}") from error
        kept = inputs if call.has_gradient else ()
        return OpRecord(op, attrs, kept, call.types, made, place).values()

    def stored(self, value: EagerValue) -> ValueStorage:
        """Return where a value lies; what was let go is computed again."""
        record = value.record
        if record.stored is None:
            todo = [record]
            while todo:
                last = todo[-1]
                missing = [v.record for v in last.inputs if v.record.stored is None]
                if missing:
                    todo += missing
                else:
                    self._recompute(todo.pop())
        return cast("Sequence[ValueStorage]", record.stored)[value.index]

    def leaf(
        self, op: Op, attrs: Attrs, stored: ValueStorage, source: SourceLocation
    ) -> EagerValue:
        """Return a value that no op has made."""
        place = self.place[0], source, Phase.FORWARD
        return EagerValue(OpRecord(op, attrs, (), (stored.form.type,), (stored,), place), 0)

    def gradients(
        self, seeds: Mapping[EagerValue, EagerValue], wanted: Sequence[EagerValue]
    ) -> dict[EagerValue, EagerValue]:
        """Return the gradients of values; see `emit_gradients`."""
        return self._gradients.gradients(self.compute, seeds, wanted)

    def compute(self, node: Node, inputs: tuple[EagerValue, ...]) -> tuple[EagerValue, ...]:
        """Compute the op of a node on values."""
        return self.run(node.op, node.attrs, inputs, (node.scope, node.source, node.phase))

    def type_of(self, value: ValueId) -> TensorType:
        """Return the type of a value."""
        return _value(value).type

    def producer_of(self, value: ValueId) -> Node:
        """Return the node that a graph would have of what made a value."""
        return _value(value).record.node()

    def freeze(self) -> NoReturn:
        """Refuse: what is computed is no graph."""
        raise InternalError("an eager trace has no graph")

    def _recompute(self, record: OpRecord) -> None:
        stored = tuple([self.stored(value) for value in record.inputs])
        call = self.kernels.call(record.op, record.attrs, tuple([x.form for x in stored]))
        record.stored = self.kernels.run(call, stored)

    def _constant(self, attrs: Attrs, place: Place) -> OpRecord:
        stored = self.kernels.constant(attrs)
        return OpRecord(CONSTANT, attrs, (), (stored.form.type,), (stored,), place)


def _value(value: ValueId) -> EagerValue:
    return cast("EagerValue", value)


def _values(values: Sequence[ValueId]) -> tuple[EagerValue, ...]:
    return cast("tuple[EagerValue, ...]", tuple(values))


def _in_scope(scope: str) -> str:
    return f" in '{scope}'" if scope else ""


class Engine:
    """What a thread computes eager values with: its kernels, and the gradients that it had."""

    def __init__(
        self, settings: Settings, identity: str, device: Device, *, deterministic: bool
    ) -> None:
        self.key = settings, identity, deterministic
        self.kernels = Kernels(settings, device, deterministic=deterministic)
        self.gradients = GradientCache()
        # Launches hold handles of libraries, which are gone when Python clears what is left.
        atexit.register(_forget_calls, weakref.ref(self.kernels))


def _forget_calls(kernels: weakref.ref[Kernels]) -> None:
    alive = kernels()
    if alive is not None:
        alive.forget()


class _Engines(threading.local):
    def __init__(self) -> None:
        self.by_device: dict[Device, Engine] = {}


_ENGINES = _Engines()
"""The engines of each thread: launches share scratch, and are bound to addresses of its blocks."""


def engine_of_thread(settings: Settings, device: Device, *, deterministic: bool) -> Engine:
    """Return the engine of this thread for some settings, and the kernels registered now.

    Raises CompileError or DeviceError for a device that is not here.
    """
    engines, identity = _ENGINES.by_device, catalogue.identity()
    engine = engines.get(device)
    is_current = engine is not None and engine.key == (settings, identity, deterministic)
    if engine is None or not is_current or engine.kernels.failed_at:
        engine = Engine(settings, identity, device, deterministic=deterministic)
        engines[device] = engine
    return engine


_MOST_NUMBERS = 1 << 10
"""Numbers that a trace keeps as values: a function uses the same few again and again."""

Copies = dict[str, tuple[Array, ValueStorage]]
"""Values of a model by name: the array that was read, and the copy that ops read."""


class EagerTrace(Trace):
    """A trace whose tensors have data.

    Args:
        engine: of this thread.
        batch: the entries of the batch.
        model: whose values are read; None where modules are called in a block.
        is_training: as of a job.
        keeps_assignments: whether what is assigned to a buffer is the model's at once; else nobody
            but the trace has it.
        state: variables that are no values of a model, by name; what is missing gets its first
            value.
        copies: of the model's values, from an earlier trace or none.
    """

    is_eager = True

    def __init__(
        self,
        engine: Engine,
        batch: Mapping[str, Array],
        model: Module | None,
        *,
        is_training: bool,
        keeps_assignments: bool = True,
        state: dict[str, ValueStorage],
        seed: int,
        copies: Copies,
    ) -> None:
        names = {} if model is None else {id(x): path for path, x in model.named_stored()}
        paths = {} if model is None else {id(m): path for path, m in model.named_modules()}
        super().__init__({}, names, paths, is_training=is_training)
        self.builder: EagerBuilder = EagerBuilder(engine.kernels, engine.gradients)
        self.state, self.seed = state, seed
        self._batch, self._copies = batch, copies
        self._has_model = model is not None
        self._keeps_assignments = keeps_assignments
        self._stored: dict[str, ModelTensor] = {}
        self._leaves: dict[str, EagerValue] = {}
        self._numbers: dict[Attrs, tuple[ValueId, ...]] = {}
        self._captured: dict[EagerValue, EagerValue] = {}
        self._outermost: Module | None = model
        self._depth = 0 if model is None else 1

    def emit(self, op: Op, inputs: list[ValueId], attrs: Attrs) -> tuple[ValueId, ...]:
        """Compute an op at the user's current line. Raises CompileError naming that line."""
        if op is CONSTANT and attrs in self._numbers:
            return self._numbers[attrs]
        place = self._scope, find_source(), Phase.FORWARD
        made = cast("tuple[ValueId, ...]", self.builder.run(op, attrs, _values(inputs), place))
        if op is CONSTANT and not attrs["shape"] and len(self._numbers) < _MOST_NUMBERS:
            self._numbers[attrs] = made
        return made

    @contextmanager
    def inside(self, module: object) -> Iterator[None]:
        """Give ops the path of `module` while its `__call__` runs."""
        if self._depth == 0:
            self._outermost = cast("Module", module)
        self._depth += 1
        try:
            with self.scope(self._module_paths.get(id(module), self._scope)):
                yield
        finally:
            self._depth -= 1
            self._settle()

    def batch_input(self, key: str) -> ValueId:
        """Return the value of `batch[key]`. Raises CompileError naming the keys there are."""
        if key not in self._inputs:
            if key not in self._batch:
                keys = ", ".join(map(repr, self._batch))
                raise CompileError(f"{find_source()}: the batch has no {key!r}; it has {keys}")
            self._inputs[key] = self.of_array(self._batch[key])
        return self._inputs[key]

    def of_array(self, array: Array) -> ValueId:
        """Return a copy of an array as a value."""
        type_ = TensorType(dtype_named(array.dtype, "arrays of dtype"), array.shape)
        return self._leaf(INPUT, "", type_, self.builder.kernels.store(type_, array))

    def name_of(self, stored: object, kind: str, source: SourceLocation) -> str:
        """Return the path of what the model keeps; in a block, a name for it."""
        its = cast("ModelTensor", stored)
        if self._has_model:
            name = super().name_of(stored, kind, source)
        else:
            name = f"{kind}@{id(stored)}"
        self._stored[name] = its  # which keeps it, so that no other object gets its id
        return name

    def variable(
        self,
        name: str,
        type_: TensorType,
        role: str,
        init: InitSpec,
        source: SourceLocation | None = None,
        sbp: Layout = (),
    ) -> ValueId:
        """Return the value of a variable."""
        stored = self._stored.get(name)
        if stored is not None:
            return self._of_model(name, stored)
        if name not in self._leaves:
            if name not in self.state:
                first = initial_value(name, type_, init, self.seed)
                self.state[name] = self.builder.kernels.store(type_, first)
            self._leaves[name] = self._variable(name, type_, role, init, self.state[name])
        return cast("ValueId", self._leaves[name])

    def has_variable(self, name: str) -> bool:
        """Whether a variable has been used."""
        return name in self._leaves

    def assign(self, name: str, variable: ValueId, value: ValueId) -> None:
        """Let a buffer have a value at once."""
        super().assign(name, variable, value)
        if self._keeps_assignments:
            array = frozen(np.array(self.bits(value)))
            assign_values({self._stored[name].cell: array})
            self._copies[name] = array, self.dense(value)
            self._settle()

    def captured(self, tensor: Any) -> ValueId:
        """Return a tensor of another eager block as a value that nothing led to."""
        if not tensor._trace.is_eager:
            return super().captured(tensor)
        value = _value(tensor._value)
        if value not in self._captured:
            stored, kernels = tensor._trace.builder.stored(value), tensor._trace.builder.kernels
            if kernels is not self.builder.kernels:  # of another device, or another thread
                stored = self.builder.kernels.store(value.type, kernels.read(stored))
            self._captured[value] = _value(self._leaf(INPUT, "", value.type, stored))
        return cast("ValueId", self._captured[value])

    def one(self, value: ValueId) -> ValueId:
        """Return the gradient of a scalar by itself."""
        node = self.builder.producer_of(value)
        with self.builder.like_node(node, Phase.BACKWARD):
            return scalar(self.builder, 1.0, _value(value).type.dtype)

    def gradients(
        self, seeds: Mapping[ValueId, ValueId], wanted: Sequence[ValueId]
    ) -> dict[ValueId, ValueId]:
        """Compute the gradients of values."""
        pairs = {_value(value): _value(seed) for value, seed in seeds.items()}
        found = self.builder.gradients(pairs, _values(wanted))
        return cast("dict[ValueId, ValueId]", found)

    def probe(
        self,
        kind: ProbeKind,
        text: str,
        values: list[ValueId],
        predicate: Callable[[Any], object] | None = None,
    ) -> None:
        """Show or check values at once. Raises CheckFailed."""
        arrays = [self.read(value) for value in values]
        event = ProbeEvent(str(find_source()), "in eager mode")
        fire(TensorProbe(self.next_probe(), kind, text), arrays, event, predicate)

    def read(self, value: ValueId) -> Array:
        """Return what a value holds, read-only: float32 numbers for bfloat16."""
        array = self.bits(value)
        array = from_bits(array) if _value(value).type.dtype is DType.BFLOAT16 else array
        array.flags.writeable = False
        return array

    def bits(self, value: ValueId) -> Array:
        """Return the elements of a value as they lie; bfloat16 as uint16."""
        return self.builder.kernels.read(self.builder.stored(_value(value)))

    def dense(self, value: ValueId) -> ValueStorage:
        """Return where a value lies, or a dense copy of it."""
        its = _value(value)
        stored, kernels = self.builder.stored(its), self.builder.kernels
        is_dense = stored.form is kernels.dense(its.type)
        return stored if is_dense else kernels.store(its.type, kernels.read(stored))

    def _of_model(self, name: str, stored: ModelTensor) -> ValueId:
        cell = stored.cell
        array = cell.array if cell.lease is None else newest({name: cell}).get(name)
        if array is None and self._outermost is not None:
            initialise(self._outermost, self.seed)
            array = newest({name: cell}).get(name)
        if array is None:
            raise CompileError(
                f"{find_source()}: the {stored.kind} made at {stored.source} has no values yet:"
                " call the model, which gives all of them their first values, or set them:"
                " x.data = array"
            )
        copy = self._copies.get(name)
        if copy is None or copy[0] is not array:
            copy = self._copies[name] = array, self.builder.kernels.store(stored.type, array)
            self._leaves.pop(name, None)
        if name not in self._leaves:
            its = self._variable(name, stored.type, stored.kind, stored.init, copy[1])
            self._leaves[name] = its
        return cast("ValueId", self._leaves[name])

    def _variable(
        self, name: str, type_: TensorType, role: str, init: InitSpec, stored: ValueStorage
    ) -> EagerValue:
        attrs = {"name": name, "dtype": type_.dtype.value, "shape": type_.shape}
        its = Attrs({**attrs, "role": role, "init": init})
        return self.builder.leaf(VARIABLE, its, stored, find_source())

    def _leaf(self, op: Op, name: str, type_: TensorType, stored: ValueStorage) -> ValueId:
        attrs = Attrs({"name": name, "dtype": type_.dtype.value, "shape": type_.shape})
        return cast("ValueId", self.builder.leaf(op, attrs, stored, find_source()))

    def _settle(self) -> None:
        """Let assigned values be the state of buffers, once the call that assigned them is over.

        Gradients flow through an assignment within a call. Between calls a buffer has a value that
        nothing leads to, or what a loop over calls assigns would keep all that it was made of.
        """
        if self._depth == 0 and self._keeps_assignments:
            for name in self.assigned:
                self._leaves.pop(name, None)
            self.assigned.clear()
