"""Change launches, operands and edges of real plans: each change is refused, or changes no result.

    python benchmarks/mutate_launches.py [--plans mlp,gpt,...] [--every 1] [--native]

Eight plans, which between them have all that orders a launch: values in place, parts of values,
sums over batches, snapshots, an evaluation, two streams, copies to host memory, launches that run
again, updates that may be skipped. A mutant is the plan with one change, as the compiler might have
made by mistake. It is held against the proof that every plan passes before it runs; if that lets it
pass, it runs, and metrics, variables, evaluations and checkpoints must have the bits of the plan
itself. Prints a table and exits with 1 where a mutant is lost: it passes, and computes something
else or fails otherwise than by an error of ours.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from unittest import mock

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import actorflow as af
from actorflow import nn
from actorflow.compile import num_streams
from actorflow.compile.targets import HostTarget
from actors.race.race import check_races
from compiler.budget import offload
from compiler.contract.accounting import account
from compiler.contract.errors import ActorflowError, CompileError, PlanFormatError
from compiler.contract.plan import Plan
from compiler.contract.plan_tables import Actor, Launch, Port, RegisterKind
from compiler.pipeline import pipeline
from compiler.verify.verify import verify_plan

STEPS = 4

MOST_VIEWS = 12
"""Other views that an operand is redirected to, at most; spread over all of its type."""


# -- the plans -----------------------------------------------------------------------------------


class MLP(nn.Module):
    def __init__(self) -> None:
        self.up, self.mid, self.down = nn.Linear(8, 12), nn.Linear(12, 12), nn.Linear(12, 5)

    def __call__(self, x: af.Tensor) -> af.Tensor:
        return self.down(af.relu(af.dropout(self.mid(af.relu(self.up(x))), 0.2)))


class GPT(nn.Module):
    def __init__(self) -> None:
        self.emb, self.pos = nn.Embedding(17, 12), nn.Embedding(6, 12)
        self.block = nn.TransformerBlock(12, heads=3, causal=True, dropout=0.2)
        self.head = nn.Linear(12, 17)

    def __call__(self, x: af.Tensor) -> af.Tensor:
        return self.head(self.block(self.emb(x) + self.pos.weight))


class Towers(nn.Module):
    """Two networks that meet in the product of their outputs."""

    def __init__(self) -> None:
        self.left, self.right = MLP(), MLP()

    def __call__(self, x: af.Tensor) -> af.Tensor:
        return self.left(x) * self.right(x)


def rows(seed: int = 0, batch: int = 8) -> af.data.DataSource:
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(64, 8)).astype(np.float32), rng.integers(0, 5, 64).astype(np.int32)
    return af.data.ArraySource({"x": x, "y": y}, batch=batch, seed=seed)


def tokens(seed: int = 0) -> af.data.DataSource:
    x = np.random.default_rng(seed).integers(0, 17, (64, 7)).astype(np.int32)
    return af.data.ArraySource({"x": x[:, :-1], "y": x[:, 1:]}, batch=4, seed=seed)


def job(**options: object) -> af.Job:
    @af.job(optimizer=af.optim.AdamW(1e-2), seed=3, **options)
    def train(model, batch):
        return af.cross_entropy(model(batch.x).flatten(0, -2), batch.y.flatten())

    return train


@af.job(train=False)
def evaluate(model, batch):
    return {"loss": af.cross_entropy(model(batch.x).flatten(0, -2), batch.y.flatten())}


@dataclass(frozen=True)
class Subject:
    """A plan, and how a run of it goes."""

    plan: Plan
    data: Callable[[], af.data.DataSource]
    is_evaluated: bool = False
    is_saved: bool = False
    on_nan: str = "raise"


def _subject(
    model: nn.Module,
    data: Callable[[], af.data.DataSource] = rows,
    *,
    is_evaluated: bool = False,
    is_saved: bool = False,
    on_nan: str = "raise",
    **options: object,
) -> Subject:
    every = 2 if is_saved else None
    evaluation = _evaluation() if is_evaluated else None
    plan = job(**options).compile(model, data(), every=every, evaluation=evaluation, on_nan=on_nan)
    return Subject(plan, data, is_evaluated, is_saved, on_nan)


def _evaluation() -> af.Evaluation:
    return af.Evaluation(evaluate, rows(1), every=2, batches=3)


def _offloaded() -> Subject:
    """Keep on the host whatever can live there, so that copies are everywhere."""
    lower = pipeline.lower

    def moved(graph, target, *rest):
        names = offload.state_names(graph)
        idle = [i.value for i in offload.idle_values(graph, target) if names and i.idle_ns > 0]
        graph = offload.offload_variables(graph, names, target, bucket_bytes=600)
        return lower(offload.spill_values(graph, idle, target, bucket_bytes=600), target, *rest)

    with mock.patch.object(pipeline, "lower", moved):
        return _subject(MLP(), is_saved=True)


SUBJECTS: dict[str, Callable[[], Subject]] = {
    "mlp": lambda: _subject(MLP()),
    "gpt": lambda: _subject(GPT(), tokens),
    "accumulate": lambda: _subject(MLP(), accumulate=2, is_evaluated=True, is_saved=True),
    "streams": lambda: _subject(Towers(), streams=2),
    "offload": _offloaded,
    "recompute": lambda: _subject(GPT(), tokens, recompute="blocks"),
    "skip": lambda: _subject(MLP(), on_nan="skip", accumulate=2, metrics_every=2),
    "all": lambda: _subject(
        Towers(), streams=2, accumulate=2, recompute="blocks", is_evaluated=True, is_saved=True
    ),
}


@contextmanager
def surroundings(*, native: bool = False) -> Iterator[None]:
    """No cache, and threads that meet at once, so that small models are cut into many chains."""
    with ExitStack() as stack:
        values = {"ACTORFLOW_CACHE": "off", "ACTORFLOW_NATIVE": "1" if native else "0"}
        stack.enter_context(mock.patch.dict(os.environ, values))
        stack.enter_context(mock.patch.object(HostTarget, "message_ns", 100.0))
        stack.enter_context(mock.patch.object(num_streams, "asks_for_choice", return_value=False))
        yield


# -- the mutants ---------------------------------------------------------------------------------

Mutants = Iterator[tuple[str, Plan]]


def _with(plan: Plan, actor: Actor, **changes: object) -> Plan:
    actors = [replace(a, **changes) if a.id == actor.id else a for a in plan.actors]
    return replace(plan, actors=tuple(actors))


def _places(plan: Plan) -> Iterator[tuple[Actor, int, Launch]]:
    for actor in plan.actors:
        for index, launch in enumerate(actor.launches):
            yield actor, index, launch


def _changed(plan: Plan, actor: Actor, index: int, **changes: object) -> Plan:
    launches = list(actor.launches)
    launches[index] = replace(launches[index], **changes)
    return _with(plan, actor, launches=tuple(launches))


def dropped(plan: Plan) -> Mutants:
    """Leave out a launch."""
    for actor, i, launch in _places(plan):
        launches = actor.launches[:i] + actor.launches[i + 1 :]
        yield (
            f"{actor.name}[{i}] {' + '.join(launch.made_of)}",
            _with(plan, actor, launches=launches),
        )


def swapped(plan: Plan) -> Mutants:
    """Swap two launches that follow one another."""
    for actor in plan.actors:
        for i, (one, two) in enumerate(pairwise(actor.launches)):
            launches = (*actor.launches[:i], two, one, *actor.launches[i + 2 :])
            yield f"{actor.name}[{i}] {one.op}, {two.op}", _with(plan, actor, launches=launches)


def doubled(plan: Plan) -> Mutants:
    """Run a launch again, at once and at the end; also as one that makes values of its own."""
    fresh = 1 + max([v for _, _, launch in _places(plan) for v in launch.writes])
    for actor, i, launch in _places(plan):
        twin = replace(launch, writes=tuple(range(fresh, fresh + len(launch.writes))))
        for again in (launch, twin):
            for at in dict.fromkeys((i + 1, len(actor.launches))):
                launches = (*actor.launches[:at], again, *actor.launches[at:])
                text = f"{actor.name}[{i}] {launch.op} at {at}" + (" anew" if again is twin else "")
                yield text, _with(plan, actor, launches=launches)


def moved(plan: Plan) -> Mutants:
    """Let another actor run a launch, first or last."""
    owners = [actor for actor in plan.actors if actor.launches]
    for actor, i, launch in _places(plan):
        rest = actor.launches[:i] + actor.launches[i + 1 :]
        for other in [o for o in owners if o.id != actor.id]:
            for launches in ((launch, *other.launches), (*other.launches, launch)):
                without = _with(plan, actor, launches=rest)
                text = f"{actor.name}[{i}] {launch.op} to {other.name}"
                yield text, _with(without, other, launches=launches)


def redirected(plan: Plan) -> Mutants:
    """Let an operand be another view of its type."""
    by_type: dict[object, list[int]] = {}
    for index, view in enumerate(plan.views):
        by_type.setdefault(view.type, []).append(index)
    for actor, i, launch in _places(plan):
        for side in ("inputs", "outputs"):
            operands: tuple[int, ...] = getattr(launch, side)
            for position, view in enumerate(operands):
                others = [v for v in by_type[plan.views[view].type] if v != view]
                for other in others[:: max(1, len(others) // MOST_VIEWS)]:
                    views = (*operands[:position], other, *operands[position + 1 :])
                    text = f"{actor.name}[{i}] {launch.op} {side}[{position}] {view} -> {other}"
                    yield text, _changed(plan, actor, i, **{side: views})


def exchanged(plan: Plan) -> Mutants:
    """Exchange two inputs of one type within a launch, with and without what they state."""
    for actor, i, launch in _places(plan):
        types = [plan.views[view].type for view in launch.inputs]
        for a, b in pairwise(range(len(types))):
            if types[a] == types[b]:
                views = list(launch.inputs)
                views[a], views[b] = views[b], views[a]
                text = f"{actor.name}[{i}] {launch.op} {a}, {b}"
                yield text, _changed(plan, actor, i, inputs=tuple(views))


def renumbered(plan: Plan) -> Mutants:
    """Let a launch name another version."""
    for actor, i, launch in _places(plan):
        for side in ("reads", "writes"):
            numbers: tuple[int, ...] = getattr(launch, side)
            for position, number in enumerate(numbers):
                for other in (number - 1, number + 1):
                    changed = (*numbers[:position], other, *numbers[position + 1 :])
                    text = f"{actor.name}[{i}] {launch.op} {side}[{position}] {number} -> {other}"
                    yield text, _changed(plan, actor, i, **{side: changed})


def produced(plan: Plan) -> Mutants:
    """Let another actor produce a register as well, or instead."""
    edges = [r for r in plan.registers if r.kind in (RegisterKind.DATA, RegisterKind.CONTROL)]
    for register in edges:
        first = next(a for a in plan.actors if register.id in [p.register for p in a.outputs])
        port = next(p for p in first.outputs if p.register == register.id)
        for other in [a for a in plan.actors if a.id != first.id]:
            two = _with(plan, other, outputs=(*other.outputs, port))
            yield f"{register.name} also by {other.name}", two
            rest = tuple([p for p in first.outputs if p is not port])
            yield f"{register.name} by {other.name}", _with(two, first, outputs=rest)


def unordered(plan: Plan) -> Mutants:
    """Take a consumer off an edge; turn an edge of credits round; give an edge one slot more."""
    for actor in plan.actors:
        for k, port in enumerate(actor.inputs):
            register = plan.registers[port.register]
            ports = actor.inputs[:k] + actor.inputs[k + 1 :]
            without = _with(plan, actor, inputs=ports)
            yield f"{actor.name} without {register.name}", without
            if register.kind is RegisterKind.CONTROL:
                yield f"{register.name} turned round", _turned(without, actor, port)
    for register in plan.registers:
        if register.kind is RegisterKind.CONTROL:
            slots = register.num_slots + 1
            more = replace(register, num_slots=slots, offsets_bytes=(0,) * slots)
            registers = [more if r is register else r for r in plan.registers]
            yield f"{register.name} of {slots} slots", replace(plan, registers=tuple(registers))


def _turned(plan: Plan, consumer: Actor, port: Port) -> Plan:
    """Let the consumer produce the register and its producer consume it."""
    producer = next(a for a in plan.actors if port.register in [p.register for p in a.outputs])
    output = next(p for p in producer.outputs if p.register == port.register)
    outputs = tuple([p for p in producer.outputs if p is not output])
    plan = _with(plan, producer, outputs=outputs, inputs=(*producer.inputs, output))
    return _with(plan, consumer, outputs=(*consumer.outputs, port))


def misplaced(plan: Plan) -> Mutants:
    """Let a field, or a variable, be another view of its type."""
    for column in ("fields", "variables"):
        entries = getattr(plan, column)
        for i, entry in enumerate(entries):
            type_ = plan.views[entry.view].type
            others = [j for j, view in enumerate(plan.views) if view.type == type_]
            for j in [j for j in others if j != entry.view][:MOST_VIEWS]:
                changed = (*entries[:i], replace(entry, view=j), *entries[i + 1 :])
                yield f"{column}[{i}] {entry.name} in view {j}", replace(plan, **{column: changed})


def rehomed(plan: Plan) -> Mutants:
    """Let a value live in the bytes of another one, for its maker and all its readers."""
    temporary = {r.id for r in plan.registers if r.kind is RegisterKind.TEMPORARY}
    by_type: dict[object, list[int]] = {}
    for index, view in enumerate(plan.views):
        if view.register in temporary:
            by_type.setdefault(view.type, []).append(index)
    for actor, i, launch in _places(plan):
        for view, version in zip(launch.outputs, launch.writes, strict=True):
            if plan.views[view].register not in temporary:
                continue
            others = [v for v in by_type[plan.views[view].type] if v != view]
            for other in others[:: max(1, len(others) // MOST_VIEWS)]:
                launches = [_rehomed(plan, one, version, other) for one in actor.launches]
                text = f"{actor.name}[{i}] {launch.op} in view {other}"
                yield text, _with(plan, actor, launches=tuple(launches))


def _rehomed(plan: Plan, launch: Launch, version: int, view: int) -> Launch:
    """Return the launch with another view wherever it names a version by the type of that view."""

    def shown(views: tuple[int, ...], numbers: tuple[int, ...]) -> tuple[int, ...]:
        type_ = plan.views[view].type
        pairs = zip(views, numbers, strict=True)
        return tuple(
            [view if n == version and plan.views[v].type == type_ else v for v, n in pairs]
        )

    inputs, outputs = shown(launch.inputs, launch.reads), shown(launch.outputs, launch.writes)
    return replace(launch, inputs=inputs, outputs=outputs)


def overlaid(plan: Plan) -> Mutants:
    """Let a register lie where another one does."""
    solid = [r for r in plan.registers if r.size_bytes]
    for register in solid:
        room = plan.arenas[register.arena].size_bytes - register.size_bytes
        starts = [r.offsets_bytes[0] for r in solid if r.arena == register.arena]
        places = [s for s in dict.fromkeys(starts) if s <= room and s != register.offsets_bytes[0]]
        for start in places[:: max(1, len(places) // MOST_VIEWS)]:
            offsets = (start, *register.offsets_bytes[1:])
            changed = replace(register, offsets_bytes=offsets)
            registers = tuple([changed if r is register else r for r in plan.registers])
            text = f"{register.name} at byte {start}"
            # The account of the arena is put right too, or that alone would be refused.
            bare = replace(plan, registers=registers)
            memory = [
                account(bare, index, m.lower_bound_bytes, m.text)
                for index, m in enumerate(plan.memory)
            ]
            yield text, replace(bare, memory=tuple(memory))


KINDS: dict[str, Callable[[Plan], Mutants]] = {
    made.__name__: made
    for made in (
        dropped,
        swapped,
        doubled,
        moved,
        redirected,
        exchanged,
        renumbered,
        produced,
        unordered,
        misplaced,
        rehomed,
        overlaid,
    )
}


# -- what becomes of them ------------------------------------------------------------------------


def refusal(plan: Plan) -> str | None:
    """Return why the proof refuses a plan, or None. Anything else than our errors is raised."""
    try:
        verify_plan(plan)
        check_races(plan)
    except ActorflowError as error:
        return str(error)
    return None


def results(subject: Subject, plan: Plan) -> dict[str, object]:
    """Run a plan; return the bits of all that came of it."""
    steps: list[object] = []

    def note(step: int, metrics: object) -> None:
        steps.append((step, {name: np.asarray(x).tobytes() for name, x in metrics.items()}))

    with tempfile.TemporaryDirectory() as folder:
        saving = {"checkpoint": folder, "every": 2} if subject.is_saved else {}
        fitted = af.Runner(plan, seed=3).fit(
            subject.data(),
            steps=STEPS,
            on_nan=subject.on_nan,
            progress=False,
            on_step=note,
            evaluation=_evaluation() if subject.is_evaluated else None,
            **saving,
        )
        saved = []
        for path in sorted(Path(folder).glob("step-*/manifest.json")):
            body = json.loads(path.read_text().splitlines()[0])
            pieces = [(p["tensor"], p["offset"], p["xxh3_128"]) for p in body["pieces"]]
            saved.append((body["step"], sorted(pieces)))
    return {
        "metrics": steps,
        "variables": {name: array.tobytes() for name, array in fitted.variables.items()},
        "evaluations": fitted.evaluations,
        "saved": saved[-1:],
    }


@dataclass
class Tally:
    """Counts of what became of mutants; `lost` are their names."""

    counts: Counter[str]
    lost: list[str]


def judge(subject: Subject, kind: str, *, every: int = 1, offset: int = 0) -> Tally:
    """Try every n-th mutant of one kind."""
    tally = Tally(Counter(), [])
    expected: dict[str, object] | None = None
    for number, (name, plan) in enumerate(KINDS[kind](subject.plan)):
        if number % every != offset % every:
            continue
        try:
            if refusal(plan) is not None:
                tally.counts["refused"] += 1
                continue
            if expected is None:
                expected = results(subject, subject.plan)
            is_equal = results(subject, plan) == expected
        except (
            CompileError,
            PlanFormatError,
        ):  # by what else a runner asks: see actorflow.compile.prove
            tally.counts["refused"] += 1
            continue
        except Exception as error:  # whatever it is, it is what is looked for
            tally.lost.append(f"{kind}: {name}: {type(error).__name__}: {error}"[:1500])
            continue
        if is_equal:
            tally.counts["equal"] += 1
        else:
            tally.lost.append(f"{kind}: {name}: other results")
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plans", default=",".join(SUBJECTS))
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--every", type=int, default=1, help="try one mutant in so many")
    parser.add_argument("--native", action="store_true", help="plans of native kernels")
    args = parser.parse_args()
    lost: list[str] = []
    total: Counter[str] = Counter()
    print("| plan | launches | mutants | refused | equal | lost | seconds |")
    print("|---|---|---|---|---|---|---|")
    with surroundings(native=args.native):
        for name in args.plans.split(","):
            subject, began = SUBJECTS[name](), time.perf_counter()
            counts: Counter[str] = Counter()
            for kind in args.kinds.split(","):
                tally = judge(subject, kind, every=args.every)
                counts += tally.counts
                counts["lost"] += len(tally.lost)
                lost += [f"{name}: {text}" for text in tally.lost]
            total += counts
            print(_row(name, len(list(_places(subject.plan))), counts, time.perf_counter() - began))
    print(_row("all together", "", total, 0.0))
    print("\n".join(lost))
    return 1 if lost else 0


def _row(name: str, launches: object, counts: Counter[str], seconds: float) -> str:
    cells = [sum(counts.values()), counts["refused"], counts["equal"], counts["lost"]]
    return f"| {name} | {launches} | {' | '.join(map(str, cells))} | {seconds:.1f} |"


if __name__ == "__main__":
    sys.exit(main())
