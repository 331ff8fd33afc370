"""A call that the compiler plans, as kernels see its operands."""

from __future__ import annotations

from actors.kernels.kernel import Operand, Operands
from compiler.target import CallOperand, KernelCall


def operands_of_call(call: KernelCall) -> tuple[Operands, Operands]:
    """Return inputs and outputs of a call as `query` takes them."""
    return tuple([_operand(o) for o in call.inputs]), tuple([_operand(o) for o in call.outputs])


def _operand(operand: CallOperand) -> Operand:
    return Operand(operand.type, operand.layout.offset_bytes, operand.layout.strides_bytes)
