"""Graphs walked by the ops' references, gradients by the rules, slopes by differences."""

import numpy as np

from compiler.graph.graph import gradient
from compiler.graph.registry import reference
from compiler.ops.families.arithmetic import ADD
from compiler.ops.primitives.sources import INPUT, VARIABLE


def fed(b, arrays):
    """Return inputs of a graph under construction for some arrays, named "0", "1", and so on."""
    return [
        b.emit_one(INPUT, name=str(i), dtype=str(a.dtype), shape=a.shape)
        for i, a in enumerate(arrays)
    ]


def walked(nodes, known):
    """Return what the values of some nodes are; inputs and variables are known by value or name."""
    values = dict(known)
    for node in nodes:
        if node.op in (INPUT, VARIABLE):
            (value,) = node.outputs
            values[value] = (
                values[value] if value in values else np.asarray(known[node.attrs["name"]])
            )
        else:
            outputs = reference.get(node.op)(node.attrs, *[values[v] for v in node.inputs])
            values.update(zip(node.outputs, outputs, strict=True))
    return values


def pull(b, nodes, grads):
    """Return the gradients of all values, by the rules alone, from those of some; emits nodes."""
    grads = dict(grads)
    for node in reversed(nodes):
        flowing = tuple([grads.get(v) for v in node.outputs])
        if not node.inputs or all(g is None for g in flowing):
            continue
        for value, grad in zip(node.inputs, gradient.get(node.op)(b, node, flowing), strict=True):
            if grad is not None:
                assert b.type_of(grad) == b.type_of(value), node.op
                grads[value] = b.emit_one(ADD, grads[value], grad) if value in grads else grad
    return grads


def slopes(objective, arrays):
    """Yield (index, slopes) of every float64 array: central differences of a number of them all."""
    for index, array in enumerate(arrays):
        if array.dtype != np.float64:
            continue
        slope = np.zeros(array.shape)
        for place in np.ndindex(array.shape):
            sides = []
            for step in (1e-6, -1e-6):
                moved = [np.array(a) for a in arrays]
                moved[index][place] += step
                sides.append(objective(moved))
            slope[place] = (sides[0] - sides[1]) / 2e-6
        yield index, slope
