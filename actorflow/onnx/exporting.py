"""A job as a model of ONNX, from its logical graph: before any pass, and as its user wrote it.

Parameters keep their paths as names and their layouts, nodes have the paths of their modules and
the lines of the user. Axes that are free are found by traces at several sizes (extents.py). Weights
beyond `external_bytes` lie beside the file, in one of the same name with ".data".
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from actorflow.data.source import spec_of
from actorflow.environment.settings import __version__
from actorflow.jobs.job import Job
from actorflow.nn.module import Module, initialise
from actorflow.onnx import emitting
from actorflow.onnx.extents import Extent, Sizes, Symbolic, sizes_for, with_sizes
from actorflow.onnx.forms import chosen_forms
from actorflow.onnx.graph_writer import GraphWriter, Names, ports
from actorflow.onnx.program import OnnxError
from actorflow.onnx.reading import OPSETS, onnx_package
from actorflow.tensor.tracer import find_source
from compiler.contract.errors import CompileError
from compiler.contract.types import TensorType
from compiler.graph.graph import Graph, Node
from compiler.ops.primitives.body import hash_graph
from compiler.ops.primitives.sources import CONSTANT, INPUT, OF_MODEL, VARIABLE

Array = np.ndarray[Any, Any]
Axes = Mapping[str, Mapping[int, str]]

OLDEST = 17
"""The first opset with LayerNormalization."""

_SMALL = 1024
"""Bytes of a tensor that stays in the file where others lie beside it."""
_ALIGNMENT = 4096


def export(
    job: Job,
    model: Module,
    batch: Mapping[str, Array | TensorType],
    path: str | os.PathLike[str],
    *,
    opset: int = OLDEST,
    dynamic_axes: Axes | None = None,
    external_bytes: int = 1 << 30,
) -> None:
    """Write a job with `train=False` and the values of its model to a file of ONNX.

        af.onnx.export(predict, model, {"x": x}, "net.onnx", dynamic_axes={"x": {0: "batch"}})

    Inputs are the entries of the batch that the job reads, outputs what it returns.

    Args:
        job: does not train; one rank.
        model: values come from here; one without values gets the first ones of the job's seed.
        batch: an example, or the types of its entries.
        path: of the file; it is written whole, or not at all.
        opset: version of ONNX's operator set, from 17 on. Old runtimes read old ones.
        dynamic_axes: names of axes that are free, by entry and axis. Axes of one name are equal.
        external_bytes: bytes of weights above which they lie in a second file, beside the first.

    Raises OnnxError, a CompileError, naming the op and the user's line, for what ONNX has not.
    """
    if job.options.train or job.options.mesh is not None:
        raise OnnxError(
            f"{find_source()}: export takes a job with train=False on one rank: a training job"
            " drops and normalises as in training; write af.job(train=False)(function)"
        )
    if opset not in OPSETS or opset < OLDEST:
        raise OnnxError(
            f"{find_source()}: export knows the opsets {OLDEST} to {OPSETS.stop - 1}, got {opset!r}"
        )
    initialise(model, job.options.effective_seed)
    graph = _traced(job, model, batch, dynamic_axes or {})
    proto, weights = _Export(graph, model, opset, dynamic_axes or {}).proto(job.name)
    _write(proto, weights, Path(path), external_bytes)


def _traced(job: Job, model: Module, batch: Mapping[str, Any], axes: Axes) -> Symbolic:
    """Return the graph of a job at the sizes of the batch, or at several of the free axes."""
    spec = {
        name: value if isinstance(value, TensorType) else spec_of({name: value})[name]
        for name, value in batch.items()
    }
    examples: dict[str, int] = {}
    for name, named in axes.items():
        if name not in spec or not all(0 <= axis < spec[name].rank for axis in named):
            raise OnnxError(
                f"{find_source()}: dynamic_axes names axes {list(named)} of {name!r}; the batch has"
                f" {', '.join(f'{n!r}: {t}' for n, t in spec.items())}"
            )
        for axis, symbol in named.items():
            examples[symbol] = max(examples.get(symbol, 0), spec[name].shape[axis])

    def traced(types: Any) -> Graph:
        # By a job of its own: the traces of the user's are counted, and say why they change.
        return Job(job.function, job.options).graph(model, types)

    if not examples:
        return Symbolic([traced(spec)], Sizes((), ({},)))
    sizes, graphs = sizes_for(examples), []
    for at in sizes.traces:
        try:
            graphs.append(traced(with_sizes(spec, axes, at)))
        except CompileError as error:
            raise OnnxError(f"with the free axes at {dict(at)}: {error}") from error
    return Symbolic(graphs, sizes)


class _Export:
    """One model while it is written."""

    def __init__(self, graph: Symbolic, model: Module, opset: int, axes: Axes) -> None:
        self._graph = graph
        self._opset = opset
        self._axes = axes
        self._state = model.state()
        self._weights: dict[str, Array] = {}
        nodes = graph.graph.nodes
        own = [str(n.attrs["name"]) for n in nodes if n.op in (INPUT, VARIABLE)]
        outputs = [output.name for output in graph.graph.outputs]
        for name in outputs:
            if name in own:
                raise OnnxError(
                    f"the output {name!r} has the name of an input or parameter, and names of"
                    " ONNX are of one space; rename the output of the job"
                )
        self._writer = GraphWriter(Names([*own, *outputs]))

    def proto(self, name: str) -> tuple[Any, dict[str, Array]]:
        """Return the model without its weights, and these by name."""
        graph, writer, helper = self._graph.graph, self._writer, onnx_package().helper
        if graph.writes:
            written = [graph.nodes[graph.producers()[w.variable]] for w in graph.writes]
            node = next((n for n in written if n.attrs["role"] in OF_MODEL), None)
            if node is None:
                _refuse_draws(written[0])
            raise OnnxError(
                f"{node.source}: the job assigns {node.attrs['name']!r}, and a model of ONNX has no"
                " state; return the new value as an output, and take the old one from the batch"
            )
        names = self._emit(self._graph, writer, {})
        outputs = self._named_outputs(names)
        inputs = self._inputs()
        made = {o for node in writer.nodes for o in node.output} - {*outputs}
        known = {at: self._port(v) for v, at in names.items() if at in made}
        proto = helper.make_model(
            helper.make_graph(
                writer.nodes, name, ports(inputs), ports(outputs), value_info=ports(known)
            ),
            opset_imports=[helper.make_opsetid("", self._opset)],
            producer_name="actorflow",
            producer_version=__version__,
        )
        proto.ir_version = max(8, helper.find_min_ir_version_for(proto.opset_import))
        helper.set_model_props(proto, {"actorflow.graph": hash_graph(graph)})
        return proto, {**self._weights, **writer.constants}

    def _port(self, value: int) -> tuple[str, list[int | str | None]]:
        shape = self._graph.shape(value)
        dims = [extent if isinstance(extent, int) else _symbol(extent) for extent in shape]
        return self._graph.graph.types[value].dtype.value, dims

    def _inputs(self) -> dict[str, Any]:
        nodes = [node for node in self._graph.graph.nodes if node.op is INPUT]
        return {str(node.attrs["name"]): self._port(node.outputs[0]) for node in nodes}

    def _named_outputs(self, names: dict[int, str]) -> dict[str, Any]:
        """Let outputs have their names; return their types."""
        writer, found = self._writer, dict[str, Any]()
        renamed: dict[str, str] = {}
        made = {o for node in writer.nodes for o in node.output}
        for output in self._graph.graph.outputs:
            value = names[output.value]
            found[output.name] = self._port(output.value)
            if value in made and value not in renamed:
                renamed[value] = output.name
            else:
                writer.scope, writer.source = "", ""
                copy = writer.add("Identity", [renamed.get(value, value)])
                renamed[copy] = output.name
        names.update({value: renamed.get(name, name) for value, name in names.items()})
        _rename(writer.nodes, renamed)
        return found

    # Nodes.

    def _emit(self, graph: Symbolic, writer: GraphWriter, names: dict[int, str]) -> dict[int, str]:
        """Append the nodes of a graph; return the names of its values."""
        forms = chosen_forms(graph.graph, [output.value for output in graph.graph.outputs])
        for place, node in enumerate(graph.graph.nodes):
            if node.outputs[0] in names or (place not in forms and node.op is not INPUT):
                continue
            writer.scope, writer.source = node.scope, str(node.source)
            form = forms.get(place)
            if node.op in (INPUT, VARIABLE, CONSTANT):
                self._emit_source(graph, place, writer, names)
            elif form is None:
                self._emit_node(graph, place, writer, names)
            else:
                at = self._call(graph, form.place, writer, names, form.inputs)
                names[node.outputs[0]] = emitting.FORMS[form.op_type](at, form)
        return names

    def _emit_source(
        self, graph: Symbolic, place: int, writer: GraphWriter, names: dict[int, str]
    ) -> None:
        node = graph.graph.nodes[place]
        value = node.outputs[0]
        if node.op is CONSTANT:
            names[value] = self._constant(graph, place, writer)
            return
        name = names[value] = str(node.attrs["name"])
        if node.op is INPUT:
            for axis, symbol in self._axes.get(name, {}).items():
                if symbol not in writer.sizes:
                    writer.name_size(symbol, name, axis)
            return
        graph.check_same(place, ())
        if node.attrs["role"] not in OF_MODEL:
            _refuse_draws(node)
        self._weights[name] = self._state[name]

    def _constant(self, graph: Symbolic, place: int, writer: GraphWriter) -> str:
        node = graph.graph.nodes[place]
        dtype = graph.graph.types[node.outputs[0]].dtype.value
        shape = graph.shape(node.outputs[0])
        data = np.frombuffer(_data(node), dtype)
        if all(isinstance(extent, int) for extent in shape):
            graph.check_same(place, ())
            return writer.constant(data.reshape(graph.graph.types[node.outputs[0]].shape))
        # One number as often as a free axis says is a number that is repeated.
        every = [np.frombuffer(_data(other), dtype) for other in graph.node_in_each(place)]
        if not all((numbers == data[0]).all() for numbers in every):
            raise OnnxError(
                f"{node.source}: a constant of numbers has an extent of the free axes, so that its"
                " numbers at other sizes are not known; compute it from the batch, or export"
                " without these dynamic_axes"
            )
        return str(writer.add("Expand", [writer.constant(data[0]), writer.vector(shape)]))

    def _emit_node(
        self, graph: Symbolic, place: int, writer: GraphWriter, names: dict[int, str]
    ) -> None:
        node = graph.graph.nodes[place]
        at = self._call(graph, place, writer, names, node.inputs)
        emit = emitting.EMITTERS.get(node.op.name)
        if emit is None:
            at.refuse("this op is not written to ONNX")
        made = emit(at)
        results = made if isinstance(made, list) else [made]
        names.update(zip(node.outputs, results, strict=False))

    def _call(
        self,
        graph: Symbolic,
        place: int,
        writer: GraphWriter,
        names: dict[int, str],
        inputs: tuple[int, ...],
    ) -> emitting.NodeCall:
        node = graph.graph.nodes[place]
        graph.check_same(place, emitting.READ_AS_EXTENTS)
        for value in inputs:
            if not names.get(value):
                raise OnnxError(f"{node.source}: {node.op} reads a result that is not written")
        given = [names[v] for v in inputs]
        return emitting.NodeCall(graph, place, node, given, writer, self._opset, self._body)

    def _body(self, graph: Symbolic, writer: GraphWriter, operands: list[str]) -> list[str]:
        """Write a body whose operands have names; return those of its results."""
        values = [n.outputs[0] for n in graph.graph.nodes if n.op is INPUT]
        names = self._emit(graph, writer, dict(zip(values, operands, strict=True)))
        return [names[output.value] for output in graph.graph.outputs]


def _refuse_draws(counter: Node) -> NoReturn:
    raise OnnxError(
        f"{counter.source}: the job draws random numbers, and no operator of ONNX draws the same"
        " ones; draw them outside, as an entry of the batch"
    )


def _data(node: Node) -> bytes:
    data = node.attrs["data"]
    return data if isinstance(data, bytes) else b""


def _symbol(extent: Extent) -> str | None:
    """Return the name of an extent: of a free axis that is as it is, else none."""
    if isinstance(extent, int) or extent.offset or extent.coefficient != 1:
        return None
    return extent.powers[0][0] if [power for _, power in extent.powers] == [1] else None


def _rename(nodes: list[Any], renamed: Mapping[str, str]) -> None:
    for node in nodes:
        node.input[:] = [renamed.get(name, name) for name in node.input]
        node.output[:] = [renamed.get(name, name) for name in node.output]
        for attribute in node.attribute:
            if attribute.HasField("g"):
                _rename(list(attribute.g.node), renamed)


# Files.


def _write(proto: Any, weights: Mapping[str, Array], path: Path, external_bytes: int) -> None:
    """Write a model, and its weights beside it where they are many; each file whole or not."""
    onnx = onnx_package()
    is_apart = sum(array.nbytes for array in weights.values()) > external_bytes
    outside = [n for n, a in weights.items() if is_apart and a.nbytes >= _SMALL]
    offset = 0
    for name, array in weights.items():
        if name not in outside:
            proto.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
            continue
        tensor = proto.graph.initializer.add()
        tensor.name = name
        tensor.data_type = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
        tensor.dims.extend(array.shape)
        tensor.data_location = onnx.TensorProto.EXTERNAL
        offset = -(-offset // _ALIGNMENT) * _ALIGNMENT
        given = {"location": f"{path.name}.data", "offset": offset, "length": array.nbytes}
        for key, value in given.items():
            entry = tensor.external_data.add()
            entry.key, entry.value = key, str(value)
        offset += array.nbytes
    if outside:
        _replace(path.with_name(f"{path.name}.data"), [weights[name] for name in outside])
    _replace(path, [np.frombuffer(proto.SerializeToString(), np.uint8)])


def _replace(path: Path, parts: list[Array]) -> None:
    """Write parts, each at a multiple of the alignment, under another name; then rename."""
    part_path = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part_path.open("wb") as file:
            for part in parts:
                file.seek(-(-file.tell() // _ALIGNMENT) * _ALIGNMENT)
                file.write(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data)
            file.flush()
            os.fsync(file.fileno())
        part_path.replace(path)
    except OSError as error:
        part_path.unlink(missing_ok=True)
        raise OnnxError(f"cannot write {str(path)!r}: {error.strerror}") from error
