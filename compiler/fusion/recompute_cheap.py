"""Compute cheap values of the forward pass again where the backward pass reads them.

    n = (x - mean) * rstd ... sum(dy * n)  ->  n = ... in the backward pass: sum(dy * n')

A value that generated code makes element by element from one whole tensor, which is kept for the
backward pass in any case, need not be kept beside it. The nodes between the two are cloned into the
backward pass, and what reads the value there reads the clone; fusion puts the clone into the kernel
that reads it, so that a tensor is read as before and one less is written, and kept. What is one
number per row or column (a mean, a rounded scale) is small: it is kept, never computed again.

A value that would not be kept may be, in place of what is made of it (`recompute_roots`). A value
that is read in other rows than it is made in is kept, as a norm of groups by a sum over the batch:
there is no mean of each row there.

A reader that generated code does not compute, as a matrix product, needs the value in memory. There
the clone is an output of a kernel of the backward pass that reads the same tensor; the readers, and
what needs them, are moved after it. The value so dies in the forward pass, and the clone costs no
bytes where it lies over the tensor that it is made of. Without such a kernel, or where it needs the
readers itself, the value is kept.

Guarantees: every value that is read has the bits that it had, but for bfloat16, which a kernel
rounds only where it is an output; no unused node is left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from compiler.contract.program import COLUMN_REDUCTIONS, ROW_REDUCTIONS, Kind, ProgramInput
from compiler.contract.spaces import Space
from compiler.contract.types import Phase, ValueId
from compiler.fusion.members import FusionCandidates, deferrable_nodes
from compiler.graph.graph import Graph, Node, needed_nodes, new_value
from compiler.graph.program_builder import ProgramBuilder, expand
from compiler.graph.registry import Op
from compiler.graph.target import WideOf
from compiler.ops.primitives.matmul import MATMUL

# Which values of the forward pass to keep in place of what is made of them.
#
#     e = exp(-x); y = x / (1 + e)  ->  x, where the backward pass reads e and y
#
# An *origin* is a value of which alone generated code makes, element by element, values that the
# backward pass reads and that would be kept. It is worth its bytes where these are several, or
# where it is written in any case, as a later launch reads it, or one of other rows and columns.
#
# A product is no origin: it would be a tensor of its own where now it is part of its reader.


def recompute_roots(
    members: FusionCandidates,
    whole_inputs: Callable[[int], list[ValueId] | None],
    is_saved: Callable[[ValueId], bool],
) -> set[ValueId]:
    """Return the origins worth their bytes. O(edges).

    Args:
        members: the nodes, as members of kernels.
        whole_inputs: the tensors of which generated code makes a node's output by element, but for
            small ones; None where it does not.
        is_saved: whether the backward pass reads a value in kernels alone.
    """
    graph, is_launch = members.graph, members.storage.is_launch
    written = _Written(members)
    origin: dict[ValueId, ValueId] = {}
    nearest: dict[ValueId, ValueId] = {}
    num_saved: dict[ValueId, int] = {}
    for index, node in enumerate(graph.nodes):
        if node.phase is not Phase.FORWARD or not is_launch[index]:
            continue
        written.look_at(index, node)
        if node.op is not MATMUL:
            origin.update([(v, v) for v in node.outputs])
        whole = whole_inputs(index)
        if whole is None:
            continue
        (value,) = node.outputs
        far = {origin.get(v, value) for v in whole}
        near = {nearest.get(v, v) for v in whole}
        if len(far) == 1:
            (origin[value],) = far
        if len(near) == 1 and near != far:  # made of one value that is kept
            (nearest[value],) = near
        elif is_saved(value):
            nearest[value] = value
            num_saved[origin[value]] = num_saved.get(origin[value], 0) + 1
        elif len(near) == 1:
            (nearest[value],) = near
    return {v for v, count in num_saved.items() if count > 1 or v in written.values}


class _Written:
    """The values that are in memory in any case, as nodes are looked at in order.

    A node's level is the number of launches before it that generated code does not compute.
    """

    def __init__(self, members: FusionCandidates) -> None:
        self.values: set[ValueId] = set()
        self._members = members
        self._levels = [0] * len(members.graph.nodes)
        self._spaces: list[Space | None] = [None] * len(members.graph.nodes)

    def look_at(self, index: int, node: Node) -> None:
        """Note the values that a node reads from memory."""
        members, levels = self._members, self._levels
        roots = [members.storage.root[v] for v in node.inputs]
        before = [members.producers[v] for v in roots]
        space = self._spaces[index] = members.natural_space(index)
        level = max([levels[n] for n in before], default=0)
        levels[index] = level + (space is None)
        for value, producer in zip(roots, before, strict=True):
            # A launch that is not generated reads the value, or comes in between: it is in memory
            # then.
            if levels[producer] < levels[index]:
                self.values.add(value)
            elif value not in self.values:
                other = self._spaces[producer]
                is_fit = other in (None, space) or members.fit(index, other, {}) is not None
                if not is_fit:
                    self.values.add(value)
        if space is None and node.op is not MATMUL:
            self.values.update(node.outputs)


MAX_INSTRUCTIONS = 32
"""Instructions of all clones for one value: above gelu (15), far below a kernel's limit."""

NARROW = 8
"""A tensor with at most 1 / NARROW of a value's elements is small beside it."""

MAX_KERNELS_TRIED = 4
"""Kernels that are looked at for one value: the first one fits but in graphs made to defy it."""


@dataclass(frozen=True, slots=True)
class _Recipe:
    """How a value is had in the backward pass: the nodes to clone, and the whole tensors they read.

    No nodes: it is kept, or a source, and reading it is all.
    """

    nodes: tuple[int, ...]
    bases: frozenset[ValueId]
    weight: int = 0


@dataclass(slots=True)
class _Readers:
    """The nodes that read a value's bytes after the forward pass.

    `kernels` are nodes that generated code computes there, `others` need the value in memory.
    """

    kernels: list[int]
    others: list[int]
    is_read_late: bool = False
    is_read_by_updates: bool = False


def recompute_cheap(graph: Graph, wide_of: WideOf) -> Graph:
    """Return the graph with fewer tensors that live until the backward pass. O(nodes).

    `wide_of` says of a device what may exist by the chunk there.

    Beside that, per value the nodes that stand between its first reader and the kernel.
    """
    if not any([node.phase is Phase.BACKWARD for node in graph.nodes]):
        return graph
    return _Search(graph, wide_of).run()


class _Search:
    """The values in the order in which they are made, and what is decided of them."""

    def __init__(self, graph: Graph, wide_of: WideOf) -> None:
        self.graph, self.wide_of = graph, wide_of
        self.members = FusionCandidates(graph)
        storage = self.members.storage
        self.root, self.is_launch = storage.root, storage.is_launch
        self.owned = {self.root[v] for v in graph.roots()}
        self.readers: dict[ValueId, _Readers] = {}
        self.recipes: dict[ValueId, _Recipe | None] = {}
        self.chosen: dict[ValueId, _Recipe] = {}
        self.kept: set[ValueId] = set()
        self.origins: frozenset[ValueId] = frozenset()
        self.weights: dict[Op, int | None] = {}
        self.order = _Order(graph, self.members.producers)

    def run(self) -> Graph:
        self._find_readers()
        origins = recompute_roots(self.members, self._whole_inputs, self._is_saved_for_kernels)
        self.origins = frozenset(origins)
        for index, node in enumerate(self.graph.nodes):
            if node.phase is Phase.FORWARD:
                self._look_at(index, node)
        return self._rewritten() if self.chosen else self.graph

    def _find_readers(self) -> None:
        """Note who reads what, in person or through nodes that wait for their reader.

        What waits for a reader becomes part of it: that is the kernel.
        """
        waits = deferrable_nodes(self.members)
        read_by: dict[ValueId, tuple[ValueId, ...]] = {}
        for index, node in enumerate(self.graph.nodes):
            if node.phase is Phase.FORWARD or not self.is_launch[index]:
                continue
            roots = tuple(dict.fromkeys([self.root[v] for v in node.inputs]))
            is_fused = self.members.frame_of(index) is not None
            for value in roots:
                readers = self._readers_of(value)
                readers.is_read_late = True
                readers.is_read_by_updates |= node.phase is not Phase.BACKWARD
                if not is_fused:
                    readers.others.append(index)
            # A node that waits becomes part of its reader, which so reads all that it reads.
            values = dict.fromkeys([*roots, *[v for r in roots for v in read_by.get(r, ())]])
            if waits[index]:
                read_by.update(dict.fromkeys(node.outputs, tuple(values)))
            elif node.phase is Phase.BACKWARD and is_fused:
                for value in values:
                    self._readers_of(value).kernels.append(index)

    def _is_saved_for_kernels(self, value: ValueId) -> bool:
        readers = self.readers.get(value)
        return readers is not None and readers.is_read_late and not readers.others

    def _readers_of(self, value: ValueId) -> _Readers:
        if value not in self.readers:
            self.readers[value] = _Readers([], [])
        return self.readers[value]

    def _look_at(self, index: int, node: Node) -> None:
        """Find the recipes of what a node of the forward pass makes, and decide."""
        if not self.is_launch[index]:
            for value in node.outputs:
                self.recipes[value] = self._shown(index, node, value)
            return
        recipe = self._composed(index, node)
        for value in node.outputs:
            self.recipes[value] = recipe
            readers = self.readers.get(value)
            # Roots of the graph and what updates read are in memory in any case.
            if value in self.owned or (readers is not None and readers.is_read_by_updates):
                self._keep(value)
            elif readers is not None and readers.is_read_late:
                if recipe is None or not self._can_have(value, recipe, readers):
                    self._keep(value)
                else:
                    self.chosen[value] = recipe
                    for base in recipe.bases:
                        self._readers_of(base).kernels += readers.kernels
                    self.kept |= recipe.bases
            elif recipe is None and value in self.origins:
                self.recipes[value] = _Recipe((), frozenset((value,)))

    def _keep(self, value: ValueId) -> None:
        self.kept.add(value)
        self.recipes[value] = _Recipe((), frozenset((value,)))

    def _shown(self, index: int, node: Node, value: ValueId) -> _Recipe | None:
        """Return the recipe of a source, or of a view."""
        if not node.inputs:
            self.kept.add(value)
            return _Recipe((), frozenset((value,)))
        recipe = self.recipes.get(node.inputs[0])
        if recipe is None or not recipe.nodes:
            return recipe
        return replace(recipe, nodes=(*recipe.nodes, index))

    def _composed(self, index: int, node: Node) -> _Recipe | None:
        """Return the recipe of a node that generated code computes element by element."""
        whole = self._whole_inputs(index)
        if whole is None:
            return None
        weight = self._weight_of(node) or 0
        size = self.graph.types[node.outputs[0]].num_elements
        nodes: dict[int, None] = {}
        bases: set[ValueId] = set()
        for value in node.inputs:
            root, recipe = self.root[value], self.recipes.get(value)
            if root not in self.chosen and root not in whole:
                continue
            if recipe is None:
                return None
            bases.update([b for b in recipe.bases if self._is_whole(b, size)])
            weight += 0 if nodes.keys() >= set(recipe.nodes) else recipe.weight
            nodes.update(dict.fromkeys(recipe.nodes))
        # One whole tensor at most: two would have to be kept in place of one.
        if weight > MAX_INSTRUCTIONS or len(bases) > 1:
            return None
        return _Recipe((*sorted(nodes), index), frozenset(bases), weight)

    def _whole_inputs(self, index: int) -> list[ValueId] | None:
        """Return what a node that generated code computes by element reads, but for small tensors.

        None for any other node.
        """
        node = self.graph.nodes[index]
        if len(node.outputs) != 1 or self.members.frame_of(index) is None:
            return None
        if self._weight_of(node) is None:
            return None
        size = self.graph.types[node.outputs[0]].num_elements
        return [r for r in [self.root[v] for v in node.inputs] if self._is_whole(r, size)]

    def _is_whole(self, base: ValueId, size: int) -> bool:
        return self.graph.types[base].num_elements * NARROW > size

    def _weight_of(self, node: Node) -> int | None:
        """Return about how many instructions an op takes, None for one that sums."""
        if node.op not in self.weights:
            types = tuple([self.graph.types[v] for v in node.inputs])
            p = ProgramBuilder(2, 2)
            kinds = [Kind.FULL if t.shape else Kind.SCALAR for t in types]
            values = [p.input(ProgramInput(t.dtype, k)) for t, k in zip(types, kinds, strict=True)]
            program, _ = p.finish(expand.get(node.op)(p, node.attrs, types, tuple(values)))
            ops = [i.op for i in program.instructions]
            sums = [op for op in ops if op in (*ROW_REDUCTIONS, *COLUMN_REDUCTIONS)]
            self.weights[node.op] = None if sums else len(ops)
        return self.weights[node.op]

    def _can_have(self, value: ValueId, recipe: _Recipe, readers: _Readers) -> bool:
        """Whether a value can be computed again; moves its readers if that takes it."""
        types = self.graph.types
        # New bases that are kept must cost no more bytes than the value that they save.
        new = recipe.bases - self.kept
        if new and (
            readers.others or types[value].size_bytes < sum([types[v].size_bytes for v in new])
        ):
            return False
        if not self._are_rows_of(recipe, readers.kernels):
            return False
        if not readers.others:
            return True
        if any([self._reads_wide(n) for n in readers.others]):
            return False
        kernels = dict.fromkeys(readers.kernels)
        for base in recipe.bases:
            kernels.update(dict.fromkeys(self._readers_of(base).kernels))
        return self.order.move_after_one_of(readers.others, list(kernels))

    def _are_rows_of(self, recipe: _Recipe, kernels: list[int]) -> bool:
        """Whether what makes a value can run in the rows and columns of all that read it."""
        spaces = dict.fromkeys([self.members.natural_space(n) for n in kernels])
        return all(
            [
                self.members.natural_space(n) == space or self.members.fit(n, space, {}) is not None
                for space in spaces
                for n in recipe.nodes
                if space is not None and self.is_launch[n]
            ]
        )

    def _reads_wide(self, index: int) -> bool:
        """Whether a reader has an operand that could exist by the chunk of rows.

        It must not wait for a kernel that needs all rows first: the chunk would be made twice.
        """
        node = self.graph.nodes[index]
        largest, *others = sorted(
            [self.graph.types[v].size_bytes for v in node.inputs], reverse=True
        )
        return largest > self.wide_of(node.device).min_bytes and largest > NARROW * max(
            others, default=largest
        )

    def _rewritten(self) -> Graph:
        """Return the graph with clones, each right after its original."""
        graph, types = self.graph, list(self.graph.types)
        cloned = {n for recipe in self.chosen.values() for n in recipe.nodes}
        again: dict[ValueId, ValueId] = {}
        nodes: list[Node] = []
        for index in self.order.nodes:
            node = graph.nodes[index]
            inputs = tuple([again.get(v, v) for v in node.inputs])
            if node.phase is not Phase.FORWARD:
                nodes.append(
                    node if inputs == node.inputs else node.with_values(inputs, node.outputs)
                )
                continue
            nodes.append(node)
            is_view = not self.is_launch[index] and inputs != node.inputs
            if index in cloned or is_view:
                outputs = tuple([new_value(types, types[v]) for v in node.outputs])
                again.update(zip(node.outputs, outputs, strict=True))
                nodes.append(replace(node, inputs=inputs, outputs=outputs, phase=Phase.BACKWARD))
        # Values keep their numbers, as fusing drops more.
        rewritten = replace(graph, nodes=tuple(nodes), types=tuple(types))
        return replace(rewritten, nodes=tuple(needed_nodes(rewritten)))


class _Order:
    """The order of the nodes while it changes; `place` is the inverse of `nodes`."""

    def __init__(self, graph: Graph, producers: Sequence[int]) -> None:
        self.graph, self.producers = graph, producers
        self.nodes = list(range(len(graph.nodes)))
        self.place = list(self.nodes)

    def move_after_one_of(self, readers: list[int], kernels: list[int]) -> bool:
        """Put readers, and what needs them, after one of some nodes that does not need them."""
        first = min([self.place[reader] for reader in readers])
        kernels = sorted(kernels, key=lambda kernel: self.place[kernel])
        return any([self.place[kernel] < first for kernel in kernels]) or any(
            self._is_moved(readers, first, kernel) for kernel in kernels[:MAX_KERNELS_TRIED]
        )

    def _is_moved(self, readers: list[int], first: int, kernel: int) -> bool:
        last = self.place[kernel]
        # Everything that depends on a reader moves behind the kernel, in the order it had.
        waits = set(readers)
        before: list[int] = []
        after: list[int] = []
        for index in self.nodes[first : last + 1]:
            inputs = self.graph.nodes[index].inputs
            if index in waits or any([self.producers[v] in waits for v in inputs]):
                waits.add(index)
                after.append(index)
            else:
                before.append(index)
        # The kernel needs a reader itself: it cannot run before it.
        if kernel in waits:
            return False
        self.nodes[first : last + 1] = [*before, *after]
        for place, index in enumerate([*before, *after], first):
            self.place[index] = place
        return True
