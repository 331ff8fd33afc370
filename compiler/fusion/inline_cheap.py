"""Let a kernel compute a cheap operand again, instead of reading what another kernel wrote.

    y = cast(x); m = mean(y) | d = y - m; v = mean(d * d) | z = d * rsqrt(v)
      ->  m = mean(cast(x)) | v = mean((cast(x) - m)^2) | z = (cast(x) - m) * rsqrt(v)

Where `|` stands between kernels, because a sum over all rows must be complete. A float32 value that
is a few instructions away from one tensor is written once and read by each later kernel; the tensor
is read in its place, which has as many bytes at most. A batch norm of bfloat16 so moves 8 bytes an
element forward instead of 20. What a kernel makes in 16 bits and casts for other kernels, such as
the gradient behind a ReLU, is written in 16 bits, and each of them casts it.

Only where all that read the value are such kernels, in the same rows and columns: then nobody needs
it in memory. How many instructions are few is the device's (`TilingPolicy.cheap_instructions`): on
a GPU bytes are dear, on the host it is none.

Guarantees: every value that is read has the bits that it had; no kernel reads more tensors, nor has
more instructions, than fusion allows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from compiler.contract.attrs import Attrs
from compiler.contract.program import (
    COLUMN_REDUCTIONS,
    ROW_REDUCTIONS,
    FusedProgram,
    Kind,
    ProgramInput,
)
from compiler.contract.types import DType, Phase, TensorType, ValueId
from compiler.fusion.fuse import MAX_FULL_INPUTS, MAX_INSTRUCTIONS
from compiler.graph.graph import Graph, Node, new_value, prune
from compiler.graph.program_builder import ProgramBuilder
from compiler.graph.target import WideOf
from compiler.ops.language.program_ops import FUSED, HEAVY, fused_attrs, program_of, space_of
from compiler.ops.primitives.shape import RESHAPE
from compiler.ops.primitives.sources import VARIABLE
from compiler.storage.order import needed_per_step
from compiler.storage.storage import assign_storage

_FEW_READERS = 8
"""Kernels that compute a value again, at most: more would read as much as they save."""


_NEVER = (*ROW_REDUCTIONS, *COLUMN_REDUCTIONS, "check_index", "philox", "row_index")
"""Instructions that need more than the element, or say something of the launch."""


@dataclass(frozen=True, slots=True)
class _CheapValue:
    """How an output of a program is made: by which of its instructions, of which of its inputs."""

    program: FusedProgram
    output: int
    values: tuple[int, ...]
    inputs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Reader:
    """A kernel that reads a value: its place among the nodes, and the value's among its inputs."""

    node: int
    places: tuple[int, ...]


def inline_cheap(graph: Graph, wide_of: WideOf) -> Graph:
    """Return the graph with fewer values between its kernels. O(nodes), and their programs.

    `wide_of` says of a device how many instructions are few.
    """
    few = {d: wide_of(d).cheap_instructions for d in {n.device for n in graph.nodes}}
    if not any(few.values()):
        return graph
    return _Inlining(graph, few).run()


class _Inlining:
    """The nodes in order, each with what was changed of it so far."""

    def __init__(self, graph: Graph, few: dict[int, int]) -> None:
        self.graph, self.few = graph, few
        self.nodes, self.types = list(graph.nodes), list(graph.types)
        self.owned = frozenset(graph.roots())
        self.per_step = needed_per_step(graph)
        self.readers: list[list[int]] = [[] for _ in graph.types]
        for index, node in enumerate(graph.nodes):
            for value in dict.fromkeys(node.inputs):
                self.readers[value].append(index)
        self.root = list(assign_storage(graph).root)
        self.variables = {v for n in graph.nodes if n.op is VARIABLE for v in n.outputs}

    def run(self) -> Graph:
        has_changed = False
        for index in range(len(self.nodes)):
            # Outputs may leave: those that stay are looked at by value.
            for value in self.nodes[index].outputs if self._is_kernel(index) else ():
                is_changed = self._inlined(index, value) or self._narrowed(index, value)
                has_changed = has_changed or is_changed
        if not has_changed:
            return self.graph
        return prune(replace(self.graph, nodes=tuple(self.nodes), types=tuple(self.types)))

    def _is_kernel(self, index: int) -> bool:
        node = self.nodes[index]
        return node.op is FUSED and node.phase in (Phase.FORWARD, Phase.BACKWARD)

    def _inlined(self, index: int, value: ValueId) -> bool:
        """Let all readers of a value compute it, if they can; it is no output then."""
        maker = self.nodes[index]
        if value in self.owned or self.types[value].dtype is not DType.FLOAT32:
            return False
        recipe = self._recipe(maker, value)
        if recipe is None or not self._repeat(index, value, maker, recipe):
            return False
        self.nodes[index] = _without(maker, value)
        return True

    def _narrowed(self, index: int, value: ValueId) -> bool:
        """Let all readers of a cast value cast it, if they can; what it is a cast of is stored."""
        maker = self.nodes[index]
        program, place = program_of(maker.attrs), maker.outputs.index(value)
        source = _narrow_source(program, program.outputs[place])
        if value in self.owned or source is None or not self.few[maker.device]:
            return False
        dtype, is_stored = program.dtype_of(source), source in program.outputs
        narrow = (
            maker.outputs[program.outputs.index(source)]
            if is_stored
            else self._new_value(replace(self.types[value], dtype=dtype))
        )
        cast = program.instructions[program.outputs[place] - len(program.inputs)]
        entry = ProgramInput(dtype, Kind.FULL)
        alone = FusedProgram((entry,), (replace(cast, operands=(0,)),), (1,))
        recipe = _CheapValue(alone, 1, (1,), (0,))
        if not self._repeat(index, value, replace(maker, inputs=(narrow,)), recipe):
            return False
        if is_stored:
            self.nodes[index] = _without(maker, value)
            return True
        outputs = tuple([narrow if v == value else v for v in maker.outputs])
        numbers = [source if n == place else v for n, v in enumerate(program.outputs)]
        stored = replace(program, outputs=tuple(numbers))
        maker = replace(maker, outputs=outputs)
        self.nodes[index] = _with_program(maker, stored, maker.inputs, outputs)
        return True

    def _new_value(self, type_: TensorType) -> ValueId:
        value = new_value(self.types, type_)
        self.root.append(value)
        self.readers.append([])
        return value

    def _repeat(self, index: int, value: ValueId, maker: Node, recipe: _CheapValue) -> bool:
        """Let all readers of a value make it by a recipe on inputs of `maker`, if they can."""
        readers = self._readers_of(index, value)
        if not readers or len(readers) > _FEW_READERS:
            return False
        made = [self._with_recipe(maker, recipe, reader) for reader in readers]
        new = [node for node in made if node is not None]
        if len(new) < len(made):
            return False
        for reader, node in zip(readers, new, strict=True):
            self.nodes[reader.node] = node
            for operand in node.inputs:
                if reader.node not in self.readers[operand]:
                    self.readers[operand].append(reader.node)
        return True

    def _recipe(self, maker: Node, value: ValueId) -> _CheapValue | None:
        """Return how a value is made of one tensor and of small ones, in few instructions."""
        program, types = program_of(maker.attrs), self.types
        output = program.outputs[maker.outputs.index(value)]
        if program.kind_of(output) is not Kind.FULL:
            return None
        first = len(program.inputs)
        needed, todo, weight = set[int](), [output], 0
        while todo:
            number = todo.pop()
            if number in needed:
                continue
            needed.add(number)
            if number < first:
                continue
            instruction = program.instructions[number - first]
            if instruction.op in _NEVER:
                return None
            weight += 8 if instruction.op in HEAVY else int(instruction.op != "constant")
            todo += instruction.operands
        inputs = tuple(sorted([n for n in needed if n < first]))
        whole = [n for n in inputs if program.inputs[n].kind is Kind.FULL]
        if weight > self.few[maker.device] or len(whole) != 1:
            return None
        operands = [maker.inputs[n] for n in inputs]
        # A variable, or what shows it, may be written before the reader's turn.
        if any([self.root[v] in self.variables for v in operands]):
            return None
        # Of a view that shows a part, all of its tensor would live as long.
        if types[self.root[maker.inputs[whole[0]]]].size_bytes > types[value].size_bytes:
            return None
        return _CheapValue(
            program, output, tuple(sorted([n for n in needed if n >= first])), inputs
        )

    def _readers_of(self, index: int, value: ValueId) -> list[_Reader] | None:
        """Return the kernels that read a value, in its space; None where something else does."""
        maker, found = self.nodes[index], dict[int, list[int]]()
        todo, seen = [value], {value}
        while todo:
            shown = todo.pop()
            if shown in self.owned:
                return None
            for reader in self.readers[shown]:
                node = self.nodes[reader]
                if shown not in node.inputs:  # it was inlined there
                    continue
                if node.op is RESHAPE:
                    todo += [v for v in node.outputs if v not in seen]
                    seen.update(node.outputs)
                elif not self._is_alike(index, reader):
                    return None
                else:
                    found.setdefault(reader, []).extend(
                        [n for n, v in enumerate(node.inputs) if v == shown]
                    )
        for reader, places in found.items():
            attrs = self.nodes[reader].attrs
            entries = [program_of(attrs).inputs[n] for n in places]
            is_plain = [e.kind is Kind.FULL and not e.count and e.every == 1 for e in entries]
            if space_of(attrs) != space_of(maker.attrs) or not all(is_plain):
                return None
        return [_Reader(node, tuple(sorted(places))) for node, places in found.items()]

    def _is_alike(self, index: int, reader: int) -> bool:
        """Whether a reader is a kernel of the same device, as often as the maker."""
        is_near = self.nodes[index].device == self.nodes[reader].device
        return self._is_kernel(reader) and is_near and self.per_step[index] == self.per_step[reader]

    def _with_recipe(self, maker: Node, recipe: _CheapValue, reader: _Reader) -> Node | None:
        """Return a kernel that makes an operand itself; None where that is too much for one."""
        node = self.nodes[reader.node]
        program, space = program_of(node.attrs), space_of(node.attrs)
        p = ProgramBuilder(space.rows, space.columns)
        # Inputs come first; one that both read alike is read once.
        reads = [
            (node.inputs[n], entry)
            for n, entry in enumerate(program.inputs)
            if n not in reader.places
        ]
        reads += [(maker.inputs[n], recipe.program.inputs[n]) for n in recipe.inputs]
        operands = tuple(dict.fromkeys(reads))
        number_of = {read: p.input(read[1]) for read in operands}
        made = {n: number_of[maker.inputs[n], recipe.program.inputs[n]] for n in recipe.inputs}
        for number in recipe.values:
            instruction = recipe.program.instructions[number - len(recipe.program.inputs)]
            made[number] = p.repeat(instruction, tuple([made[v] for v in instruction.operands]))
        values = [
            made[recipe.output] if n in reader.places else number_of[node.inputs[n], entry]
            for n, entry in enumerate(program.inputs)
        ]
        finished, used = p.finish(p.replay(program, tuple(values)))
        whole = [entry for entry in finished.inputs if entry.kind is Kind.FULL]
        if len(finished.instructions) > MAX_INSTRUCTIONS or len(whole) > MAX_FULL_INPUTS:
            return None
        return _with_program(node, finished, tuple([operands[n][0] for n in used]), node.outputs)


def _narrow_source(program: FusedProgram, output: int) -> int | None:
    """Return the value of fewer bytes that an output is a cast of, if the program makes it."""
    first = len(program.inputs)
    if output < first or program.instructions[output - first].op != "cast":
        return None
    (source,) = program.instructions[output - first].operands
    is_narrow = program.dtype_of(source).itemsize < program.dtype_of(output).itemsize
    is_full = program.kind_of(source) is Kind.FULL
    return source if source >= first and is_full and is_narrow else None


def _without(node: Node, value: ValueId) -> Node:
    """Return a kernel without one of its outputs. The last one stays, for `prune` to find."""
    left = [n for n, v in enumerate(node.outputs) if v != value]
    if not left:
        return node
    program, space = program_of(node.attrs), space_of(node.attrs)
    p = ProgramBuilder(space.rows, space.columns)
    results = p.replay(program, tuple([p.input(entry) for entry in program.inputs]))
    finished, used = p.finish(tuple([results[n] for n in left]))
    outputs = tuple([node.outputs[n] for n in left])
    return _with_program(node, finished, tuple([node.inputs[n] for n in used]), outputs)


def _with_program(
    node: Node, program: FusedProgram, inputs: tuple[ValueId, ...], outputs: tuple[ValueId, ...]
) -> Node:
    shapes = node.attrs.shapes("shapes")
    left = tuple([s for s, v in zip(shapes, node.outputs, strict=True) if v in outputs])
    members = node.attrs.texts("members")
    attrs = Attrs(fused_attrs(program, space_of(node.attrs), left, members))
    return replace(node, inputs=inputs, outputs=outputs, attrs=attrs)
