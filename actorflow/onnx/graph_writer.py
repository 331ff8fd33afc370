"""Nodes, constants and names of a graph of ONNX while it is written.

All names of a model, those of bodies too, are one name space. A node is named by its module's path
and its operator, "blocks.0.attn/MatMul_12", so that viewers group by module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from actorflow.onnx.extents import Extent, Monomial
from actorflow.onnx.reading import onnx_package

Array = np.ndarray[Any, Any]


class Names:
    """Names that are taken, and the numbers of those that are made."""

    def __init__(self, taken: Sequence[str]) -> None:
        self.taken = {*taken}
        self._number = 0

    def new(self, base: str) -> str:
        """Return a name that nothing has."""
        self._number += 1
        name = f"{base}_{self._number}"
        while name in self.taken:
            name += "_"
        self.taken.add(name)
        return name


class GraphWriter:
    """One graph, or the body of a loop or branch inside of `outer`, whose values it may read."""

    def __init__(self, names: Names, outer: GraphWriter | None = None) -> None:
        self.names = names
        self.outer = outer
        self.nodes: list[Any] = []
        self.constants: dict[str, Array] = {}
        self.scope, self.source = "", ""
        self._known: dict[tuple[str, tuple[int, ...], bytes], str] = {}
        self.sizes: dict[str, str] = {}
        self._extents: dict[Monomial, str] = {}
        self.top: GraphWriter = self if outer is None else outer.top

    def add(self, op_type: str, inputs: Sequence[str], count: int = 1, **attributes: Any) -> Any:
        """Append a node; return the name of its output, or a list of names."""
        base = f"{self.scope}/{op_type}" if self.scope else op_type
        name = self.names.new(base)
        outputs = [f"{name}_output_{i}" for i in range(count)]
        self.names.taken.update(outputs)
        given = {key: value for key, value in attributes.items() if value is not None}
        node = onnx_package().helper.make_node(op_type, list(inputs), outputs, name, **given)
        node.doc_string = self.source
        self.nodes.append(node)
        return outputs[0] if count == 1 else outputs

    def constant(self, array: Array) -> str:
        """Return the name of a constant; equal ones are one, at the top of the model."""
        top = self.top
        key = str(array.dtype), array.shape, array.tobytes()
        if key not in top._known:
            top._known[key] = self.names.new("constant")
            top.constants[top._known[key]] = array
        return top._known[key]

    def number(self, value: float, dtype: str) -> str:
        """Return the name of a scalar."""
        return self.constant(np.asarray(value, dtype))

    def axes(self, *numbers: int) -> str:
        """Return the name of a vector of int64."""
        return self.constant(np.asarray(numbers, np.int64))

    # Extents that depend on named axes are values of shape [1].

    def name_size(self, symbol: str, of: str, axis: int) -> None:
        """Let a named extent be that of an axis of an input."""
        shape = self.add("Shape", [of])
        self.sizes[symbol] = self.add("Gather", [shape, self.axes(axis)], axis=0)

    def extent(self, extent: Extent) -> str:
        """Return the name of an extent, a vector of one."""
        if isinstance(extent, int):
            return self.axes(extent)
        top = self.top
        if extent in top._extents:
            return top._extents[extent]
        scope, top.scope = top.scope, ""
        product = ""
        for symbol, power in extent.powers:
            for _ in range(power):
                size = top.sizes[symbol]
                product = top.add("Mul", [product, size]) if product else size
        if extent.coefficient != 1:
            product = top.add("Mul", [product, self.axes(extent.coefficient)])
        if extent.offset:
            product = top.add("Add", [product, self.axes(extent.offset)])
        top.scope = scope
        top._extents[extent] = product
        return product

    def vector(self, extents: Sequence[Extent]) -> str:
        """Return the name of several extents as one vector."""
        numbers = [e for e in extents if isinstance(e, int)]
        if len(numbers) == len(extents):
            return self.axes(*numbers)
        if len(extents) == 1:
            return self.extent(extents[0])
        return str(self.add("Concat", [self.extent(e) for e in extents], axis=0))

    def scalar(self, extent: Extent) -> str:
        """Return the name of an extent without axes."""
        if isinstance(extent, int):
            return self.number(extent, "int64")
        return str(self.add("Squeeze", [self.extent(extent), self.axes(0)]))

    def reshape(self, x: str, shape: Sequence[Extent]) -> str:
        """Append a Reshape; one extent that depends on named axes becomes -1."""
        moving = [i for i, e in enumerate(shape) if not isinstance(e, int)]
        has_none = any(e == 0 for e in shape)
        if len(moving) == 1 and not has_none:
            shape = [-1 if i in moving else e for i, e in enumerate(shape)]
        return str(self.add("Reshape", [x, self.vector(shape)], allowzero=1 if has_none else None))


def ports(types: Mapping[str, tuple[str, Sequence[int | str | None]]]) -> list[Any]:
    """Return the protos of values with dtypes and shapes."""
    helper = onnx_package().helper
    return [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), shape)
        for name, (dtype, shape) in types.items()
    ]
