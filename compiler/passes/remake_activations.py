"""Make the output of an activation again in the launch of its gradient.

    y = gelu(x) ... dx = gelu_grad(dy, x)  ->  y = gelu(x) ... dx, y' = gelu_grad_output(dy, x)

wherever the backward pass reads y, as the gradient of the weight behind an activation does. Those
readers read y' and y dies in the forward pass: of the two tensors that an activation kept until the
backward pass, x alone is left. The gradient computes nearly all of y anyway; y' costs it two cheap
steps in cache, and no bytes where dx lies over dy and y' over x.

A reader that the gradient itself needs must have y before it, so such an activation stays as it
is; and so does one whose output is an output of the job, for that lives on in any case.

Nodes move as little as an order needs: the readers, and what needs them, behind the gradient.

Guarantees: every value has the bits that it had; where an activation is rewritten, no node of the
backward pass reads what its forward node made; no unused node is left.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from compiler.graph import Graph, Node
from compiler.lowering.storage import Storage, assign_storage
from compiler.ops.activation import (
    GELU,
    GELU_GRAD,
    GELU_GRAD_OUTPUT,
    SILU,
    SILU_GRAD,
    SILU_GRAD_OUTPUT,
)
from compiler.prune import prune
from compiler.registry import Op
from compiler.types import Phase, TensorType, ValueId

_GRADIENT = {GELU: GELU_GRAD, SILU: SILU_GRAD}
"""The gradients that read x and not y."""

_WITH_OUTPUT = {GELU_GRAD: GELU_GRAD_OUTPUT, SILU_GRAD: SILU_GRAD_OUTPUT}


@dataclass(frozen=True, slots=True)
class _Kept:
    """An output that the backward pass reads, by indices of nodes.

    `readers` read it or one of `views` on it; each of `gradients` could make it again. They are
    several where equal activations became one, behind which their gradients differ.
    """

    output: ValueId
    gradients: tuple[int, ...]
    views: tuple[int, ...]
    readers: tuple[int, ...]


@dataclass(slots=True)
class _Draft:
    """A graph while it changes; `order` holds indices into `nodes`, `place` is its inverse.

    `views` are, per gradient, the views on what it makes again: they stand right behind it.
    """

    nodes: list[Node]
    types: list[TensorType]
    producers: list[int]
    order: list[int]
    place: list[int]
    views: dict[int, list[Node]]


def run(graph: Graph) -> Graph:
    """Return the graph with fewer activations that live until the backward pass.

    O(nodes), and per activation the nodes that stand between its first reader and its gradient.
    """
    kept = _kept_outputs(graph)
    if not kept:
        return graph
    places = range(len(graph.nodes))
    draft = _Draft(
        list(graph.nodes), list(graph.types), [*graph.producers()], [*places], [*places], {}
    )
    for activation in kept:
        for gradient in activation.gradients:
            if _moved_behind(draft, activation.readers, gradient):
                _remake(draft, activation, gradient)
                break
    nodes = [node for i in draft.order for node in (draft.nodes[i], *draft.views.get(i, ()))]
    return prune(replace(graph, nodes=tuple(nodes), types=tuple(draft.types)))


def _kept_outputs(graph: Graph) -> tuple[_Kept, ...]:
    gradients: dict[tuple[Op, ValueId], list[int]] = {}
    for index, node in enumerate(graph.nodes):
        if node.op in _WITH_OUTPUT:
            gradients.setdefault((node.op, node.inputs[1]), []).append(index)
    if not gradients:
        return ()
    storage = assign_storage(graph)
    owned = {storage.root[v] for v in graph.roots()}
    views, readers = _shown(graph, storage)
    kept = []
    for node in graph.nodes:
        if node.op not in _GRADIENT or node.outputs[0] in owned:
            continue
        makers = gradients.get((_GRADIENT[node.op], node.inputs[0]), ())
        late = readers.get(node.outputs[0], ())
        if makers and late:
            shown = views.get(node.outputs[0], ())
            kept.append(_Kept(node.outputs[0], tuple(makers), tuple(shown), tuple(late)))
    return tuple(kept)


def _shown(
    graph: Graph, storage: Storage
) -> tuple[dict[ValueId, list[int]], dict[ValueId, list[int]]]:
    """Return, per activation's output, the views on it and its readers behind the forward pass."""
    outputs = {node.outputs[0] for node in graph.nodes if node.op in _GRADIENT}
    views: dict[ValueId, list[int]] = {}
    readers: dict[ValueId, list[int]] = {}
    for index, node in enumerate(graph.nodes):
        for root in dict.fromkeys([storage.root[v] for v in node.inputs]):
            if root not in outputs:
                continue
            if not storage.is_launch[index]:
                views.setdefault(root, []).append(index)
            elif node.phase is not Phase.FORWARD:
                readers.setdefault(root, []).append(index)
    return views, readers


def _moved_behind(draft: _Draft, readers: tuple[int, ...], gradient: int) -> bool:
    """Put the readers, and what needs them, behind the gradient, unless it needs them itself."""
    first = min([draft.place[reader] for reader in readers])
    last = draft.place[gradient]
    waits = set(readers)
    before: list[int] = []
    behind: list[int] = []
    for index in draft.order[first : last + 1]:
        if index in waits or any([draft.producers[v] in waits for v in draft.nodes[index].inputs]):
            waits.add(index)
            behind.append(index)
        else:
            before.append(index)
    if gradient in waits:
        return False
    draft.order[first : last + 1] = [*before, *behind]
    for place, index in enumerate([*before, *behind], first):
        draft.place[index] = place
    return True


def _remake(draft: _Draft, kept: _Kept, gradient: int) -> None:
    """Let the gradient make the output too, and the readers read that one."""
    node = draft.nodes[gradient]
    again = {kept.output: _new_value(draft, kept.output, gradient)}
    outputs = (*node.outputs, again[kept.output])
    draft.nodes[gradient] = replace(node, op=_WITH_OUTPUT[node.op], outputs=outputs)
    draft.views[gradient] = []
    for index in kept.views:
        view = draft.nodes[index]
        (shown,) = view.outputs
        again[shown] = _new_value(draft, shown, gradient)
        inputs = (again[view.inputs[0]], *view.inputs[1:])
        draft.views[gradient].append(
            replace(view, inputs=inputs, outputs=(again[shown],), phase=node.phase)
        )
    for index in kept.readers:
        reader = draft.nodes[index]
        draft.nodes[index] = replace(reader, inputs=tuple([again.get(v, v) for v in reader.inputs]))


def _new_value(draft: _Draft, like: ValueId, producer: int) -> ValueId:
    draft.types.append(draft.types[like])
    draft.producers.append(producer)
    return ValueId(len(draft.types) - 1)
