"""Each launch of a plan again: through its op's types, its kernel's needs, and its operands' bytes.

Kernels take for granted what the compiler gives them: types that their op made, layouts that their
plans took, scratch of the size it named, outputs that lie over inputs only in the pairs it
listed. C checks none of it. So it is asked here, once per distinct launch; layers repeat, and a
large plan has a few dozen.

An output is dense: it is its op's own value, and only views of it lie otherwise. Outputs share no
byte with each other, with the workspace, or with an input but those of a listed pair, and then they
cover the same bytes. Variables are written over the very view that is read; constants never.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from types import MappingProxyType

import compiler.pipeline.standard_ops  # noqa: F401  # fills the columns
from actorflow.environment.host import gpu_of, is_cuda
from actors.kernels.common.kernel import Kernel, KernelNeeds, Operand
from actors.kernels.host import catalogue
from compiler.contract.attrs import Attrs, AttrValue
from compiler.contract.codec import to_msgpack
from compiler.contract.errors import ActorflowError, InternalError, PlanFormatError
from compiler.contract.placement import Device
from compiler.contract.plan import Plan
from compiler.contract.plan_tables import Actor, ActorKind, Launch, RegisterKind, View
from compiler.contract.types import DType, RegisterId, TensorType
from compiler.graph.registry import (
    Op,
    OpTypeError,
    all_ops,
    find_op,
    infer_type,
    input_output_aliases,
    is_comm,
    is_source,
    kernel_op,
)
from compiler.ops.primitives.shape import COPY
from compiler.ops.primitives.sources import OF_MODEL, PACKED, ROUNDED
from compiler.ops.primitives.transfer import ALL_REDUCE, COPY_TO
from compiler.verify.places import extent_of

_RUNNING = (ActorKind.COMPUTE, ActorKind.COPY, ActorKind.COMM)
_ALIGNMENT = 64

_FOREIGN = (
    OpTypeError,
    ActorflowError,
    LookupError,
    TypeError,
    ValueError,
    ArithmeticError,
    AttributeError,
)
"""What ops and kernels raise for attributes and types that no builder would give them."""

Views = tuple[View, ...]
Pairs = tuple[tuple[int, int], ...]


def check_launches(plan: Plan, *, is_run: bool = True) -> None:
    """Check all launches of a plan. Raises PlanFormatError naming launch and user's line.

    A plan that is only shown or simulated (not `is_run`) may be of another machine. So ops and
    kernels that are not known here pass, and where a launch writes is not asked. O(launches), with
    one question to op and kernel per distinct launch.
    """
    prover = _Prover(plan, _kernels_by_device(plan, is_run=is_run), _packed(plan), is_run)
    op_names = {op.name for op in all_ops()}
    for actor in plan.actors:
        if actor.launches and actor.kind not in _RUNNING:
            raise PlanFormatError(f"actor {actor.name!r} ({actor.kind.value}) cannot run here")
        meets = actor.kind is ActorKind.COMM
        outputs = {port.register for port in actor.outputs}
        inputs = {port.register for port in actor.inputs}
        for index, launch in enumerate(actor.launches):
            if not is_run and launch.op not in op_names:
                continue
            try:
                if is_comm.get(_op_of(launch)) is not meets:
                    raise PlanFormatError(
                        f"names an op that belongs in no actor of kind {actor.kind.value}"
                    )
                prover.check(launch, plan.streams[actor.stream].device, outputs, inputs)
            except PlanFormatError as error:
                raise PlanFormatError(_where(plan, actor, index, launch) + str(error)) from None


def _kernels_by_device(plan: Plan, *, is_run: bool) -> dict[Device, Mapping[str, Kernel[object]]]:
    """Return the kernels of each device, by name: a simulated one has the host's."""
    devices = dict.fromkeys([stream.device for stream in plan.streams])
    host: Mapping[str, Kernel[object]] = catalogue.kernels_by_name()
    if not any([is_cuda(device) for device in devices]):
        return dict.fromkeys(devices, host)
    # Late: a plan of the host loads no kernels of GPUs.
    from actors.kernels.cuda import catalogue as cuda_catalogue
    from actors.kernels.cuda.kernel import known_gpus

    gpu = gpu_of(plan)
    if not is_run and gpu not in known_gpus():
        return {d: {} if is_cuda(d) else host for d in devices}
    return {d: cuda_catalogue.kernels_by_name(gpu) if is_cuda(d) else host for d in devices}


def _packed(plan: Plan) -> dict[RegisterId, RegisterId]:
    """Return packed register -> register of its variable, for variables that no step writes."""
    # before == after: no step writes the variable, so what a launch keeps of it stays right.
    kept = [v for v in plan.variables if v.role in (*OF_MODEL, ROUNDED)]
    frozen = {v.name: v for v in kept if v.before == v.after}
    base = {v.view: frozen.get(str(dict(v.init).get("of"))) for v in plan.variables}
    views, packed = plan.views, [v.view for v in plan.variables if v.role == PACKED]
    return {views[k].register: views[v.view].register for k in packed if (v := base[k]) is not None}


def _where(plan: Plan, actor: Actor, index: int, launch: Launch) -> str:
    types = ", ".join([str(plan.views[view].type) for view in launch.inputs])
    line = plan.sources[launch.source]
    return f"launch {index} of {actor.name!r}, {launch.op}({types}) at {line}, "


@dataclass(slots=True)
class _Prover:
    """The answers so far, by distinct launch: what may share bytes, and which input is kept.

    `packed` has the register of the variable that is kept, by the register where a launch keeps it.
    """

    plan: Plan
    kernels: Mapping[Device, Mapping[str, Kernel[object]]]
    packed: Mapping[RegisterId, RegisterId]
    is_run: bool
    answers: dict[object, tuple[Pairs, int | None]] = field(default_factory=dict)

    def check(
        self, launch: Launch, device: Device, made: set[RegisterId], taken: set[RegisterId]
    ) -> None:
        """Check one launch of an actor on a device, whose ports put out the registers `made`."""
        views = self.plan.views
        inputs = tuple([views[index] for index in launch.inputs])
        outputs = tuple([views[index] for index in launch.outputs])
        scratch = None if launch.workspace is None else views[launch.workspace]
        block = scratch and (scratch.type, scratch.offset_bytes, scratch.strides_bytes)
        # All that op and kernel are asked about, and no register: a network of equal layers has few
        # keys.
        key = (
            (device.kind, launch.kernel, launch.op, to_msgpack(launch.attrs)),
            tuple([(view.type, view.strides_bytes) for view in inputs]),
            tuple([(view.type, view.strides_bytes) for view in outputs]),
            block,
        )
        if key not in self.answers:
            kernel = self.kernels[device].get(launch.kernel)
            self.answers[key] = self._asked(kernel, launch, inputs, outputs, scratch)
        if not self.is_run:
            return
        pairs, keeps = self.answers[key]
        self._check_homes(launch, inputs, outputs, made, taken)
        self._check_workspace(scratch, None if keeps is None else inputs[keeps].register)
        _check_bytes(inputs, outputs, scratch, pairs)

    def _asked(
        self,
        kernel: Kernel[object] | None,
        launch: Launch,
        inputs: Views,
        outputs: Views,
        scratch: View | None,
    ) -> tuple[Pairs, int | None]:
        """Ask op and kernel; return the pairs that may share bytes, and which input is kept."""
        op = _op_of(launch)
        attrs = dict(launch.attrs)
        # A dict would keep the last one only, and a kernel might read another than the proof did.
        if len(attrs) != len(launch.attrs):
            raise PlanFormatError("has an attribute twice")
        _check_types(op, Attrs(attrs), inputs, outputs)
        for position, view in enumerate(outputs):
            if not extent_of(view).is_exact:
                raise PlanFormatError(f"writes output {position} with strides {view.strides_bytes}")
        if is_comm.get(op):
            return _check_meeting(self.plan, launch, op, inputs, outputs, scratch), None
        if kernel is None and not self.is_run:
            return (), None
        needs = _needs(kernel, launch, op, attrs, inputs, outputs)
        if needs is None and not self.is_run:
            return (), None
        if needs is None:
            raise PlanFormatError(f"is not taken by its kernel {launch.kernel}")
        _check_scratch(scratch, needs.workspace_bytes)
        # A program comes with the plan, so what may lie over what is its kernel's word alone.
        pairs = (
            needs.in_place
            if kernel_op.get(op)
            else (*needs.in_place, *input_output_aliases.get(op))
        )
        return pairs, needs.prepacked_input

    def _check_homes(
        self,
        launch: Launch,
        inputs: Views,
        outputs: Views,
        made: set[RegisterId],
        taken: set[RegisterId],
    ) -> None:
        """Check that outputs go to temporaries, own edges, or over what the launch reads.

        That is a variable that the op updates, or a token of its actor: whether it may lie over the
        input is asked of the kernel, and that nobody else reads it then is proven by the versions.
        """
        over = dict(input_output_aliases.get(find_op(launch.op)))
        # A variable that a copy writes over is none of the launch's operands (`chain_actors`).
        is_copy = find_op(launch.op) is COPY_TO
        for position, view in enumerate(outputs):
            register = self.plan.registers[view.register]
            if position in over and not is_copy and inputs[over[position]] != view:
                raise PlanFormatError(
                    f"does not write output {position} over its own input, which it updates"
                )
            # Only these belong to the actor while it fires; a token of another one may still be
            # read.
            is_free = register.kind is RegisterKind.TEMPORARY or register.id in made
            # In another shape, perhaps: that it is the same bytes is asked with the kernel's pairs.
            is_read = (view.register, view.extent) in [(x.register, x.extent) for x in inputs]
            is_token = register.id in taken and (position in over or is_read)
            is_over = is_token or (position in over and register.kind is RegisterKind.VARIABLE)
            if not (is_free or is_over):
                raise PlanFormatError(
                    f"writes to register {register.name!r} ({register.kind.value}), which is none"
                    " of its outputs"
                )

    def _check_workspace(self, scratch: View | None, kept: RegisterId | None) -> None:
        """Check that scratch is a temporary, or what the launch keeps of that very input."""
        if scratch is None:
            return
        register = self.plan.registers[scratch.register]
        is_temporary = register.kind is RegisterKind.TEMPORARY
        # Two ways only: scratch that nobody keeps, or the block of the very input that the kernel
        # packs.
        if is_temporary != (kept is None) or self.packed.get(register.id) != kept:
            raise PlanFormatError(
                f"uses register {register.name!r} as workspace, which is no temporary of its own"
            )


def _needs(
    kernel: Kernel[object] | None,
    launch: Launch,
    op: Op,
    attrs: Mapping[str, AttrValue],
    inputs: Views,
    outputs: Views,
) -> KernelNeeds | None:
    op_name, op_attrs = (COPY.name, {}) if op is COPY_TO else (op.name, attrs)
    if kernel is None or kernel.op not in (op_name, kernel_op.get(op) or op_name):
        computes = "unknown" if kernel is None else f"a kernel of {kernel.op}"
        raise PlanFormatError(
            f"names kernel {launch.kernel!r}, which is {computes} on this machine"
        )
    try:
        return catalogue.needs_of(
            kernel,
            MappingProxyType(dict(op_attrs)),
            tuple([_operand(view) for view in inputs]),
            tuple([_operand(view) for view in outputs]),
        )
    except _FOREIGN as error:
        raise PlanFormatError(f"is refused by {launch.kernel}: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    """Return what an op or a kernel said; it is no bug of ours where the plan is at fault."""
    if isinstance(error, InternalError):
        return error.reason
    return f"no {error}" if isinstance(error, LookupError) else str(error)


def _op_of(launch: Launch) -> Op:
    try:
        op = find_op(launch.op)
    except KeyError:
        raise PlanFormatError(
            f"names an op that is not known here: {launch.op!r}; import the module that defines it"
        ) from None
    if is_source.get(op):
        raise PlanFormatError("names an op that no kernel of this machine computes")
    return op


def _check_meeting(
    plan: Plan, launch: Launch, op: Op, inputs: Views, outputs: Views, scratch: View | None
) -> Pairs:
    """Check a launch that meets other ranks; return the pairs that may share bytes.

    The transport has kernels of its own, and asks the other ranks whether they come to the same:
    here it is asked that it may be given these bytes.
    """
    attrs = dict(launch.attrs)
    if launch.kernel != op.name or scratch is not None:
        raise PlanFormatError(
            f"is a collective with kernel {launch.kernel!r}, which belongs to no transport"
        )
    mesh, group = plan.mesh, attrs.get("group")
    extents = dict(zip(mesh.names, mesh.shape, strict=True))
    if extents.get(str(group)) != attrs.get("num_ranks"):
        raise PlanFormatError(
            f"is a collective of {attrs.get('num_ranks')!r} ranks along {group!r}, and the mesh"
            f" is '{mesh}'"
        )
    for view in inputs:
        if not _is_dense(view):
            raise PlanFormatError(f"is a collective with strides {view.strides_bytes}")
    return ((0, 0),) if op is ALL_REDUCE else ()


def _check_types(op: Op, attrs: Attrs, inputs: Views, outputs: Views) -> None:
    types = tuple([view.type for view in inputs])
    output_types = tuple([view.type for view in outputs])
    try:
        expected = infer_type.get(op)(types, attrs)
    except _FOREIGN as error:
        raise PlanFormatError(f"does not fit its op: {_reason(error)}") from None
    if expected != output_types:
        raise PlanFormatError(
            f"computes {_listed(expected)}, and the plan has {_listed(output_types)}"
        )


def _check_scratch(scratch: View | None, needed: int) -> None:
    if scratch is None:
        if needed:
            raise PlanFormatError(f"needs {needed} bytes of workspace and has none")
        return
    size = scratch.type.size_bytes
    # Aligned to 64 bytes, a line of the cache.
    is_block = scratch.type.dtype is DType.UINT8 and scratch.type.rank == 1 and _is_dense(scratch)
    if not is_block or scratch.offset_bytes % _ALIGNMENT or size < needed:
        raise PlanFormatError(f"needs {needed} bytes of workspace, has {scratch.type}")


def _check_bytes(inputs: Views, outputs: Views, scratch: View | None, pairs: Pairs) -> None:
    """Check that what is written shares no byte with anything but in a listed pair.

    Two registers that are used by one launch live at once, so they share none
    (`compiler.verify.verify`).
    """
    targets = outputs if scratch is None else (*outputs, scratch)
    registers = {view.register for view in targets}
    if _lie_in_turn(targets) and not {v.register for v in inputs} & registers:
        return
    for position, view in enumerate(targets):
        for other in targets[:position]:
            if _is_shared(view, other):
                raise PlanFormatError(f"writes the same bytes twice, the second as {view.type}")
        for index, operand in enumerate(inputs):
            if not _is_shared(view, operand):
                continue
            is_whole = _is_dense(operand) and operand.extent == view.extent
            if (position, index) not in pairs or not is_whole:
                raise PlanFormatError(f"writes output {position} over bytes of its input {index}")


def _lie_in_turn(views: Views) -> bool:
    """Whether of each register every view ends before the next begins."""
    ranges = sorted([(view.register, *view.extent) for view in views])
    return all([a[0] != b[0] or a[2] <= b[1] for a, b in pairwise(ranges)])


def _is_shared(one: View, other: View) -> bool:
    return one.register == other.register and not extent_of(one).is_apart(extent_of(other))


def _operand(view: View) -> Operand:
    return Operand(view.type, 0, view.strides_bytes)


def _is_dense(view: View) -> bool:
    return _operand(view).is_dense


def _listed(types: tuple[TensorType, ...]) -> str:
    return f"({', '.join([str(type_) for type_ in types])})"
