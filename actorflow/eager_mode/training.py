"""A training step, op by op: the passes of a plan give its gradients and updates.

The function runs eagerly, and the records that lead to its losses are the graph that the passes
take. What they add is computed from the values that there are: first gradients, clipped, then all
that writes a variable. Nothing is written in place: a step that fails has changed nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from actorflow.callbacks.protocol import Metrics
from actorflow.data import spec_of
from actorflow.eager_mode.eager_trace import Copies, EagerTrace
from actorflow.eager_mode.launches import ValueStorage
from actorflow.eager_mode.region import arrays_of, counters, open_trace
from actorflow.eager_mode.tape import Tape, evaluate
from actorflow.eager_mode.values import EagerValue
from actorflow.metrics.totals import Outputs, columns_of
from actorflow.nn.lease import lease, make_claim
from actorflow.nn.module import ByIdentity, Module, initialise
from actorflow.options.job_options import JobOptions
from actorflow.tensor.literals import dtype_named
from actorflow.tensor.tracer import find_source, recording
from actorflow.trace.job_graph import Function, add_step
from actorflow.trace.traces import ModelSignature
from compiler.contract.errors import CompileError
from compiler.contract.placement import HOST, Device
from compiler.contract.types import TensorType, ValueId
from compiler.graph.graph import Graph, GraphBuilder, Node, Write, mark_needed
from compiler.graph.target import CompileOptions
from compiler.ops.primitives.sources import INPUT, VARIABLE
from compiler.passes.autodiff import clip_gradients, differentiate, follow_updates, stage_updates

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class EagerJob:
    """What a step is of: a job's name, function and options."""

    name: str
    function: Function
    options: JobOptions

    def checked(self, devices: tuple[Device, ...], batch: Mapping[str, Any]) -> dict[str, Array]:
        """Return the arrays of a batch. Raises CompileError for what no eager step does yet."""
        self._check(devices)
        arrays = arrays_of(batch)
        spec_of(arrays, f"{find_source()}: eager_step of job {self.name!r}")
        return arrays

    def opened(self, model: Module, models: ByIdentity[Any]) -> EagerModel:
        """Return the model as it is stepped eagerly, in the place of a plan that is open for it."""
        opened = models.get(model)
        if isinstance(opened, EagerModel):
            return opened
        left = {} if opened is None else opened.close()
        models.pop(model)
        eager = EagerModel(self, model, left)
        models.set(model, eager)
        return eager

    def _check(self, devices: tuple[Device, ...]) -> None:
        options = self.options
        allowed = {
            f"has mesh={options.mesh}, expected one rank": not options.has_ranks,
            f"is for {', '.join(map(str, devices))}, expected the host": devices == (HOST,),
            f"has precision={options.precision!r}, expected 'fp32'": options.precision == "fp32",
            f"has accumulate={options.accumulate}, expected 1": options.accumulate == 1,
        }
        for what, is_allowed in allowed.items():
            if not is_allowed:
                raise CompileError(
                    f"{find_source()}: job {self.name!r} cannot be stepped eagerly: it {what}; call"
                    " step, or step a job of the same function with other options"
                )


class EagerModel:
    """A model that a job steps eagerly: the state of the optimizer, and copies of the values.

    It stands where the open plan of `step` stands. `left` is what that has left, by name.
    """

    def __init__(self, job: EagerJob, model: Module, left: Mapping[str, Array]) -> None:
        self._job = job
        self._model = weakref.ref(model)
        stored = dict(model.named_stored())
        # No graph is this one's: `step` opens a plan, which goes on with the state that is left.
        self.signature = ModelSignature((), "eager", stored, object())
        self._left = {name: array for name, array in left.items() if name not in stored}
        self._state: dict[str, ValueStorage] = {}
        self._copies: Copies = {}
        # Reads where values lie; set with the first of them.
        self._read: Callable[[ValueStorage], Array] = lambda stored: np.empty(0)

    def select(self, stamp: object) -> bool:
        """Return that there is no plan of a reading."""
        return False

    def take_up(self, now: ModelSignature) -> bool:
        """Return that there is no plan of a graph."""
        return False

    def announce(self, batch: Mapping[str, Array]) -> None:
        """Tell nobody: no other rank steps eagerly."""

    def step(self, batches: Sequence[Mapping[str, Array]]) -> Metrics:
        """Run one step on its one batch and return its outputs."""
        (batch,) = batches
        model = cast("Module", self._model())
        self._follow(model)
        what, options = f"eager_step of job {self._job.name!r}", self._job.options
        held = lease(model.cells(), make_claim(model.cells(), what)) if options.train else None
        written: dict[str, Array] | None = None
        try:
            initialise(model, options.effective_seed)
            trace = self._open(model, batch)
            with recording(trace):
                add_step(trace, self._job.name, self._job.function, options, model)
                outputs, news = _EagerStep(trace, options).run()
            computed = {name: _metric(trace.read(value)) for name, value in outputs.items()}
            metrics = Outputs(computed, columns_of(computed))
            written = self._take(trace, news)
        finally:
            if held is not None:
                held.end(written)
        if held is None and written:
            claim = make_claim(model.cells(), what, frozenset(written))
            lease(model.cells(), claim).end(written)
        return metrics

    def variables(self) -> dict[str, Array]:
        """Return the state by name: read-only copies."""
        stored = self._state | {n: copy for n, (_, copy) in self._copies.items()}
        arrays = {name: np.array(self._read(one)) for name, one in stored.items()}
        return {**self._left, **arrays}

    def close(self) -> dict[str, Array]:
        """Return all variables as they were left; the model has its own."""
        return self.variables()

    def _open(self, model: Module, batch: Mapping[str, Array]) -> EagerTrace:
        options = self._job.options
        trace = open_trace(
            batch,
            model,
            HOST,
            deterministic=options.deterministic,
            is_training=options.train,
            keeps_assignments=False,
            state=dict(self._state),
            seed=options.effective_seed,
            copies=self._copies,
        )
        store, self._read = trace.builder.kernels.store, trace.builder.kernels.read
        if not self._state:
            self._state = counters(store, options.effective_seed, 0)
            trace.state |= self._state
        for name, array in self._left.items():
            type_ = TensorType(dtype_named(array.dtype, "a variable of dtype"), array.shape)
            trace.state[name] = self._state[name] = store(type_, array)
        self._left = {}
        return trace

    def _take(self, trace: EagerTrace, news: dict[str, ValueId]) -> dict[str, Array]:
        """Keep what a step has written; return the values of the model among it, read-only."""
        parameters = self.signature.parameters
        state = {name: trace.dense(value) for name, value in news.items()}
        written: dict[str, Array] = {}
        for name in state.keys() & parameters.keys():
            array = np.array(self._read(state[name]))
            array.flags.writeable = False
            written[name] = array
        copies = {name: (array, state.pop(name)) for name, array in written.items()}
        self._copies |= copies
        self._state = {**trace.state, **state}
        return written

    def _follow(self, model: Module) -> None:
        """Drop the state of parameters that are others now."""
        now, before = dict(model.named_stored()), self.signature.parameters
        gone = [path for path, stored in before.items() if now.get(path) is not stored]
        for table in (self._state, self._left, self._copies):
            for name in [n for n in table if n in gone or n.partition("/")[2] in gone]:
                del table[name]
        self.signature = replace(self.signature, parameters=now)


def _metric(array: Array) -> Any:
    return np.array(array) if array.ndim else array.item()


class _EagerStep:
    """The end of a step, in a trace whose builder has its outputs, updates and writes."""

    def __init__(self, trace: EagerTrace, options: JobOptions) -> None:
        self._trace = trace
        self._tape = Tape(_roots(trace.builder))
        norm, value = options.clip_norm or 0.0, options.clip_value or 0.0
        self._options = CompileOptions("eager", clip_norm=norm, clip_value=value)

    def run(self) -> tuple[dict[str, ValueId], dict[str, ValueId]]:
        """Compute the rest. Return the outputs, and what variables are written, by name."""
        graph = clip_gradients(differentiate(self._graph()), self._options)
        writers = [node for node in graph.nodes if node.writes]
        made = {value for node in writers for value in node.outputs}
        read = [value for node in writers for value in node.inputs if value not in made]
        # No gradient flows through an integer, so its record is no node: it is computed already.
        counts = [write for write in graph.writes if write.value not in made]
        ends = [output.value for output in graph.outputs] + [write.value for write in counts]
        wanted = list(dict.fromkeys([*read, *ends]))
        values = self._computed(graph, wanted)
        outputs = {o.name: cast("ValueId", values[o.value]) for o in graph.outputs}
        news = {_variable(graph, w): cast("ValueId", values[w.value]) for w in counts}
        writes = [write for write in graph.writes if write.value in made]
        return outputs, news | self._written(replace(graph, writes=tuple(writes)), writers, values)

    def _graph(self) -> Graph:
        """Return what the trace has as a graph, with the ids of the tape."""
        b, its, ids = self._tape.builder, self._trace.builder, self._tape.ids

        def new(value: ValueId) -> ValueId:
            return ids[cast("EagerValue", value)]

        b.outputs = [replace(output, value=new(output.value)) for output in its.outputs]
        b.writes = [Write(new(w.variable), new(w.value)) for w in its.writes]
        b.updates = [
            replace(
                rule,
                variable=new(rule.variable),
                state=tuple([new(value) for value in rule.state]),
                scalars=tuple([new(value) for value in rule.scalars]),
                objective=None if rule.objective is None else new(rule.objective),
            )
            for rule in its.updates
        ]
        return b.freeze()

    def _computed(self, graph: Graph, wanted: Sequence[ValueId]) -> dict[ValueId, EagerValue]:
        """Compute gradients and whatever else updates read."""
        known = self._tape.values
        marks = mark_needed(graph, wanted)
        nodes = [
            node
            for node, is_needed in zip(graph.nodes, marks, strict=True)
            if is_needed and not node.writes and not set(node.outputs) <= known.keys()
        ]
        made = evaluate(known, nodes, wanted, self._trace.builder.compute, ends=True)
        return dict(zip(wanted, made, strict=True))

    def _written(
        self, graph: Graph, writers: list[Node], values: dict[ValueId, EagerValue]
    ) -> dict[str, ValueId]:
        """Compute what variables become, by their names."""
        b, new_id = GraphBuilder(), dict[ValueId, ValueId]()
        known: dict[str, EagerValue] = {}
        producers = graph.producers()
        for node in writers:
            for value in node.inputs:
                if value not in new_id:
                    maker = graph.nodes[producers[value]]
                    new_id[value] = self._source(b, maker, values[value])
                    known[b.producer_of(new_id[value]).attrs.str_("name")] = values[value]
            types = [graph.types[value] for value in node.outputs]
            outputs = b.copy(node, tuple([new_id[v] for v in node.inputs]), types)
            new_id.update(zip(node.outputs, outputs, strict=True))
        b.writes = [Write(new_id[w.variable], new_id[w.value]) for w in graph.writes]
        ends = follow_updates(stage_updates(b.freeze()))
        sources = {
            node.outputs[0]: known[node.attrs.str_("name")]
            for node in ends.nodes
            if node.op in (INPUT, VARIABLE)
        }
        nodes = [node for node in ends.nodes if node.op not in (INPUT, VARIABLE)]
        wanted = [write.value for write in ends.writes]
        made = evaluate(sources, nodes, wanted, self._trace.builder.compute, ends=True)
        names = [_variable(ends, write) for write in ends.writes]
        return dict(zip(names, cast("list[ValueId]", made), strict=True))

    def _source(self, b: GraphBuilder, maker: Node, value: EagerValue) -> ValueId:
        """Emit what stands for a value: the variable that it is, or an input."""
        with b.like_node(maker):
            if maker.op is VARIABLE:
                return b.emit(VARIABLE, (), maker.attrs)[0]
            name = f"value {int(value)}"
            type_ = value.type
            return b.emit_one(INPUT, name=name, dtype=type_.dtype.value, shape=type_.shape)


def _variable(graph: Graph, write: Write) -> str:
    """Return the name of the variable that is written."""
    return graph.nodes[graph.producers()[write.variable]].attrs.str_("name")


def _roots(b: GraphBuilder) -> list[EagerValue]:
    """Return all values that a step's outputs, updates and writes name."""
    values = [output.value for output in b.outputs]
    values += [value for write in b.writes for value in (write.variable, write.value)]
    for rule in b.updates:
        values += [rule.variable, *rule.state, *rule.scalars]
        values += [] if rule.objective is None else [rule.objective]
    return cast("list[EagerValue]", values)
