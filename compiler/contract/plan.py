"""The plan as one value, plans of bodies within it, and the check that its tables fit together.

`check_references` runs first on every plan. What follows (`compiler.verify.verify`, the loader)
indexes one table by the numbers of another; a number out of range would raise an IndexError, or
select the wrong row. It also checks what a row says of its own parts: one stride per axis, one
offset per slot, a tensor's bytes within what a machine can address.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, TypeVar, cast

from compiler.contract.attrs import PlainValue
from compiler.contract.codec import (
    MAX_BYTES,
    Bounds,
    DecodeError,
    PlanAttribute,
    from_msgpack,
    from_row,
    register_attribute,
    to_msgpack,
    to_row,
)
from compiler.contract.errors import InternalError, PlanFormatError
from compiler.contract.files import read_regular, user_path
from compiler.contract.html_table import html_table
from compiler.contract.placement import Hosts, Mesh, hosts_of, mesh_of
from compiler.contract.plan_tables import (
    PORTED,
    Actor,
    Arena,
    Constant,
    DeviceMemory,
    ElidedConcat,
    Field,
    Launch,
    Recomputation,
    Register,
    RegisterKind,
    SourceLine,
    Stream,
    Variable,
    VersionSlice,
    View,
)
from compiler.contract.sbp import is_part
from compiler.contract.types import ShardingSpec, TensorType
from memory.liveness import align_up

PLAN_FORMAT = 6
_MAGIC = "actorflow-plan"
MOST_PLAN_BYTES = 1 << 30
"""The size limit of a plan file, which is held in memory whole while it is decoded."""

T = TypeVar("T")


def proof(check: Callable[[Plan], T]) -> Callable[[Plan], T]:
    """Let a check of a plan run once per plan and process; a decorator.

    A plan never changes, so what held once holds. An error is not kept: it is raised again.
    """

    @functools.wraps(check)
    def once(plan: Plan) -> T:
        # Keyed by the wrapper itself, so that two checks of one plan never share an entry.
        if once not in plan.proofs:
            plan.proofs[once] = check(plan)
        return cast("T", plan.proofs[once])

    return once


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Plan:
    """Everything the runtime obeys; `compiler.contract.plan_tables` says how to read it."""

    name: str
    streams: tuple[Stream, ...]
    arenas: tuple[Arena, ...]
    registers: tuple[Register, ...]
    views: tuple[View, ...]
    actors: tuple[Actor, ...]
    fields: tuple[Field, ...]
    variables: tuple[Variable, ...]
    constants: tuple[Constant, ...]
    sources: tuple[SourceLine, ...]
    memory: tuple[DeviceMemory, ...]
    graph_hash: str
    target: str
    options: tuple[tuple[str, PlainValue], ...]
    recomputation: tuple[Recomputation, ...] = ()
    parts: tuple[VersionSlice, ...] = ()
    joins: tuple[ElidedConcat, ...] = ()
    proofs: dict[Callable[..., object], object] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """What `proof`s returned for this plan. No part of its value, nor of its file."""

    def __repr__(self) -> str:
        """Name it in a line; all of a plan fills pages, which `actorflow plan` shows."""
        launches = sum([len(actor.launches) for actor in self.actors])
        size = sum([arena.size_bytes for arena in self.arenas])
        where = ", ".join(dict.fromkeys([str(arena.device) for arena in self.arenas]))
        return (
            f"Plan({self.name!r} {self.graph_hash[:12]} on {where}: {len(self.actors)} actors,"
            f" {launches} launches, {size:,} bytes)"
        )

    def _repr_html_(self) -> str:
        rows: dict[str, object] = {
            "actors": len(self.actors),
            "launches a step": sum([len(actor.launches) for actor in self.actors]),
        }
        for arena in self.arenas:
            rows[f"memory of {arena.place}"] = f"{arena.size_bytes:,} bytes"
        rows |= {"ranks": self.mesh.num_ranks, "graph": self.graph_hash[:12]}
        return html_table(f"Plan {self.name}", rows)

    def to_bytes(self) -> bytes:
        """Serialise. Equal plans give equal bytes."""
        body = to_msgpack(to_row(self))
        head = {"magic": _MAGIC, "format": PLAN_FORMAT, "digest": _digest(body), "body": body}
        return to_msgpack(head)

    @property
    def fingerprint(self) -> str:
        """Hash of the whole plan, 32 hexadecimal digits."""
        return hashlib.blake2b(self.to_bytes(), digest_size=16).hexdigest()

    def save(self, path: str | Path) -> None:
        """Write the plan to a file."""
        Path(user_path(path)).write_bytes(self.to_bytes())

    @staticmethod
    def from_bytes(data: bytes, where: str = "plan") -> Plan:
        """Read a plan back.

        Raises PlanFormatError when it is damaged or of another format version.
        """
        try:
            plan = from_row(Plan, from_msgpack(_body_of(data, where)))
            check_references(plan)
        except DecodeError as error:
            reason = f"damaged plan: {error}"
        except InternalError as error:
            reason = error.reason  # a file may come from anywhere: it is no bug of ours
        else:
            return plan
        raise PlanFormatError(f"{where}: {reason}; compile the job again")

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a plan file.

        Raises PlanFormatError, or OSError when it cannot be read or is no regular file.
        """
        data = read_regular(user_path(path), MOST_PLAN_BYTES, is_link_followed=True)
        return Plan.from_bytes(data, str(path))

    @property
    def state(self) -> tuple[Variable, ...]:
        """The variables whose values between two steps are part of the training state."""
        others = ("scratch", "rounded", "packed", "numbers", "evaluated")
        return tuple([v for v in self.variables if v.role not in others])

    @property
    def mesh(self) -> Mesh:
        """The ranks that train together, of which some have this plan."""
        return mesh_of(self.option("mesh", ()))

    @property
    def hosts(self) -> Hosts | None:
        """The hosts of these ranks and what joins them; None where all are on one."""
        return hosts_of(self.option("hosts", ()))

    @property
    def batches_per_step(self) -> int:
        """How many batches one update consumes."""
        return self.int_option("accumulate", 1)

    def option(self, name: str, default: PlainValue = None) -> PlainValue:
        """Return a compile option recorded in the plan."""
        # Asked once per step: a dict made for it would take as long as some launches.
        for key, value in self.options:
            if key == name:
                return value
        return default

    def int_option(self, name: str, default: int) -> int:
        """Return a compile option that is a number."""
        value = self.option(name, default)
        return value if isinstance(value, int) else default


def _digest(body: bytes) -> str:
    # Against damage, not forgery: anyone can compute it. The readers check every value besides.
    return hashlib.blake2b(body, digest_size=16).hexdigest()


def _body_of(data: bytes, where: str) -> bytes:
    """Return the row of a plan in the bytes of its file. Raises PlanFormatError."""
    try:
        head = from_msgpack(data)
    except DecodeError as error:
        raise PlanFormatError(f"{where} is not a plan file, or it is damaged: {error}") from None
    if not isinstance(head, dict) or head.get("magic") != _MAGIC:
        raise PlanFormatError(f"{where} is not an actorflow plan file")
    # Before the hash: another format may hash something else.
    if head.get("format") != PLAN_FORMAT:
        raise PlanFormatError(
            f"{where} has plan format {head.get('format')!a:.40}, this actorflow reads"
            f" format {PLAN_FORMAT}; compile the job again with this version"
        )
    body = head.get("body")
    if not isinstance(body, bytes) or _digest(body) != head.get("digest"):
        raise PlanFormatError(f"{where} is damaged: its content does not match its hash")
    return body


# The plan of a body, as an attribute of the launch that runs it: a frame within the outer plan.
#
# A body is compiled as a job is: its steps are those of the loop. What it shares with the outside
# are variables, the carries and constants, which lie where the operands of the launch lie; entries
# of the xs are its batch, entries of the ys its outputs. All else is its *frame*: bytes of its own,
# laid out when it was compiled, for which the outer plan gives the launch a workspace.

Number = Annotated[int, Bounds(0, 1 << 16)]


@register_attribute("sub_plan")
@dataclass(frozen=True, slots=True, eq=False)
class SubPlan(PlanAttribute):
    """A plan with the types of its operands and results, in the order of the launch's.

    Operand i is variable or field `str(i)` of the plan, and result i is field `out{i}`, where the
    plan has them: what no launch touches has no place in it. The first `carries` operands are
    carries, and the first results; the `xs` after them are operands by the step.
    """

    plan: Plan
    operands: tuple[TensorType, ...]
    results: tuple[TensorType, ...]
    carries: Number
    xs: Number

    @property
    def launches(self) -> tuple[Launch, ...]:
        """What a step runs, in order."""
        return tuple([launch for actor in self.plan.actors for launch in actor.launches])

    @property
    def duration_ns(self) -> float:
        """The estimated time of a step."""
        return sum([launch.duration_ns for launch in self.launches])

    def check(self) -> None:
        """Check that the plan's variables and fields are the operands and results.

        Raises InternalError.
        """
        # `launches` strings the actors together; that is the order of a step only for one chain.
        if [len(actor.launches) > 0 for actor in self.plan.actors].count(True) > 1:
            raise InternalError("a step of a body is several chains")
        elsewhere = [r for r in self.plan.registers if r.size_bytes and r.arena]
        if elsewhere or self.plan.constants:
            raise InternalError("a body has bytes of its own besides its frame")
        names = [str(i) for i in range(len(self.operands))]
        types = dict(zip(names, self.operands, strict=True))
        types |= {f"out{i}": type_ for i, type_ in enumerate(self.results)}
        # Operands are carries, then xs, then constants. xs and results are fields: one entry per
        # step.
        outside = names[: self.carries] + names[self.carries + self.xs :]
        views = [(v.name, v.view, v.name in outside) for v in self.plan.variables]
        views += [(f.name, f.view, f.name not in outside) for f in self.plan.fields]
        for name, view, is_right in views:
            if not is_right or types.get(name) != self.plan.views[view].type:
                raise InternalError(f"a body has no operand or result {name!r} of that type")


@dataclass(frozen=True, slots=True)
class BodyFrame:
    """The offsets of a body's own registers in its workspace.

    `offsets_bytes` has, per register, its place; -1 for one that lies outside, in an operand.
    """

    size_bytes: int
    offsets_bytes: tuple[int, ...]


def frame_of(plan: Plan) -> BodyFrame:
    """Return the frame of a body's plan: its arena, without what lies outside or in further slots.

    What is left out lives through the whole plan, so no other register has its bytes.
    """
    alignment = plan.arenas[0].alignment
    removed: list[tuple[int, int]] = []
    for register in plan.registers:
        if not register.size_bytes:
            continue
        # A frame has one offset per register: slots from 1 on go, and all slots of what lies
        # outside.
        first = 0 if _is_outside(register) else 1
        size = align_up(register.size_bytes, alignment)
        removed += [(offset, size) for offset in register.offsets_bytes[first:]]
    removed.sort()

    # What is removed lives as long as the plan, so it shares no byte with what stays: a shift
    # by the sizes below keeps the distances.
    def moved(offset: int) -> int:
        return offset - sum([size for start, size in removed if start < offset])

    offsets = [
        -1 if _is_outside(r) else moved(r.offsets_bytes[0] if r.size_bytes else 0)
        for r in plan.registers
    ]
    ends = [o + r.size_bytes for o, r in zip(offsets, plan.registers, strict=True) if o >= 0]
    return BodyFrame(align_up(max(ends, default=0), alignment), tuple(offsets))


def _is_outside(register: Register) -> bool:
    return register.kind is RegisterKind.VARIABLE


def sub_plans(plan: Plan) -> Iterator[SubPlan]:
    """Yield the distinct plans of bodies in a plan, those within others first."""
    seen: set[SubPlan] = set()
    for actor in plan.actors:
        for launch in actor.launches:
            for _, value in launch.attrs:
                if isinstance(value, SubPlan) and value not in seen:
                    seen.add(value)
                    yield from sub_plans(value.plan)
                    yield value


MAX_RANK = 32
"""Axes of a tensor: what every numpy takes."""

MAX_STREAMS = 256
"""Threads that a plan may ask for; those of this compiler have a dozen."""

_EDGES = (RegisterKind.DATA, RegisterKind.CONTROL)


@proof
def check_references(plan: Plan) -> None:
    """Check a plan. Raises InternalError naming the row. O(size of the plan)."""
    for inner in sub_plans(plan):
        check_references(inner.plan)
    _check_ids(plan)
    mesh_of(plan.option("mesh", ()))
    hosts_of(plan.option("hosts", ()))
    for index, register in enumerate(plan.registers):
        _check_register(plan, index, register)
    for index, view in enumerate(plan.views):
        _check_view(plan, index, view)
    for actor in plan.actors:
        _check_actor(plan, actor)
    for index, join in enumerate(plan.joins):
        _check_join(plan, f"joins[{index}]", join)
    _check_fields(plan)
    _check_state(plan)


def _check_ids(plan: Plan) -> None:
    for name, rows in (
        ("streams", plan.streams),
        ("registers", plan.registers),
        ("actors", plan.actors),
    ):
        ids = [row.id for row in rows]
        if ids != list(range(len(ids))):
            wrong = next(i for i, id_ in enumerate(ids) if i != id_)
            raise InternalError(f"{name}[{wrong}] has the id {ids[wrong]}, expected {wrong}")
    if len(plan.streams) > MAX_STREAMS:
        raise InternalError(
            f"{len(plan.streams)} streams are {len(plan.streams)} threads; {MAX_STREAMS} at most"
        )
    _check_names("actor", [actor.name for actor in plan.actors])
    _check_names("variable", [variable.name for variable in plan.variables])
    _check_names("option", [name for name, _ in plan.options])
    if not plan.arenas or len(plan.memory) != len(plan.arenas):
        raise InternalError(f"{len(plan.arenas)} arenas have {len(plan.memory)} accounts")


def _check_register(plan: Plan, index: int, register: Register) -> None:
    _check_place(f"registers[{index}].arena", register.arena, plan.arenas)
    name = register.name
    if len(register.offsets_bytes) != register.num_slots:
        raise InternalError(f"register {name!r} has offsets for other than its slots")
    if register.interval[0] > register.interval[1]:
        raise InternalError(f"register {name!r} ends before it starts: {register.interval}")
    if register.kind not in _EDGES and register.num_slots != 1:
        raise InternalError(f"register {name!r} is no edge and has {register.num_slots} slots")
    if register.kind is RegisterKind.CONTROL and register.size_bytes:
        raise InternalError(f"register {name!r} holds credits and has {register.size_bytes} bytes")


def _check_view(plan: Plan, index: int, view: View) -> None:
    _check_place(f"views[{index}].register", view.register, plan.registers)
    type_ = view.type
    if not len(view.strides_bytes) == len(type_.shape) <= MAX_RANK:
        raise InternalError(
            f"views[{index}] of rank {len(type_.shape)} has {len(view.strides_bytes)} strides;"
            f" there must be as many, and {MAX_RANK} at most"
        )
    if type_.size_bytes > MAX_BYTES:
        raise InternalError(f"views[{index}] of type {type_} is larger than any memory")
    item = type_.dtype.itemsize
    if view.offset_bytes % item or any([step % item for step in view.strides_bytes]):
        raise InternalError(f"views[{index}] has elements of {type_.dtype} at odd addresses")


def _check_actor(plan: Plan, actor: Actor) -> None:
    where = f"actors[{actor.id}]"
    _check_place(f"{where}.stream", actor.stream, plan.streams)
    ports = [port.register for port in actor.inputs + actor.outputs]
    _check_places(f"{where} has a port", ports, plan.registers)
    if len(set(ports)) != len(ports):
        raise InternalError(f"{where} ({actor.name!r}) has two ports on one register")
    for register in ports:
        if plan.registers[register].kind not in _EDGES:
            name = plan.registers[register].name
            raise InternalError(f"{where} has a port on register {name!r}, which is no edge")
    if actor.launches and actor.kind in PORTED:
        raise InternalError(f"{where} is a {actor.kind.value}, which has no launches")
    for index, launch in enumerate(actor.launches):
        place = f"{where}.launches[{index}]"
        _check_places(f"{place} has an operand", (*launch.inputs, *launch.outputs), plan.views)
        if launch.workspace is not None:
            _check_place(f"{place}.workspace", launch.workspace, plan.views)
        _check_place(f"{place}.source", launch.source, plan.sources)
        counts = (len(launch.reads), len(launch.writes))
        if counts != (len(launch.inputs), len(launch.outputs)):
            raise InternalError(f"{place} names {counts} versions for other than its operands")
        # -1 - k names part k (`Launch.reads`). A number from 0 on is a version: no table holds
        # those.
        _check_places(f"{place} reads part", [-1 - v for v in launch.reads if v < 0], plan.parts)


def _check_join(plan: Plan, where: str, join: ElidedConcat) -> None:
    """Check that the parts of a join are views that follow one another along its axis."""
    _check_places(f"{where} has a view", (*join.inputs, join.output), plan.views)
    _check_place(f"{where}.source", join.source, plan.sources)
    _check_places(f"{where} reads part", [-1 - v for v in join.reads if v < 0], plan.parts)
    whole = plan.views[join.output]
    _check_place(f"{where}.axis", join.axis, whole.type.shape)
    if len(join.reads) != len(join.inputs):
        raise InternalError(f"{where} names {len(join.reads)} versions for other than its parts")
    axis, offset, stop = join.axis, whole.offset_bytes, 0
    rank = len(whole.type.shape)
    for view in [plan.views[index] for index in join.inputs]:
        ranks = (len(view.type.shape), len(view.strides_bytes), len(whole.strides_bytes))
        if ranks != (rank, rank, rank):
            raise InternalError(f"{where} has a part that is no slice of {whole.type}: {view.type}")
        shape = (*whole.type.shape[:axis], view.type.shape[axis], *whole.type.shape[axis + 1 :])
        # The stride of an axis of one element leads nowhere.
        strides = [
            stride if n > 1 else step
            for n, stride, step in zip(shape, view.strides_bytes, whole.strides_bytes, strict=True)
        ]
        # Part i begins where the parts before it end; `stop` counts their slices along the axis.
        place = whole.register, offset + stop * whole.strides_bytes[axis]
        is_slice = strides == list(whole.strides_bytes) and place == (
            view.register,
            view.offset_bytes,
        )
        if not is_slice or view.type != TensorType(whole.type.dtype, shape):
            raise InternalError(f"{where} has a part that is no slice of {whole.type} at its place")
        stop += shape[axis]
    if stop != whole.type.shape[axis]:
        raise InternalError(f"{where} has parts of {stop} of {whole.type.shape[axis]} slices")


def _check_fields(plan: Plan) -> None:
    names: dict[int, list[str]] = {}
    for index, item in enumerate(plan.fields):
        _check_place(f"fields[{index}].register", item.register, plan.registers)
        _check_place(f"fields[{index}].view", item.view, plan.views)
        _check_place(f"fields[{index}].source", item.source, plan.sources)
        if plan.views[item.view].register != item.register:
            raise InternalError(f"fields[{index}] ({item.name!r}) shows bytes of another register")
        if plan.registers[item.register].kind is not RegisterKind.DATA:
            raise InternalError(f"fields[{index}] ({item.name!r}) is of a register without data")
        _check_part(plan, f"field {item.name!r}", item.sharding, plan.views[item.view].type)
        names.setdefault(item.register, []).append(item.name)
    for register, field_names in names.items():
        _check_names(f"field of register {plan.registers[register].name!r}", field_names)


def _check_part(plan: Plan, what: str, part: ShardingSpec | None, type_: TensorType) -> None:
    """Check that some rank of the plan's mesh has such a part, and that any machine has wholes."""
    if part is None:
        return
    mesh = plan.mesh
    if not is_part(part, mesh, type_.shape):
        raise InternalError(f"{what} is {type_}, which is no shard of {part}; the mesh is {mesh}")
    whole = TensorType(type_.dtype, part.shape)
    if not whole.is_possible or whole.size_bytes > MAX_BYTES:
        raise InternalError(f"{what} is a part of {whole}, which is larger than any memory")


def _check_state(plan: Plan) -> None:
    """Check variables and constants: each has a register of its own kind to itself."""
    views = [row.view for row in plan.variables], [row.view for row in plan.constants]
    kinds = ("variables", RegisterKind.VARIABLE), ("constants", RegisterKind.CONSTANT)
    for (name, kind), view_ids in zip(kinds, views, strict=True):
        holders: set[int] = set()
        for index, view in enumerate(view_ids):
            _check_place(f"{name}[{index}].view", view, plan.views)
            register = plan.registers[plan.views[view].register]
            if register.kind is not kind or register.id in holders:
                raise InternalError(
                    f"{name}[{index}] is in register {register.name!r}, which is"
                    f" {'that of another row' if register.kind is kind else register.kind.value}"
                )
            holders.add(register.id)
        without = [r.name for r in plan.registers if r.kind is kind and r.id not in holders]
        if without:
            raise InternalError(f"register {without[0]!r} is a {kind.value} that nothing names")
    for variable in plan.variables:
        type_ = plan.views[variable.view].type
        _check_part(plan, f"variable {variable.name!r}", variable.sharding, type_)
    for index, constant in enumerate(plan.constants):
        size_bytes = plan.views[constant.view].type.size_bytes
        if len(constant.data) != size_bytes:
            raise InternalError(
                f"constants[{index}] has {len(constant.data)} bytes for a view of {size_bytes}"
            )


def _check_place(what: str, place: int, table: Sequence[object]) -> None:
    if not 0 <= place < len(table):
        raise InternalError(f"{what} is {place}, and the table has {len(table)} rows")


def _check_places(what: str, places: Iterable[int], table: Sequence[object]) -> None:
    indices = tuple(places)
    if indices and not 0 <= min(indices) <= max(indices) < len(table):
        wrong = next(place for place in indices if not 0 <= place < len(table))
        raise InternalError(f"{what} {wrong}, and the table has {len(table)} rows")


def _check_names(what: str, names: Sequence[str]) -> None:
    if len(set(names)) != len(names):
        # Quadratic, but on the way to an error only.
        twice = next(name for i, name in enumerate(names) if name in names[:i])
        raise InternalError(f"there are two of the {what} {twice!r}")
