"""What a search for a byte budget decides, and the rewrites of that kind carry out."""

from __future__ import annotations

from dataclasses import dataclass

from compiler.types import ValueId


@dataclass(frozen=True, slots=True)
class BudgetChoice:
    """Launches that run again, and what lives in host memory; by default nothing of either.

    `launches` are nodes of the ordered graph in the order in which they run, some of them more than
    once; empty: each once, in its place. `state` are variables of the optimizer by name,
    `activations` values of the forward pass.
    """

    launches: tuple[int, ...] = ()
    state: tuple[str, ...] = ()
    activations: tuple[ValueId, ...] = ()
