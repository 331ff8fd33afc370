"""A file of ONNX, or a model in memory, as a `OnnxGraph`: read with bounds, and checked before use.

A model may come from anyone. In order: the size of the file; ONNX's own checker, without its shape
inference, which some files keep busy for ever; a walk of our own, which counts nodes, depth and the
bytes of constants; tensors that lie beside the file, from regular files inside of its folder alone.
Functions of the model are expanded with the count of nodes running. Names are labels: none becomes
part of a path.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from actorflow.onnx.program import DTYPES, TRAINING_DOMAIN, ModelPort, OnnxError, OnnxGraph, Step
from compiler.contract.errors import CompileError

if TYPE_CHECKING:
    import onnx

MOST_NODES = 200_000
DEEPEST = 24
MOST_CONSTANTS = 2 << 30
"""Bytes of constants beyond the size of the files, by default."""
OPSETS = range(1, 29)
"""Versions of the operator set that the tables know."""
HIGHEST_RANK = 32

_DOMAINS = {"": OPSETS, "ai.onnx": OPSETS, TRAINING_DOMAIN: range(1, 2)}


def onnx_package() -> Any:
    """Return the onnx package. Raises OnnxError where it is missing or too old."""
    try:
        import onnx
    except ImportError as error:
        raise OnnxError(
            "reading and writing ONNX needs the onnx package: pip install 'actorflow[onnx]'"
        ) from error
    version = tuple([int(part) for part in onnx.__version__.split(".")[:2] if part.isdigit()])
    if version < (1, 21):
        raise OnnxError(
            f"onnx {onnx.__version__} has holes in reading files; 1.21 or later is needed"
        )
    return onnx


def read(source: Any, max_bytes: int | None = None) -> tuple[OnnxGraph, int]:
    """Return a model as a block, and the most bytes that a constant may have.

    `source` is a path, the bytes of a file, or a ModelProto. Raises OnnxError.
    """
    onnx = onnx_package()
    folder, size = None, 0
    if isinstance(source, (str, Path)):
        folder, size = Path(source).parent, _size_of(Path(source))
        _check_bytes(str(source), size, max_bytes)
        model = _parsed(onnx, Path(source).read_bytes(), str(source))
    elif isinstance(source, bytes):
        size = len(source)
        _check_bytes("the model", size, max_bytes)
        model = _parsed(onnx, source, "the model")
    elif isinstance(source, onnx.ModelProto):
        model, size = source, source.ByteSize()
    else:
        raise OnnxError(f"a model is a path, bytes or a ModelProto, got {type(source).__name__}")
    most = size + MOST_CONSTANTS if max_bytes is None else max_bytes
    return _ModelReader(onnx, model, folder, most).block(), most


def _check_bytes(what: str, size: int, max_bytes: int | None) -> None:
    if max_bytes is not None and size > max_bytes:
        raise OnnxError(f"{what} has {size:,} bytes, more than max_bytes={max_bytes:,}")


def _size_of(path: Path) -> int:
    try:
        found = os.stat(path)
    except OSError as error:
        raise OnnxError(f"cannot read {str(path)!r}: {error.strerror}") from None
    if not stat.S_ISREG(found.st_mode):
        raise OnnxError(f"{str(path)!r} is no regular file")
    return found.st_size


def _parsed(onnx: Any, data: bytes, what: str) -> onnx.ModelProto:
    try:
        return onnx.load_model_from_string(data)
    except Exception as error:  # protobuf's own, of a class that depends on its version
        raise OnnxError(f"{what} is no model of ONNX: {error}") from None


@dataclass
class _ModelReader:
    """One model while it is read; `num_nodes` and `num_bytes` run over all of it."""

    onnx: Any
    model: onnx.ModelProto
    folder: Path | None
    most: int
    num_nodes: int = 0
    num_bytes: int = 0
    opsets: dict[str, int] = field(default_factory=dict)

    def block(self) -> OnnxGraph:
        """Return the graph of the model."""
        self.opsets = {o.domain: o.version for o in self.model.opset_import}
        self._functions = {(f.domain, f.name, f.overload): f for f in self.model.functions}
        self._sizes: dict[tuple[str, str, str], int] = {}
        self._num_calls = 0
        for domain, version in self.opsets.items():
            self._check_opset(domain, version)
        self._check_graph(self.model.graph, 0)
        self._check()
        return self._block(self.model.graph, {}, "")

    def _check_opset(self, domain: str, version: int) -> None:
        known = _DOMAINS.get(domain)
        if known is None:
            if domain not in {key[0] for key in self._functions}:
                raise OnnxError(f"the domain {domain!r} is not known here")
        elif version not in known:
            raise OnnxError(
                f"the model has opset {version} of the domain {domain!r}; known are"
                f" {known.start} to {known.stop - 1}"
            )

    def _check(self) -> None:
        """Let ONNX's checker judge names, order, operators and attributes; without inference."""
        if self.folder is None and any(_is_external(t) for t in _tensors(self.model.graph)):
            raise OnnxError(
                "tensors lie beside a file, and the model came without one: give a path"
            )
        bare = self.model
        if self.folder is not None:
            # The checker looks for external files from where we stand; ours are checked below.
            bare = type(self.model)()
            bare.CopyFrom(self.model)
            for tensor in _tensors(bare.graph):
                _make_internal(self.onnx, tensor)
        try:
            self.onnx.checker.check_model(bare)
        except Exception as error:  # ValidationError, and others of its C++
            raise OnnxError(f"onnx.checker: {error}") from None

    def _check_graph(self, graph: onnx.GraphProto, depth: int) -> None:
        """Count nodes and depth before anything recursive sees the graph."""
        if depth > DEEPEST:
            raise OnnxError(f"graphs are nested deeper than {DEEPEST}")
        self._count_nodes(sum([self._size_of(node, 0) for node in graph.node]))
        for tensor in graph.initializer:
            self._check_tensor(tensor)
        for node in graph.node:
            for attribute in node.attribute:
                for inner in (attribute.g, *attribute.graphs):
                    if inner.ByteSize():
                        self._check_graph(inner, depth + 1)

    def _size_of(self, node: onnx.NodeProto, depth: int) -> int:
        """Return how many nodes a node is, its function expanded: counted, before any is made."""
        key = node.domain, node.op_type, node.overload
        function = self._functions.get(key)
        if function is None:
            return 1
        if depth > DEEPEST:
            raise OnnxError(f"functions call each other deeper than {DEEPEST}, from {key[1]!r} on")
        if key not in self._sizes:
            self._sizes[key] = sum([self._size_of(each, depth + 1) for each in function.node])
        return self._sizes[key]

    def _count_nodes(self, count: int) -> None:
        self.num_nodes += count
        if self.num_nodes > MOST_NODES:
            raise OnnxError(f"the model has more than {MOST_NODES:,} nodes, its functions expanded")

    def _check_tensor(self, tensor: onnx.TensorProto) -> None:
        shape = list(tensor.dims)
        dtype = _dtype(self.onnx, tensor.data_type, f"the constant {tensor.name!r}")
        if len(shape) > HIGHEST_RANK or min(shape, default=0) < 0:
            raise OnnxError(f"the constant {tensor.name!r} has the shape {shape}")
        count = 1
        for extent in shape:
            count *= extent
        self.num_bytes += count * (2 if dtype == "bfloat16" else np.dtype(dtype).itemsize)
        if self.num_bytes > self.most:
            raise OnnxError(
                f"the constants up to {tensor.name!r} have {self.num_bytes:,} bytes, more than the"
                f" bound of {self.most:,}; give max_bytes="
            )

    # From protobuf to records.

    def _block(self, graph: onnx.GraphProto, names: Mapping[str, str], prefix: str) -> OnnxGraph:
        """Return a graph; `names` are what a function's body calls what it is given."""
        constants = {t.name: self._array(t) for t in graph.initializer}
        if len(graph.sparse_initializer):
            raise OnnxError("sparse initialisers are not known here")
        inputs = [self._port(v) for v in graph.input if v.name not in constants]
        outputs = [self._port(v) for v in graph.output]
        steps = [s for node in graph.node for s in self._steps(node, names, prefix)]
        return OnnxGraph(tuple(inputs), tuple(outputs), tuple(steps), constants)

    def _port(self, value: onnx.ValueInfoProto) -> ModelPort:
        type_ = value.type
        if not type_.HasField("tensor_type"):
            kind = type_.WhichOneof("value")
            if kind is None:  # of a body: its type follows from the call
                return ModelPort(value.name, "", None)
            raise OnnxError(f"{value.name!r} is no tensor, but a {kind}; known are tensors")
        tensor = type_.tensor_type
        if not tensor.elem_type:
            return ModelPort(value.name, "", None)
        dtype = _dtype(self.onnx, tensor.elem_type, repr(value.name))
        if not tensor.HasField("shape"):
            return ModelPort(value.name, dtype, None)
        extents: list[int | str | None] = []
        for dim in tensor.shape.dim:
            kind = dim.WhichOneof("value")
            extents.append(None if kind is None else getattr(dim, kind))
        return ModelPort(value.name, dtype, tuple(extents))

    def _steps(self, node: onnx.NodeProto, names: Mapping[str, str], prefix: str) -> Iterator[Step]:
        """Yield the steps of a node: itself, or those of the function that it calls."""
        function = self._functions.get((node.domain, node.op_type, node.overload))
        ins = tuple(
            [names.get(n, prefix + n) if n and (names or prefix) else n for n in node.input]
        )
        outs = tuple(
            [names.get(n, prefix + n) if n and (names or prefix) else n for n in node.output]
        )
        if function is None:
            domain = "" if node.domain == "ai.onnx" else node.domain
            if domain not in _DOMAINS:
                raise OnnxError(
                    f"{node.op_type} {node.name!r} is of the domain {domain!r}, not known here"
                )
            attributes = {a.name: self._attribute(a, node, names, prefix) for a in node.attribute}
            yield Step(node.op_type, domain, self._opset(domain), node.name, ins, outs, attributes)
            return
        outer = self.opsets
        self.opsets = {o.domain: o.version for o in function.opset_import}  # it has its own
        for name, version in self.opsets.items():
            self._check_opset(name, version)
        yield from self._expanded(function, node, (ins, outs), prefix)
        self.opsets = outer

    def _opset(self, domain: str) -> int:
        return self.opsets.get(domain, self.opsets.get("ai.onnx", 0) if not domain else 0)

    def _expanded(
        self,
        function: onnx.FunctionProto,
        node: onnx.NodeProto,
        ends: tuple[tuple[str, ...], tuple[str, ...]],
        prefix: str,
    ) -> Iterator[Step]:
        self._num_calls += 1
        inner = f"{prefix}{node.op_type}/{self._num_calls}/"
        given = dict(zip(function.input, ends[0], strict=False))
        names = dict.fromkeys(function.input, "") | given
        names |= dict(zip(function.output, ends[1], strict=False))
        values = {a.name: a for a in (*function.attribute_proto, *node.attribute)}
        for each in function.node:
            body = type(each)()
            body.CopyFrom(each)
            self._fill_references(body, values)
            yield from self._steps(body, names, inner)

    def _fill_references(self, node: onnx.NodeProto, values: Mapping[str, Any]) -> None:
        """Replace attributes that refer to the function's; drop those that were not given."""
        kept = []
        for attribute in node.attribute:
            if attribute.g.ByteSize():
                for below in attribute.g.node:
                    self._fill_references(below, values)
            name = attribute.ref_attr_name
            if name and name in values:
                filled = type(attribute)()
                filled.CopyFrom(values[name])
                filled.name = attribute.name
                kept.append(filled)
            elif not name:
                kept.append(attribute)
        del node.attribute[:]
        node.attribute.extend(kept)

    def _attribute(self, attribute: Any, node: Any, names: Mapping[str, str], prefix: str) -> Any:
        kinds = self.onnx.AttributeProto
        if attribute.type == kinds.GRAPH:
            if prefix:
                raise OnnxError(f"{node.op_type} {node.name!r} has a body inside of a function")
            return self._block(attribute.g, names, prefix)
        if attribute.type == kinds.TENSOR:
            return self._array(attribute.t)
        if attribute.type in (kinds.INT, kinds.FLOAT, kinds.INTS, kinds.FLOATS):
            return self.onnx.helper.get_attribute_value(attribute)
        if attribute.type == kinds.STRING:
            return attribute.s.decode("utf-8", "replace")
        if attribute.type == kinds.STRINGS:
            return [s.decode("utf-8", "replace") for s in attribute.strings]
        raise OnnxError(
            f"{node.op_type} {node.name!r} has the attribute {attribute.name!r} of a kind that is"
            " not known here"
        )

    def _array(self, tensor: onnx.TensorProto) -> np.ndarray[Any, Any]:
        dtype = _dtype(self.onnx, tensor.data_type, f"the constant {tensor.name!r}")
        if dtype == "bfloat16":
            raise OnnxError(
                f"the constant {tensor.name!r} is bfloat16, which constants and parameters cannot"
                " be: convert the model to float32, and give the job precision='bf16'"
            )
        if _is_external(tensor):
            data = _external_bytes(tensor, self.folder, np.dtype(dtype).itemsize)
            array = np.frombuffer(data, np.dtype(dtype).newbyteorder("<")).astype(dtype, copy=False)
            return array.reshape(tuple(tensor.dims))
        try:
            return np.asarray(self.onnx.numpy_helper.to_array(tensor))
        except Exception as error:  # bytes that do not fit the shape
            raise OnnxError(f"the constant {tensor.name!r}: {error}") from None


def _dtype(onnx: Any, number: int, what: str) -> str:
    if number not in DTYPES:
        named = {v: k for k, v in onnx.TensorProto.DataType.items()}.get(number, str(number))
        raise OnnxError(f"{what} has elements of type {named}, which is not known here")
    return DTYPES[number]


def _is_external(tensor: Any) -> bool:
    return bool(tensor.data_location == 1)


def _tensors(graph: Any) -> Iterator[Any]:
    """Yield all tensors of a graph, those in attributes and bodies too."""
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.t.ByteSize():
                yield attribute.t
            for inner in (attribute.g, *attribute.graphs):
                if inner.ByteSize():
                    yield from _tensors(inner)


def _make_internal(onnx: Any, tensor: Any) -> None:
    """Give a tensor that lies elsewhere the form of an empty one, for the checker."""
    if _is_external(tensor):
        tensor.ClearField("external_data")
        tensor.data_location = onnx.TensorProto.DEFAULT
        del tensor.dims[:]
        tensor.dims.append(0)
        tensor.ClearField("raw_data")


def _external_bytes(tensor: Any, folder: Path | None, itemsize: int) -> bytes:
    """Return the bytes of a tensor that lies beside the file. Raises OnnxError for all others."""
    where = f"the constant {tensor.name!r}"
    entries = {e.key: e.value for e in tensor.external_data}
    location = entries.get("location", "")

    def refuse(why: str) -> NoReturn:
        raise OnnxError(f"{where} lies in {location!r}: {why}")

    if folder is None:
        refuse("the model came without a folder; give a path")
    parts = Path(location).parts
    if not parts or Path(location).is_absolute() or ".." in parts or "\0" in location:
        refuse("a place inside of the folder of the model is expected")
    try:
        offset = int(entries.get("offset", "0"))
        length = int(entries["length"]) if "length" in entries else None
    except ValueError:
        refuse("offset and length must be integers")
    count = itemsize
    for extent in tensor.dims:
        count *= extent
    if offset < 0 or (length is not None and length != count):
        refuse(f"offset {offset} and length {length} do not fit {count:,} bytes")
    return _bytes_at(folder, parts, offset, count, refuse)


def _bytes_at(
    folder: Path, parts: tuple[str, ...], offset: int, count: int, refuse: Callable[[str], NoReturn]
) -> bytes:
    """Read bytes of a regular file below a folder; no part of the way may be a link."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    opened: list[int] = []
    try:
        opened.append(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        for part in parts[:-1]:
            opened.append(os.open(part, flags | os.O_DIRECTORY, dir_fd=opened[-1]))
        # O_NONBLOCK: a fifo would block the open.
        opened.append(os.open(parts[-1], flags | os.O_NONBLOCK, dir_fd=opened[-1]))
        found = os.fstat(opened[-1])
        if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
            refuse("a regular file with one name is expected")
        if offset + count > found.st_size:
            refuse(f"{offset + count:,} bytes are asked for, and the file has {found.st_size:,}")
        data = bytearray()
        while len(data) < count:
            piece = os.pread(opened[-1], min(count - len(data), 1 << 30), offset + len(data))
            if not piece:
                refuse("the file ended while it was read")
            data += piece
        return bytes(data)
    except OSError as error:
        refuse(error.strerror or str(error))
    finally:
        for descriptor in reversed(opened):
            os.close(descriptor)


def evaluate(step: Step, arrays: list[Any]) -> list[Any]:
    """Return what ONNX's reference evaluator makes of a step on known numbers.

    Raises OnnxError where it cannot.
    """
    onnx = onnx_package()
    from onnx.reference import ReferenceEvaluator

    helper = onnx.helper
    given = {
        key: onnx.numpy_helper.from_array(value) if isinstance(value, np.ndarray) else value
        for key, value in step.attributes.items()
    }
    names = [
        name if array is not None else "" for name, array in zip(step.inputs, arrays, strict=False)
    ]
    node = helper.make_node(step.op_type, names, list(step.outputs), domain=step.domain, **given)
    inputs = {n: a for n, a in zip(names, arrays, strict=False) if n}
    ports = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
        for n, a in inputs.items()
    ]
    outputs = [helper.make_empty_tensor_value_info(n) for n in step.outputs if n]
    graph = helper.make_graph([node], "step", ports, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid(step.domain, step.opset)])
    try:
        made = iter(ReferenceEvaluator(model).run(None, inputs))
    except CompileError:
        raise
    except Exception as error:
        raise OnnxError(f"{step}: onnx.reference: {error}") from None
    return [np.asarray(next(made)) if name else None for name in step.outputs]
