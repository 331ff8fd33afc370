"""The kernels of a GPU together: every op that a plan can launch has one."""

import pytest
from kernel_calls import launched_op

from actors.kernels.cuda import catalogue
from actors.kernels.cuda.kernel import known_gpus
from actors.kernels.host import catalogue as host
from actors.kernels.reference.linear_algebra import LINEAR_ALGEBRA_KERNELS
from compiler.graph.program_builder import expand
from compiler.graph.registry import Op, is_comm, is_source, kernel_op, view
from compiler.ops.language.define import update
from compiler.ops.primitives.transfer import COPY_TO
from compiler.pipeline import standard_ops

ON_HOSTS_ALONE = {"while", *[kernel.op for kernel in LINEAR_ALGEBRA_KERNELS]}
"""A job on a GPU is refused with the user's line: hosts alone decide how often a loop goes round,
and have LAPACK and pocketfft."""

STAGED = {"adafactor_update", "adafactor_vector_update", "lamb_update", "muon_update"}
"""Nodes that stand for others, which take their place once gradients are final."""

every_gpu = pytest.mark.parametrize("gpu", known_gpus())


def launched_as(op):
    """Return the op whose kernels compute an op once it is lowered; None where nothing does."""
    if is_source.get(op) or is_comm.get(op):
        return None
    if expand.has(op) or update.has(op):
        return launched_op(op) if update.has(op) else "fused"
    if op is COPY_TO:
        return "copy"
    if kernel_op.get(op):
        return kernel_op.get(op)
    return None if view.has(op) and not host.kernels_for(op.name) else op.name


@every_gpu
def test_every_op_that_a_plan_can_launch_has_a_kernel(gpu):
    families = standard_ops.FAMILIES
    ops = {op for family in families for op in vars(family).values() if isinstance(op, Op)}
    wanted = {launched_as(op) for op in ops} - {None}
    assert {"fused", "embedding_update", "copy", "attention_grad", "region"} <= wanted
    known = {kernel.op for kernel in catalogue.kernels_by_name(gpu).values()}
    assert wanted - known == ON_HOSTS_ALONE | STAGED


@every_gpu
def test_a_gpu_leaves_no_op_to_the_kernels_of_the_host(gpu):
    ops = {kernel.op for kernel in host.HOST_KERNELS} - ON_HOSTS_ALONE
    assert ops <= {kernel.op for kernel in catalogue.kernels_by_name(gpu).values()}


@every_gpu
def test_a_name_in_a_plan_is_that_of_one_kernel(gpu):
    names = [kernel.name for kernel in catalogue.kernels_by_name(gpu).values()]
    assert len(names) == len({*names}) == len(catalogue.kernels_by_name(gpu))
    assert all(name.startswith(("cuda.", "cudnn.")) for name in names)
