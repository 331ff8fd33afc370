"""Plans and graphs as text, for people."""

from __future__ import annotations

from compiler.contract.accounting import chain_launches, slots_in
from compiler.contract.placement import DeviceKind
from compiler.contract.plan import Plan, SubPlan, frame_of
from compiler.contract.plan_tables import (
    Arena,
    DeviceMemory,
    Launch,
    Recomputation,
    RegisterKind,
    member_ops,
)
from compiler.contract.region import TiledLoop
from compiler.graph.graph import UNSTAGED, Graph, Node
from compiler.ops.primitives.body import Body
from memory.report import format_bytes, memory_table


def overview(plan: Plan) -> list[str]:
    """Return a plan in three or four lines: what runs where, its memory and what fills it most."""
    launches = sum(len(a.launches) for a in plan.actors)
    rank = f", one of {plan.mesh.num_ranks} ranks" if plan.mesh.num_ranks > 1 else ""
    lines = [
        f"{plan.name}: {_num_parameters(plan):,} parameters on {_devices(plan)}{rank}"
        f"{_in_precision(plan)}, {launches} kernel launches a step"
    ]
    for arena, account in zip(plan.arenas, plan.memory, strict=True):
        parts = [
            (_IN_WORDS.get(name, name), size)
            for name, size in account.parts
            if size * 100 >= account.peak_bytes
        ]
        texts = [f"{name} {format_bytes(size)}" for name, size in parts]
        where = "memory" if len(plan.arenas) == 1 else str(arena.place)
        lines.append(
            f"{where}: {format_bytes(account.peak_bytes)}, allocated before the first step:"
            f" {', '.join(texts)}"
        )
    again = sum([note.num_launches for note in plan.recomputation])
    if again:
        extra = sum([note.extra for note in plan.recomputation if note.num_launches])
        lines.append(f"to fit, {again} launches run again: {extra:.1%} of the step's time")
    elif (peak := peak_text(plan)) is not None:
        lines.append(f"most memory is in use at {peak}")
    return lines


_IN_WORDS = {
    "slots": "batches and outputs",
    "temporaries": "activations and gradients",
    "staging": "copies for checkpoints",
    "between chains": "values between chains",
}
"""Parts of an arena as a newcomer calls them."""


def _num_parameters(plan: Plan) -> int:
    views = [v.view for v in plan.variables if v.role == "parameter"]
    return sum([plan.views[view].type.num_elements for view in views])


def peak_text(plan: Plan) -> str | None:
    """Return the launch at which the first arena is fullest, with the user's line."""
    launches, at = chain_launches(plan), plan.memory[0].peak_launch
    if at >= len(launches):
        return None
    _, launch = launches[at]
    return f"{launch.label} ({plan.sources[launch.source]})"


def summarise(plan: Plan) -> list[str]:
    """Return a plan in about a dozen lines: actors, registers with slots and reasons, memory."""
    launches = sum(len(a.launches) for a in plan.actors)
    parameters = _num_parameters(plan)
    lines = [
        f"plan {plan.name!r} {plan.fingerprint[:12]} on {_devices(plan)}"
        f"{_in_precision(plan)}: {len(plan.actors)} actors, {launches} launches,"
        f" {len(plan.streams)} streams, {parameters:,} parameters"
    ]
    if plan.mesh.num_ranks > 1:
        lines.append(f"  {_parts(plan)}")
    for actor in plan.actors:
        stream = plan.streams[actor.stream]
        place = "own thread" if stream.has_thread else f"stream {stream.name}"
        count = len(actor.launches)
        work = f", {count} launch{'es' if count > 1 else ''}" if count else ""
        reads = " + ".join(_port(plan, p.register, p.rate) for p in actor.inputs)
        makes = " + ".join(_port(plan, p.register, p.rate) for p in actor.outputs)
        lines.append(f"  {actor.name:<10} {reads or '-'} -> {makes or '-'}  ({place}{work})")
    lines.extend(
        f"  register {register.name:<8} {register.num_slots} x"
        f" {format_bytes(register.size_bytes)}  slots {register.reason}"
        for register in plan.registers
        if register.kind in (RegisterKind.DATA, RegisterKind.CONTROL)
    )
    for arena, account in zip(plan.arenas, plan.memory, strict=True):
        lines += [f"  {line}" for line in arena_lines(plan, arena, account)]
    lines += [f"  {_recomputation(note)}" for note in plan.recomputation]
    if isinstance(streams := plan.option("streams"), str):
        lines.append(f"  compute streams: {streams}")
    added = plan.option("passes", ())
    if isinstance(added, tuple) and added:
        lines.append(f"  passes from elsewhere: {', '.join(map(str, added))}")
    return lines


def facts_of(plan: Plan) -> dict[str, object]:
    """Return what `summarise` says, as values for JSON; sizes in bytes, durations in ns."""
    return {
        "job": plan.name,
        "fingerprint": plan.fingerprint,
        "num_parameters": _num_parameters(plan),
        "num_ranks": plan.mesh.num_ranks,
        "target": plan.target,
        "actors": [
            {
                "name": actor.name,
                "kind": actor.kind.value,
                "stream": plan.streams[actor.stream].name,
                "launches": len(actor.launches),
                "duration_ns": actor.duration_ns,
                "inputs": [plan.registers[port.register].name for port in actor.inputs],
                "outputs": [plan.registers[port.register].name for port in actor.outputs],
            }
            for actor in plan.actors
        ],
        "registers": [
            {"name": r.name, "slots": r.num_slots, "size_bytes": r.size_bytes, "reason": r.reason}
            for r in plan.registers
            if r.kind in (RegisterKind.DATA, RegisterKind.CONTROL)
        ],
        "arenas": [
            {
                "device": str(arena.place),
                "size_bytes": account.peak_bytes,
                "parts": dict(account.parts),
                "lower_bound_bytes": account.lower_bound_bytes,
                "certificate": account.text,
            }
            for arena, account in zip(plan.arenas, plan.memory, strict=True)
        ],
        "peak_at": peak_text(plan),
    }


def _parts(plan: Plan) -> str:
    """Return what one rank has of the whole."""
    parts = [v.sharding for v in plan.state]
    # That of an evaluation has fields of its own, by the same names.
    split = dict.fromkeys([f.name for f in plan.fields if f.sharding is not None])
    batch = f"its part of {', '.join(map(repr, split))}" if split else "whole batches"
    count = f"parts of {len(parts) - parts.count(None)} of {len(parts)} variables"
    hosts = f" on {plan.hosts}" if plan.hosts else ""
    return f"for one rank of the mesh {plan.mesh}{hosts}, which has {count} and {batch}"


def _devices(plan: Plan) -> str:
    """Return what a plan computes on, in the order of its job."""
    devices = dict.fromkeys([a.device for a in plan.arenas if a.place == a.device.place])
    gpu = plan.option("gpu", "")
    return ", ".join([f"{d} ({gpu!s})" if d.kind is DeviceKind.CUDA else str(d) for d in devices])


def _in_precision(plan: Plan) -> str:
    """Return in what the products compute, where that is not float32."""
    precision = plan.option("precision", "fp32")
    is_slow = precision == "fp16" and not any(
        [a.device.kind is DeviceKind.CUDA for a in plan.arenas]
    )
    why = " (float32 inside, slower than fp32: the host has no arithmetic of it)" if is_slow else ""
    return "" if precision == "fp32" else f" in {precision!s}{why}"


def arena_lines(plan: Plan, arena: Arena, account: DeviceMemory) -> list[str]:
    """Return what an arena is made of, where its peak is, and what is proven about it."""
    is_worth_a_word = [size * 1000 >= account.peak_bytes for _, size in account.parts]
    rows = [part for part, is_shown in zip(account.parts, is_worth_a_word, strict=True) if is_shown]
    rest = account.peak_bytes - sum([size for _, size in rows])
    parts = [f"{name} {format_bytes(size)}" for name, size in [*rows, ("others", rest)] if size]
    is_beside = arena is not plan.arenas[0]
    name = str(arena.place) if is_beside else f"arena {arena.device}"
    lines = [f"{name}: {format_bytes(account.peak_bytes)} = {' + '.join(parts)}"]
    peak = peak_text(plan)
    if peak is not None and not is_beside:
        share = format_bytes(account.peak_workspace_bytes)
        lines.append(
            f"peak at launch {account.peak_launch} of {len(chain_launches(plan))}: {peak};"
            f" workspaces hold {share} of it"
        )
    return [*lines, account.text]


def _recomputation(note: Recomputation) -> str:
    budget = f"budget {format_bytes(note.budget_bytes)}: " if note.budget_bytes else ""
    if not note.num_launches:
        if note.method == "offload":
            return f"{budget}copies take {note.extra:.1%} of the step's time; {note.certificate}"
        return f"{budget}nothing runs again" if budget else note.certificate
    return (
        f"{budget}{note.num_launches} launches run again, {note.extra:.1%} of the step's time"
        f" ({note.method}); without, the arena has {format_bytes(note.store_all_bytes)};"
        f" {note.certificate}"
    )


def print_graph(graph: Graph) -> list[str]:
    """Return one line per node, those of its bodies indented below it."""
    lines = []
    for node in graph.nodes:
        lines.append(node_line(graph, node))
        for inner in node.attrs.values():
            if isinstance(inner, Body):
                lines += [f"    {line}" for line in print_graph(inner.graph)]
            elif isinstance(inner, SubPlan):
                lines += _step_lines(inner)
    lines.extend(f"output {output.name} = %{output.value}" for output in graph.outputs)
    lines.extend(f"write %{write.variable} <- %{write.value}" for write in graph.writes)
    return lines


def node_line(graph: Graph, node: Node) -> str:
    """Return a node's values, op, types, attributes, device but 0, stage, scope and line."""
    types = [graph.types[v : v + 1] or ("no type",) for v in node.outputs]  # or the graph is broken
    outputs = ", ".join(f"%{v}: {type_}" for v, (type_,) in zip(node.outputs, types, strict=True))
    inputs = ", ".join(f"%{v}" for v in node.inputs)
    op = " + ".join(member_ops(node.op.name, node.attrs))
    attrs = {k: v for k, v in node.attrs.items() if not isinstance(v, (bytes, Body, SubPlan))}
    if "program" in attrs:
        attrs = {k: attrs[k] for k in ("rows", "columns")}
    elif isinstance(region := attrs.get("region"), TiledLoop):
        attrs = {"rows": region.rows, "columns": region.columns}
    details = f" {attrs}" if attrs else ""
    if node.after:
        details += f" after {', '.join(f'%{v}' for v in node.after)}"
    if node.device:
        details += f" on device {node.device}"
    if node.stage != UNSTAGED:
        details += f" on stage {node.stage}"
    return f"{outputs} = {op}({inputs}){details}  # {node.scope} {node.source}"


def print_plan(plan: Plan) -> list[str]:
    """Return the whole plan: summary, holders of the peak, every launch with its operands."""
    lines = summarise(plan) + memory_lines(plan)
    for actor in plan.actors:
        if actor.launches:
            lines.append(f"chain of {actor.name}:")
        lines += _chain_lines(plan, actor.launches)
    return lines


def _chain_lines(plan: Plan, launches: tuple[Launch, ...]) -> list[str]:
    """Return a line per launch; after one that runs a body, the launches of a step of it."""
    lines = []
    for index, launch in enumerate(launches):
        outputs = _operands(plan, launch.outputs, launch.writes)
        inputs = _operands(plan, launch.inputs, launch.reads)
        where = plan.sources[launch.source]
        scratch = "" if launch.workspace is None else f" +{_operand(plan, launch.workspace)}"
        lines.append(
            f"  {index:>4} {launch.label} [{launch.kernel}]:"
            f" {outputs} <- {inputs}{scratch}  # {where}"
        )
        for _, inner in launch.attrs:
            lines += _step_lines(inner) if isinstance(inner, SubPlan) else ()
    return lines


def _step_lines(inner: SubPlan) -> list[str]:
    """Return the launches of a step of a body, indented; offsets are those of its own plan."""
    frame = format_bytes(frame_of(inner.plan).size_bytes)
    begin = f"       each step, in a frame of {frame}:"
    return [begin, *[f"      {line}" for line in _chain_lines(inner.plan, inner.launches)]]


def memory_lines(plan: Plan, top: int = 10) -> list[str]:
    """Return the registers at the peak of each arena, with bytes, share, interval and offset."""
    lines = []
    for index, arena in enumerate(plan.arenas):
        slots = slots_in(plan, index)
        names = [f"{r.name}[{slot}]" if r.num_slots > 1 else r.name for r, slot in slots]
        lower, upper = [r.interval[0] for r, _ in slots], [r.interval[1] for r, _ in slots]
        sizes = [r.size_bytes for r, _ in slots]
        offsets = [r.offsets_bytes[slot] for r, slot in slots]
        lines.append(f"memory of {arena.device}:")
        lines += [
            f"  {line}" for line in memory_table(names, lower, upper, sizes, offsets, top=top)
        ]
    return lines


def _port(plan: Plan, register: int, rate: int) -> str:
    name = plan.registers[register].name
    return name if rate == 1 else f"{rate} {name}"


def _operands(plan: Plan, views: tuple[int, ...], numbers: tuple[int, ...]) -> str:
    """Return operands with the versions that they name; `%7+48` is a part of one."""
    texts = []
    for view, number in zip(views, numbers, strict=True):
        part = None if number >= 0 else plan.parts[-1 - number]
        name = f"%{number}" if part is None else f"%{part.version}+{part.offset_bytes}"
        texts.append(f"{name} {_operand(plan, view)}")
    return ", ".join(texts)


def _operand(plan: Plan, index: int) -> str:
    view = plan.views[index]
    register = plan.registers[view.register]
    offset = register.offsets_bytes[0] + view.offset_bytes if register.offsets_bytes else 0
    return f"{view.type}@{offset}"
