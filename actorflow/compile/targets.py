"""The bridge from planning to kernels: `compiler.target.Target` answered by `actors.kernels`."""

from __future__ import annotations

from actors.kernels import catalogue
from actors.kernels.kernel import Operand as KernelOperand
from compiler.registry import Op, runs_as
from compiler.target import CallOperand, KernelCall, KernelInfo


class HostTarget:
    """The kernels of the host: numpy for every op.

    Library kernels stand before numpy's in the catalogue.
    """

    @property
    def fingerprint(self) -> str:
        """Kernel libraries and versions."""
        return catalogue.fingerprint()

    def query(self, call: KernelCall) -> KernelInfo:
        """Choose the first kernel that takes the call. Raises LookupError when there is none."""
        family = runs_as.get(Op(call.op))
        name, needs = catalogue.choose(call.op, call.attrs, *_operands(call), family)
        return KernelInfo(name, needs.workspace_bytes, needs.in_place, needs.duration_ns)


def is_taken_elsewhere(call: KernelCall) -> bool:
    """Whether a kernel that was registered from outside takes a call."""
    given = (call.attrs, *_operands(call))
    kernels = catalogue.registered(call.op)
    return any([catalogue.query_registered(k, *given) is not None for k in kernels])


def _operands(call: KernelCall) -> tuple[tuple[KernelOperand, ...], tuple[KernelOperand, ...]]:
    return tuple([_operand(o) for o in call.inputs]), tuple([_operand(o) for o in call.outputs])


def _operand(operand: CallOperand) -> KernelOperand:
    return KernelOperand(operand.type, operand.layout.offset_bytes, operand.layout.strides_bytes)
