"""Proofs about plans before they run: of one plan, and of the plans of all ranks together.

A proof reads the plan alone and trusts nothing that lowering believed. `verify_plan` first has
`contract/plan.py` check that the tables fit together, then proves ranges, memory, order, versions
and liveness; `verify_ranks` proves that ranks with their plans meet in everything.

    verify      one plan: ranges, shared bytes, rates, one period without deadlock
    versions    every read finds the version that it names
    places      where versions lie: windows on registers
    cross_rank  all ranks: meetings, their one order, one period without deadlock

It may import `contract`, `graph.target`, `ops.primitives` and `memory`. It must not import
`lowering`, `storage` or a pass: a proof by what made the plan would prove nothing.

Begin reading at `verify`, whose docstring lists what is proven.
"""

from typing import Any

from compiler.contract.old_names import name_of_package


def __getattr__(name: str) -> Any:
    """Hand on what this package was called by until version 0.2, with a warning."""
    return name_of_package(__name__, name)
