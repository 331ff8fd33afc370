"""Prove a plan before it runs here: the one way through, for compiled plans and for those of files.

A plan is trusted in nothing. The compiler's proof (`compiler.verify.verify`) and the order of
accesses (`actors.race.race`) hold a plan against itself; here it is also held against this
installation: what our ops and kernels say of every launch, the ports that a run binds, and the
memory of the machine.

What does not fit is the plan's fault, whatever part finds it, and a bug of ours only where the plan
was compiled in this process: the message says to compile the job again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from actorflow.compile.check_launches import check_launches
from actorflow.compile.plan_facts import losses_of
from actorflow.tensor.initial_values import INITIALISERS, whole_type
from actors.loop.load import num_phases
from actors.race.race import RaceError, check_races
from compiler.contract.accounting import largest_tensor
from compiler.contract.errors import InternalError, OutOfMemory, PlanFormatError
from compiler.contract.placement import DeviceKind, Memory
from compiler.contract.plan import Plan, check_references, proof, sub_plans
from compiler.contract.plan_tables import (
    PORTED,
    Actor,
    ActorKind,
    Arena,
    Field,
    Port,
    RegisterKind,
    Variable,
    View,
    is_evaluation_actor,
)
from compiler.contract.types import DType, TensorType
from compiler.ops.primitives.sources import (
    EVALUATED,
    MOST_AT_FIRST,
    NUMBERS,
    PACKED,
    ROLES,
    ROUNDED,
    SCRATCH,
)
from compiler.verify.verify import verify_plan
from memory.report import format_bytes

# What a run takes for granted of the parts of a plan that it binds by name: ports, their fields,
# and variables with a role. `actorflow.run.training_run` gives a plan a data source, a metrics
# sink, perhaps a writer of checkpoints and an evaluation, and reads its counters.

_COUNTER = TensorType(DType.INT64, ())
_KINDS = {
    "data": ActorKind.SOURCE,
    "metrics": ActorKind.SINK,
    "checkpoint": ActorKind.SINK,
    "eval_data": ActorKind.SOURCE,
    "eval_metrics": ActorKind.SINK,
}


def check_plan_interface(plan: Plan, firings: Sequence[int]) -> None:
    """Check a verified plan; `firings` are those of one period. Raises PlanFormatError."""
    actors = {actor.name: actor for actor in plan.actors}
    _check_ports(plan, actors)
    steps, batches = _counts(plan)
    _check_metrics(plan, actors["metrics"], steps, batches)
    flushed = {"snapshot", "metrics"} if steps > 1 else {"snapshot"}
    for actor in plan.actors:
        if actor.is_flushed != (actor.name in flushed):
            raise PlanFormatError(
                f"actor {actor.name!r} has is_flushed={actor.is_flushed}, which its name"
                " contradicts"
            )
    _check_batches(plan, actors["data"])
    if "eval_data" in actors:
        _check_evaluation(plan, actors)
    if "checkpoint" in actors:
        _check_snapshot(plan, actors)
    for variable in plan.variables:
        _check_variable(plan, variable)
    if batches > 1 and all([variable.name != "batches" for variable in plan.variables]):
        raise PlanFormatError("its steps have several batches, and no variable 'batches' counts")
    feeder = actors["data"].id
    # A period that ends amid a step would leave gradients of half a step behind.
    per_period, rest = divmod(firings[feeder], batches)
    if rest or not per_period:
        raise PlanFormatError(f"a period has {firings[feeder]} batches, a step has {batches}")


def _ports_of(actor: Actor) -> tuple[Port, ...]:
    return actor.inputs + actor.outputs


def _is_on_host(plan: Plan, port: Port) -> bool:
    register = plan.registers[port.register]
    arena = plan.arenas[register.arena] if register.kind is RegisterKind.DATA else None
    return arena is None or arena.device.kind is DeviceKind.HOST


def _check_ports(plan: Plan, actors: dict[str, Actor]) -> None:
    for actor in plan.actors:
        expected = _KINDS.get(actor.name)
        if actor.kind is not expected and (expected is not None or actor.kind in PORTED):
            raise PlanFormatError(
                f"actor {actor.name!r} is a {actor.kind.value} with an unknown name"
            )
        if actor.kind in PORTED and not plan.streams[actor.stream].has_thread:
            raise PlanFormatError(f"{actor.kind.value} {actor.name!r} has no thread of its own")
        if actor.kind in PORTED and any([not _is_on_host(plan, p) for p in _ports_of(actor)]):
            raise PlanFormatError(f"{actor.kind.value} {actor.name!r} sees memory of a device")
        if actor.name != "data" and not actor.inputs:
            raise PlanFormatError(f"actor {actor.name!r} waits for nothing, so it would never end")
    for name in ("data", "metrics"):
        if name not in actors:
            raise PlanFormatError(f"there is no actor {name!r}")
    is_evaluated = bool(plan.int_option("evaluate_every", 0))
    if not is_evaluated == ("eval_data" in actors) == ("eval_metrics" in actors):
        raise PlanFormatError("its options and its actors disagree on whether it evaluates")
    if ("checkpoint" in actors) != ("snapshot" in actors):
        raise PlanFormatError("a plan has a snapshot and its writer, or neither")


def _counts(plan: Plan) -> tuple[int, int]:
    """Return the steps per firing of the metrics, and the batches per step."""
    for name in ("metrics_every", "accumulate", "evaluate_every", "evaluate_batches"):
        value = plan.option(name, 1)
        if type(value) is not int or value < (0 if name.startswith("evaluate") else 1):
            raise PlanFormatError(f"option {name} is {value!a:.40}")
    return plan.int_option("metrics_every", 1), plan.int_option("accumulate", 1)


def _check_metrics(plan: Plan, sink: Actor, steps: int, batches: int) -> None:
    fields = _fields_of(plan, sink.inputs)
    for port in sink.inputs:
        is_data = plan.registers[port.register].kind is RegisterKind.DATA
        if is_data and port.rate not in (steps, steps * batches):
            raise PlanFormatError(
                f"metrics takes {port.rate} rows per firing, and the options say {steps * batches}"
            )
    for field in fields:
        type_ = plan.views[field.view].type
        if type_.dtype is DType.BFLOAT16:
            raise PlanFormatError(f"output {field.name!r} of {type_} cannot be handed on")
    types = {field.name: plan.views[field.view].type for field in fields}
    for name in losses_of(plan):
        if name not in types:
            raise PlanFormatError(f"it trains and has no output {name!r}, which a run monitors")
        if types[name].rank:
            raise PlanFormatError(f"the loss {name!r} is not a single number")
    _check_distinct(fields)


def _check_batches(plan: Plan, source: Actor) -> None:
    """Check a data source: one register, one batch at a time, of types that numpy has."""
    if len(source.outputs) != 1 or source.outputs[0].rate != 1:
        raise PlanFormatError(f"source {source.name!r} must give one batch per firing")
    register = source.outputs[0].register
    if plan.registers[register].kind is not RegisterKind.DATA:
        raise PlanFormatError(f"source {source.name!r} gives no data")
    if source.name == "data" and source.inputs:
        raise PlanFormatError("the data waits for something; only an evaluation's does")
    if any([plan.registers[p.register].kind is RegisterKind.DATA for p in source.inputs]):
        raise PlanFormatError(f"source {source.name!r} reads data of the plan")
    for field in _fields_of(plan, source.outputs):
        if plan.views[field.view].type.dtype is DType.BFLOAT16:
            raise PlanFormatError(f"batch field {field.name!r} is of a type that no source gives")


def _check_evaluation(plan: Plan, actors: dict[str, Actor]) -> None:
    _check_batches(plan, actors["eval_data"])
    batches = plan.int_option("evaluate_batches", 0)
    for port in actors["eval_data"].inputs:
        if port.rate != 1:
            raise PlanFormatError(f"an evaluation's batches wait for {port.rate} credits each")
    for port in actors["eval_metrics"].inputs:
        is_data = plan.registers[port.register].kind is RegisterKind.DATA
        if is_data and port.rate != batches:
            raise PlanFormatError(f"an evaluation reads {port.rate} batches of {batches}")
    fields = _fields_of(plan, actors["eval_metrics"].inputs)
    if any([plan.views[field.view].type.dtype is DType.BFLOAT16 for field in fields]):
        raise PlanFormatError("an evaluation's outputs are of a type that is not handed on")
    _check_distinct(fields)


def _check_snapshot(plan: Plan, actors: dict[str, Actor]) -> None:
    """Check that a snapshot stages the variables, each with its type and its name."""
    writer, snapshot = actors["checkpoint"], actors["snapshot"]
    _check_staged(snapshot, actors.get("snapshot.fetch"), writer)
    types = {v.name: plan.views[v.view].type for v in plan.state}
    fields = {f.name: plan.views[f.view].type for f in _fields_of(plan, writer.inputs)}
    wrong = [name for name, type_ in fields.items() if types.get(name) != type_]
    if wrong or "step" not in fields:
        raise PlanFormatError(f"a snapshot stages {wrong or 'no step'}, no variable of that type")
    homes = {plan.views[v.view].register: v.name for v in plan.state}
    trained = {
        homes.get(plan.views[view].register)
        for actor in plan.actors
        if not is_evaluation_actor(actor.name)
        for launch in actor.launches
        for view in (*launch.inputs, *launch.outputs)
    }
    if not trained - {None} <= set(fields):
        lost = sorted(str(name) for name in trained - {None} - set(fields))
        raise PlanFormatError(f"a snapshot leaves out {lost}, which the steps use")
    # Followed backwards over the copies, so that no variable is saved under the name of another
    # one.
    names = {plan.views[f.view]: f.name for f in _fields_of(plan, writer.inputs)}
    if "snapshot.fetch" in actors:
        ways = _ways(plan, actors["snapshot.fetch"])
        names = {start: names.get(end, "") for start, end in ways}
    for start, end in _ways(plan, snapshot):
        came = homes.get(start.register)
        if came is None or names.get(end) != came:
            raise PlanFormatError(f"a snapshot writes {came!r} under another name")


def _ways(plan: Plan, copier: Actor) -> list[tuple[View, View]]:
    """Return what copies of an actor go from and to, tensor by tensor."""
    return [
        (plan.views[start], plan.views[end])
        for launch in copier.launches
        for start, end in zip(launch.inputs, launch.outputs, strict=False)
    ]


def _check_staged(snapshot: Actor, fetch: Actor | None, writer: Actor) -> None:
    """Check that what a snapshot fills goes to the writer, over the copies out of a device."""
    copies = [snapshot] if fetch is None else [snapshot, fetch]
    for copy, reader in zip(copies, [*copies[1:], writer], strict=True):
        staged = [port.register for port in copy.outputs[:1]]
        if [(port.register, port.rate) for port in reader.inputs] != [(r, 1) for r in staged]:
            raise PlanFormatError("the writer of the checkpoint does not read the snapshot")


def _check_variable(plan: Plan, variable: Variable) -> None:
    type_ = plan.views[variable.view].type
    spec = dict(variable.init)
    kind = spec.get("kind")
    if variable.role == ROUNDED:
        _check_rounded(plan, variable)
        return
    if variable.role == PACKED:
        _check_packed(plan, variable)
        return
    if variable.role not in ROLES or type_.dtype is DType.BFLOAT16:
        raise PlanFormatError(f"variable {variable.name!r} is {type_} with role {variable.role!r}")
    if (variable.name in ("step", "batches") or variable.role == EVALUATED) and type_ != _COUNTER:
        raise PlanFormatError(f"variable {variable.name!r} counts, and is {type_}")
    if variable.role == SCRATCH:
        return
    if not isinstance(kind, str) or kind not in INITIALISERS:
        raise PlanFormatError(f"variable {variable.name!r} has initialiser {kind!a:.40}")
    needed = INITIALISERS[kind]
    number = 0.0 if needed is None else spec.get(needed)
    # The role and the initialiser have one name; either both or neither.
    if (kind == NUMBERS) is not (variable.role == NUMBERS):
        raise PlanFormatError(
            f"variable {variable.name!r} of role {variable.role} starts as {kind}"
        )
    # What it is a part of begins as a whole.
    is_number = _can_begin(whole_type(plan, variable), spec, number)
    if not is_number or (needed is not None and not type_.dtype.is_float):
        raise PlanFormatError(f"variable {variable.name!r} starts as {kind} with {number!a:.40}")


def _can_begin(type_: TensorType, spec: dict[str, Any], number: Any) -> bool:
    """Whether an initialiser has numbers that it can draw with, and a shape that it can fill."""
    kind, others = spec["kind"], [spec[key] for key in spec if key != "kind"]
    for value in (number, *others):
        # `not <` and no `>=`, so that NaN is refused as well.
        if not isinstance(value, (int, float)) or not abs(value) < MOST_AT_FIRST:
            return False
    if kind == "truncated_normal":
        low, high = [float(spec.get(key, 0.0)) for key in ("low", "high")]
        return low < high and float(spec["std"]) > 0.0
    if kind == NUMBERS:
        return type_.rank == 1 and type_.dtype is DType.INT64
    if kind in ("orthogonal", "dirac"):
        return type_.rank > 1 and (kind != "dirac" or number in range(1, type_.shape[0] + 1))
    return kind == "constant" or float(number) >= 0.0


def _check_rounded(plan: Plan, variable: Variable) -> None:
    """Check that a copy of a variable in bfloat16 says of which, and is alone with that."""
    type_, name = plan.views[variable.view].type, dict(variable.init).get("of")
    sources = [v for v in plan.state if v.name == name]
    types = [plan.views[v.view].type for v in sources]
    copies = [v for v in plan.variables if v.role == ROUNDED and dict(v.init).get("of") == name]
    is_right = types == [replace(type_, dtype=DType.FLOAT32)] and type_.dtype is DType.BFLOAT16
    if not is_right or len(copies) != 1 or variable.sharding is not None:
        raise PlanFormatError(f"variable {variable.name!r} is {type_}, and rounds {name!a:.40}")


def _check_packed(plan: Plan, variable: Variable) -> None:
    """Check that a packed variable is bytes; `check_launches` proves of which variable they are."""
    type_ = plan.views[variable.view].type
    if type_.dtype is not DType.UINT8 or type_.rank != 1 or variable.sharding is not None:
        raise PlanFormatError(f"variable {variable.name!r} is {type_}, and no bytes of a launch")


def _fields_of(plan: Plan, ports: tuple[Port, ...]) -> list[Field]:
    registers = {port.register for port in ports}
    return [field for field in plan.fields if field.register in registers]


def _check_distinct(fields: list[Field]) -> None:
    names = [field.name for field in fields]
    if len(set(names)) != len(names):
        raise PlanFormatError(f"two outputs have one name: {sorted(names)}")


MAX_BINDINGS = 20_000_000
"""Launches times phases: what a plan may ask to be bound. A real one has 10^5."""


@proof
def prove(plan: Plan) -> None:
    """Check that a plan can run on this machine, right and without touching a byte that is not its.

    Native kernels are turned on or off before, as the run will have them.

    Raises:
        CompileError: The plan deadlocks or its rates do not balance.
        PlanFormatError: It contradicts itself, or what our ops and kernels say.
        OutOfMemory: Its arenas are larger than the machine's memory.
    """
    what = f"plan {plan.name!r}"
    # First: what the other proofs work out grows with the arenas.
    check_memory(plan, _memory_bytes())
    firings = prove_consistent(plan, what)
    with _refusing(what):
        for inner in sub_plans(plan):
            check_launches(inner.plan)
        check_launches(plan)
        check_plan_interface(plan, firings)


def read_plan(file: str) -> Plan:
    """Read a plan file to be shown, drawn or simulated: the one way in for all commands.

    Whoever runs the plan proves more of it (`prove`): that asks this machine, whose kernels may be
    others than those that it was compiled for.

    Raises:
        PlanFormatError: The file is damaged, or the plan contradicts itself, its ops or its
            kernels; the message begins with `file`.
        CompileError: The plan deadlocks or its rates do not balance.
        OSError: The file cannot be read.
    """
    plan = Plan.load(file)
    prove_consistent(plan, file)
    with _refusing(file):
        for inner in sub_plans(plan):
            check_launches(inner.plan, is_run=False)
        check_launches(plan, is_run=False)
    return plan


def prove_consistent(plan: Plan, what: str) -> tuple[int, ...]:
    """Check a plan against itself alone.

    Return the firings of each actor in one period. Raises PlanFormatError, which begins with
    `what`, and CompileError for a deadlock.
    """
    with _refusing(what):
        check_references(plan)
        # Counted before anything is done for each of them: a forged plan may ask for any number.
        bindings = sum([_num_bindings(plan, actor) for actor in plan.actors])
        if bindings > MAX_BINDINGS:
            raise PlanFormatError(
                f"its launches on all slots are {bindings:,} bindings, {MAX_BINDINGS:,} at most"
            )
        firings = verify_plan(plan)
        check_races(plan)
    return firings


def _num_bindings(plan: Plan, actor: Actor) -> int:
    is_port = actor.kind in PORTED
    return num_phases(plan, actor) * (1 if is_port else len(actor.launches))


@contextmanager
def _refusing(what: str) -> Iterator[None]:
    """Turn what a proof says of a plan into PlanFormatError: it is no bug of ours."""
    try:
        yield
    except RaceError as error:
        raise PlanFormatError(f"{what} cannot run: {error}") from error
    except (PlanFormatError, InternalError) as error:
        # An InternalError asks for a report, which is wrong here: the plan came from a file.
        reason = str(error).partition(" (this is a bug")[0]
        raise PlanFormatError(
            f"{what} cannot run: {reason}. Another version may have written it, or it was edited;"
            " compile the job again"
        ) from error


def check_memory(plan: Plan, memory_bytes: int | None) -> None:
    """Raise OutOfMemory for more than a machine has, before anything is worked out for it.

    `memory_bytes` is what it has, None where that is not known. What a GPU has is known to whoever
    opens it.
    """
    arenas = [arena for arena in plan.arenas if not _is_of_gpu(arena)]
    needed_bytes = sum([arena.size_bytes for arena in arenas])
    if memory_bytes is not None and needed_bytes > memory_bytes:
        raise OutOfMemory(
            f"plan {plan.name!r} needs {format_bytes(needed_bytes)}, and this machine has"
            f" {format_bytes(memory_bytes)} of memory{largest_tensor(plan)}; compile the job with a"
            " smaller batch or a memory_budget"
        )


def _is_of_gpu(arena: Arena) -> bool:
    return arena.device.kind is DeviceKind.CUDA and arena.memory is Memory.DEVICE


def _memory_bytes() -> int | None:
    """Return the machine's memory, with what it may swap to; None where it does not tell."""
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
        kilobytes = dict(re.findall(r"^(MemTotal|SwapTotal): +(\d+) kB$", text, re.MULTILINE))
        return 1024 * (int(kilobytes["MemTotal"]) + int(kilobytes.get("SwapTotal", 0)))
    except (OSError, ValueError, LookupError):
        return None
