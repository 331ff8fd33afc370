"""What an open plan was made for: the graph's identity, and the parameters that it trains.

The identity decides the graph: whatever a trace read, with parameters by their path, type and
sharing. So a second model of the same class has an equal graph, and the plan of the first. An open
plan moreover belongs to certain parameter objects; another object in the place of one changes no
graph, but the plan must be opened with its values. A signature keeps the objects, so that none is
mistaken for a later one with its `id`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from actorflow.initialise import whole_type
from actorflow.nn.parameter import Stored
from compiler.ops.sources import OF_MODEL
from compiler.plan import Plan

Identity = tuple[tuple[str, str], ...]
"""Rows (what, value) of what decided a graph."""

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True, eq=False)
class ModelSignature:
    """What an open plan was made for; `stamp` is of the reading that found it.

    The hash of the graph counts beside the identity, which is not complete for every job.
    """

    identity: Identity
    graph_hash: str
    parameters: Mapping[str, Stored]
    stamp: object

    def has_graph_of(self, other: ModelSignature) -> bool:
        """Whether both are of one graph, as far as can be told."""
        return (self.identity, self.graph_hash) == (other.identity, other.graph_hash)

    def has_parameters_of(self, other: ModelSignature) -> bool:
        """Whether both have the same parameter objects under the same paths."""
        mine, its = self.parameters, other.parameters
        return list(mine) == list(its) and all([its[n] is p for n, p in mine.items()])

    def moves(self, now: ModelSignature) -> str:
        """Return in words which parameters are others now; a line for the log."""
        before = {id(p): name for name, p in self.parameters.items()}
        others = [n for n, p in now.parameters.items() if before.get(id(p)) != n]
        moved = [n for n in others if id(now.parameters[n]) in before]
        fresh = [repr(n) for n in others if n not in moved]
        words = [f"{n!r} is what was {before[id(now.parameters[n])]!r}" for n in moved]
        if fresh:
            words.append(f"{', '.join(fresh)} now another object, whose optimizer state is fresh")
        return "; ".join(words)


def difference(before: Identity, now: Identity) -> str:
    """Return in words what changed first."""
    old, new = dict(before), dict(now)
    for key, value in new.items():
        if key not in old:
            return f"{key} ({value}) is new"
        if old[key] != value:
            return f"{key} changed from {old[key]} to {value}"
    return f"{next((k for k in old if k not in new), 'the order of the parts')} is gone"


def carried_over(
    plan: Plan, left: Mapping[str, Array], before: ModelSignature, now: ModelSignature
) -> dict[str, Array]:
    """Return what the state of a closed plan gives the plan that follows it, by name.

    State of the optimizer goes with its parameter, also under another path; a parameter that was
    not there before begins with fresh state.
    """
    were = {id(p): name for name, p in before.parameters.items()}
    carried = {}
    for variable in plan.state:
        name = variable.name
        path = name if variable.role in OF_MODEL else name.partition("/")[2]
        if path in now.parameters:
            old = were.get(id(now.parameters[path]))
            if old is None:
                continue
            name = name.removesuffix(path) + old
        array = left.get(name)
        if array is not None and array.shape == whole_type(plan, variable).shape:
            carried[variable.name] = array
    return carried
