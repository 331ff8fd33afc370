"""What a plan says of its memory: the account of an arena, and what was done to fit a budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from compiler.plan_numbers import Bytes, Index
from compiler.row_values import Bounds


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The account of one arena, and what is proven about its peak.

    `peak_bytes` is the size of the arena. The parts from `parameter_bytes` to `unused_bytes` are
    bytes by address and add up to it exactly, padding to the alignment included; temporaries
    include workspaces. The rest is by time: launch `peak_launch`, counted over all chains in the
    order of the plan, has the most live bytes, of which workspaces hold `peak_workspace_bytes`.
    `lower_bound_bytes` holds for this order of launches; `text` is the certificate in words.
    """

    peak_bytes: Bytes
    lower_bound_bytes: Bytes
    parameter_bytes: Bytes
    optimizer_bytes: Bytes
    scratch_bytes: Bytes
    other_variable_bytes: Bytes
    constant_bytes: Bytes
    staging_bytes: Bytes
    slot_bytes: Bytes
    crossing_bytes: Bytes
    temporary_bytes: Bytes
    unused_bytes: Bytes
    largest_workspace_bytes: Bytes
    peak_launch: Index
    peak_live_bytes: Bytes
    peak_workspace_bytes: Bytes
    text: str

    @property
    def variable_bytes(self) -> int:
        """What outlives a batch: parameters, optimizer state, gradient sums, counters."""
        return (
            self.parameter_bytes
            + self.optimizer_bytes
            + self.scratch_bytes
            + self.other_variable_bytes
        )

    @property
    def step_bytes(self) -> int:
        """The arena without the variables."""
        return self.peak_bytes - self.variable_bytes

    @property
    def parts(self) -> tuple[tuple[str, int], ...]:
        """The parts that add up to the arena, each with its name for people."""
        return (
            ("parameters", self.parameter_bytes),
            ("optimizer", self.optimizer_bytes),
            ("gradient sums", self.scratch_bytes),
            ("other variables", self.other_variable_bytes),
            ("constants", self.constant_bytes),
            ("staging", self.staging_bytes),
            ("slots", self.slot_bytes),
            ("between chains", self.crossing_bytes),
            ("temporaries", self.temporary_bytes),
            ("unused", self.unused_bytes),
        )


@dataclass(frozen=True, slots=True)
class Recomputation:
    """What was decided so that the plan fits its byte budget.

    `budget_bytes` is 0 where none was given. `store_all_bytes` is the arena without recomputation.
    `num_launches` run again in every step, for `extra` of the step's estimated time (0.05: 5 %).
    `method` found the order, and `certificate` says what is proved about it.
    """

    budget_bytes: Bytes
    store_all_bytes: Bytes
    num_launches: Index
    extra: Annotated[float, Bounds(0.0, 1e9)]
    method: str
    certificate: str
