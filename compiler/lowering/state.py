"""The registers of what outlives a step: variables, and constants."""

from __future__ import annotations

from compiler.errors import InternalError
from compiler.graph import Node
from compiler.lowering.chain_actors import ChainActors
from compiler.lowering.plan_builder import PlanBuilder
from compiler.ops.sources import CONSTANT, UNSAVED, VARIABLE, declared_part
from compiler.plan import Constant, PlainValue, RegisterKind, Variable
from compiler.types import RegisterId, ValueId, Version


class StateRegisters:
    """The variables of a plan by name, with the version that whoever reads between steps finds."""

    def __init__(self, plan: PlanBuilder) -> None:
        self._plan = plan
        self._registers: dict[str, RegisterId] = {}
        self._between: dict[str, Version] = {}

    def place(self, chains: ChainActors) -> None:
        """Give the variables and constants of a program a home, where their nodes say.

        The program that comes first is the one that steps; another one reads between its steps.
        What a snapshot copies comes first: registers that live as long lie in this order, and
        neighbours are copied as one.
        """
        graph = chains.program.graph
        written = {w.variable: w.value for w in graph.writes}
        homeless = [node for node in graph.nodes if node.op in (VARIABLE, CONSTANT)]
        for node in sorted(homeless, key=lambda node: not is_kept(node)):
            value = node.outputs[0]
            if node.op is VARIABLE:
                chains.home[value] = (self._variable(chains, node, written.get(value)), 0)
            else:
                chains.home[value] = (self._constant(chains, node), 0)

    def _variable(self, chains: ChainActors, node: Node, written: ValueId | None) -> RegisterId:
        """Return the register of a variable, which holds `written` at the end of a step."""
        graph, value = chains.program.graph, node.outputs[0]
        name, type_ = node.attrs.str_("name"), graph.types[value]
        if name in self._registers:
            chains.versions.know(value, self._between[name])
        else:
            register = self._plan.register(
                name,
                RegisterKind.VARIABLE,
                type_.size_bytes,
                reason="state: one slot",
                place=chains.program.place[value],
            )
            self._registers[name] = register
            view = self._plan.view(register, type_)
            init = _pairs(node.attrs["init"])
            role, before = node.attrs.str_("role"), chains.versions.of(value)
            after = before if written is None else chains.versions.of(written)
            self._between[name] = before if written is None else self._plan.version()
            between, part = self._between[name], declared_part(node.attrs)
            self._plan.variables.append(
                Variable(name, role, view, init, before, after, between, part)
            )
        return self._registers[name]

    def _constant(self, chains: ChainActors, node: Node) -> RegisterId:
        type_ = chains.program.graph.types[node.outputs[0]]
        register = self._plan.register(
            f"constant {type_}",
            RegisterKind.CONSTANT,
            type_.size_bytes,
            reason="state: one slot",
            place=chains.program.place[node.outputs[0]],
        )
        data = node.attrs["data"]
        if not isinstance(data, bytes):
            raise InternalError(f"constant at {node.source} has no bytes")
        version = chains.versions.of(node.outputs[0])
        self._plan.constants.append(Constant(self._plan.view(register, type_), data, version))
        return register


def is_kept(node: Node) -> bool:
    """Whether a node is a variable that means something of its own between two steps."""
    return node.op is VARIABLE and node.attrs.str_("role") not in UNSAVED


def _pairs(value: object) -> tuple[tuple[str, PlainValue], ...]:
    if not isinstance(value, tuple):
        raise InternalError(f"a variable's init must be pairs, got {value!r}")
    return tuple((str(k), v) for k, v in value)
