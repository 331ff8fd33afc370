"""The host looks at a flag, and runs one plan of a body or another."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from actors.kernels.kernel import Attrs, KernelNeeds, Operands, Workspace
from actors.kernels.native.launch import address
from actors.kernels.scan import BoundStep
from actors.protocol import Array, Arrays, Launch
from compiler.errors import InternalError
from compiler.sub_plan import SubPlan, frame_of

ASSUMED_STEPS = 16
"""How often a loop of unknown length is assumed to go round; only estimates depend on it."""


def plan_in(attrs: Attrs, name: str) -> SubPlan:
    """Return the plan of a launch's body. Raises InternalError where it has none."""
    body = attrs[name]
    if not isinstance(body, SubPlan):
        raise InternalError(f"a launch is bound without the plan of its body {name!r}")
    return body


def _needs(
    attrs: Attrs, names: tuple[str, str], operands: Operands, times: int
) -> KernelNeeds | None:
    """Return what two bodies need that run one after the other, if at all."""
    bodies = [body for name in names if isinstance(body := attrs[name], SubPlan)]
    if len(bodies) != len(names):  # a device is chosen before there are plans
        return KernelNeeds()
    if not all([x.is_dense for x in operands]):
        return None
    return KernelNeeds(
        workspace_bytes=max([frame_of(body.plan).size_bytes for body in bodies]),
        duration_ns=times * sum([body.duration_ns for body in bodies]),
    )


@dataclass(frozen=True, slots=True)
class CondKernel:
    """Runs one of two sub-plans. It takes dense operands."""

    name: str = "host.cond"
    op: str = "cond"

    def query(self, attrs: Attrs, inputs: Operands, outputs: Operands) -> KernelNeeds | None:
        """Ask for the larger frame."""
        return _needs(attrs, ("then", "otherwise"), (*inputs, *outputs), 1)

    def bind(self, attrs: Attrs, inputs: Arrays, outputs: Arrays, workspace: Workspace) -> Launch:
        """Return the choice."""
        flag, (then, otherwise) = (
            inputs[0],
            [
                _whole(plan_in(attrs, name), inputs, outputs, workspace)
                for name in ("then", "otherwise")
            ],
        )

        def launch() -> None:
            if flag.item():
                then()
            else:
                otherwise()

        return launch


def _whole(body: SubPlan, inputs: Arrays, outputs: Arrays, workspace: Workspace) -> Launch:
    """Return one run of a body, with its results in the outputs."""
    step = BoundStep(body, inputs, outputs, workspace)
    moves: list[tuple[Array, Array]] = [
        (outputs[i], step.field(f"out{i}")) for i in range(len(body.results))
    ]

    def launch() -> None:
        for call in step.chain:
            call()
        for target, source in moves:
            np.copyto(target, source)

    return launch


@dataclass(frozen=True, slots=True)
class WhileKernel:
    """Runs a sub-plan as long as another one says. It takes dense operands."""

    name: str = "host.while"
    op: str = "while"

    def query(self, attrs: Attrs, inputs: Operands, outputs: Operands) -> KernelNeeds | None:
        """Ask for the larger frame: the test keeps nothing while the body runs."""
        return _needs(attrs, ("test", "body"), (*inputs, *outputs), ASSUMED_STEPS)

    def bind(self, attrs: Attrs, inputs: Arrays, outputs: Arrays, workspace: Workspace) -> Launch:
        """Return the loop."""
        plan = plan_in(attrs, "test")
        test = BoundStep(plan, inputs, outputs, workspace)
        body = BoundStep(plan_in(attrs, "body"), inputs, outputs, workspace)
        flag = test.field(f"out{plan.carries}")
        firsts = [
            (new, old)
            for new, old in zip(outputs, inputs[: plan.carries], strict=True)
            if address(new) != address(old)
        ]

        def launch() -> None:
            for target, source in firsts:
                np.copyto(target, source)
            while True:
                for call in test.chain:
                    call()
                if not flag.item():
                    return
                for call in body.chain:
                    call()

        return launch


BRANCH_KERNELS = (CondKernel(), WhileKernel())
