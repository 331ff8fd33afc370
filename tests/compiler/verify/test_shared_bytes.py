"""Plans with several streams, damaged on purpose, against oracles that compare all with all."""

from dataclasses import replace
from random import Random

import tiers
from error_texts import raises
from graphs import counter, descend, made_up, variable
from hypothesis import example, given, settings
from hypothesis import strategies as st

from actors.race.race import RaceError, check_races
from compiler.contract.errors import InternalError
from compiler.contract.plan_tables import ActorKind, RegisterKind
from compiler.graph.graph import GraphBuilder
from compiler.graph.target import CompileOptions
from compiler.ops.families.arithmetic import ADD, EXP, MUL, NEG
from compiler.ops.primitives.matmul import MATMUL
from compiler.ops.primitives.reduce import SUM
from compiler.ops.primitives.sources import INPUT
from compiler.pipeline.pipeline import compile_graph
from compiler.verify.verify import check_shared_bytes, verify_plan


def slow_target(rng):
    """Kernels that take between nothing and five messages, at random by a seed; some want bytes."""
    return made_up(
        "slow",
        ("add", "mul", "neg", "exp"),
        lambda call: rng.choice((1e2, 1e4, 5e4, 1e5)),
        lambda call: rng.choice((0, 0, 200)),
    )


def tangle(rng):
    """A training graph of random elementwise ops and products over two inputs."""
    b = GraphBuilder()
    shape = (8, 8)
    pool = [b.emit_one(INPUT, name=n, dtype="float32", shape=shape) for n in ("a", "b")]
    weights = []
    for i in range(rng.randint(1, 3)):
        weights.append(variable(b, f"w{i}", shape))
        pool.append(b.emit_one(MATMUL, rng.choice(pool[:2]), weights[-1]))
    for _ in range(rng.randint(3, 10)):
        op = rng.choice((NEG, EXP, ADD, MUL, MATMUL))
        operands = [rng.choice(pool[-5:]) for _ in range(1 if op in (NEG, EXP) else 2)]
        pool.append(b.emit_one(op, *operands))
    total = pool[-1]
    for value in pool[2:-1]:
        total = b.emit_one(ADD, total, value)
    loss = b.emit_one(SUM, total, axes=(0, 1), keepdims=False)
    descend(b, loss, weights)
    counter(b)
    return b.freeze()


def planned(seed, streams):
    rng = Random(seed)
    options = CompileOptions("tangle", num_streams=streams)
    return compile_graph(tangle(rng), slow_target(rng), options)


# -- oracles ---------------------------------------------------------------------------------------


def reach_of(plan):
    """Return who comes before whom in one period, by Warshall's algorithm on rows of bits."""
    count = len(plan.actors)
    rows = [0] * count
    for producer in plan.actors:
        own = {port.register for port in producer.outputs}
        for consumer in plan.actors:
            if any(p.register in own for p in consumer.inputs):
                rows[producer.id] |= 1 << consumer.id
    for k in range(count):
        rows = [row | rows[k] if row >> k & 1 else row for row in rows]
    return [[row >> j & 1 for j in range(count)] for row in rows]


def touches_of(plan):
    """Return (actor, register, first byte, end, is_write) of everything that actors touch."""
    rows = []
    for actor in plan.actors:
        for launch in actor.launches:
            scratch = () if launch.workspace is None else (launch.workspace,)
            rows += [(actor.id, view, False) for view in launch.inputs]
            rows += [(actor.id, view, True) for view in (*launch.outputs, *scratch)]
        if actor.kind in (ActorKind.SOURCE, ActorKind.SINK):
            for ports, is_write in ((actor.inputs, False), (actor.outputs, True)):
                own = {port.register for port in ports}
                rows += [(actor.id, f.view, is_write) for f in plan.fields if f.register in own]
    touches = []
    for actor, index, is_write in rows:
        view = plan.views[index]
        register = plan.registers[view.register]
        lasts = [(n - 1) * s for n, s in zip(view.type.shape, view.strides_bytes, strict=True)]
        first = register.offsets_bytes[0] + view.offset_bytes
        start = first + sum(min(last, 0) for last in lasts)
        end = first + sum(max(last, 0) for last in lasts) + view.type.dtype.itemsize
        touches.append((actor, register.id, start, end, is_write))
    return touches


def races_in_first_firings(plan):
    """Whether two actors touch a byte in their first firings, one writing, and no path orders them.

    Views of these plans are dense or repeat a scalar, so that they cover what they span.
    """
    reach, touches = reach_of(plan), touches_of(plan)
    return any(
        a != b and (writes or also_writes) and start < its_end and its_start < end
        and not reach[a][b] and not reach[b][a]
        for a, _, start, end, writes in touches
        for b, _, its_start, its_end, also_writes in touches
    )  # fmt: skip


def shares_unordered(plan):
    """Whether two registers share bytes and their actors are not one group before the other."""
    reach = reach_of(plan)
    actors = {}
    for actor, register, *_ in touches_of(plan):
        actors.setdefault(register, set()).add(actor)
    for actor in plan.actors:
        for port in actor.inputs + actor.outputs:
            actors.setdefault(port.register, set()).add(actor.id)

    def ordered(earlier, later):
        return all(a == b or reach[a][b] for a in earlier for b in later)

    rows = [r for r in plan.registers if r.size_bytes and r.id in actors]
    for r in rows:
        for s in rows:
            one, other = actors[r.id], actors[s.id]
            if one == other or not overlap(r, s) or ordered(one, other) or ordered(other, one):
                continue
            return True
    return False


def overlap(r, s):
    return any(
        a < b + s.size_bytes and b < a + r.size_bytes
        for a in r.offsets_bytes
        for b in s.offsets_bytes
    )


def refuses(check, plan, error):
    try:
        check(plan)
    except error:
        return True
    return False


# -- mutants ---------------------------------------------------------------------------------------


def without(plan, register):
    """Take a register's ports away, so that nobody waits for it."""
    return replace(
        plan,
        actors=tuple(
            replace(
                actor,
                inputs=tuple(p for p in actor.inputs if p.register != register),
                outputs=tuple(p for p in actor.outputs if p.register != register),
            )
            for actor in plan.actors
        ),
    )


def moved(plan, register, onto):
    """Lay the first slot of a register where the first slot of another lies."""
    r, target = plan.registers[register], plan.registers[onto]
    offsets = (target.offsets_bytes[0], *r.offsets_bytes[1:])
    registers = list(plan.registers)
    registers[register] = replace(r, offsets_bytes=offsets)
    return replace(plan, registers=tuple(registers))


def controls(plan):
    return [r.id for r in plan.registers if r.kind is RegisterKind.CONTROL]


REFUSALS = (RaceError, InternalError)
"""InternalError: an actor that waits for nobody at all any more."""

SEEDS = st.integers(0, 10_000)
STREAMS = st.integers(2, 3)


@given(SEEDS, STREAMS)
@settings(max_examples=tiers.examples(40), deadline=None)
def test_plans_as_they_are_compiled_pass_all_checks(seed, streams):
    plan = planned(seed, streams)
    assert not shares_unordered(plan)
    assert not races_in_first_firings(plan)
    verify_plan(plan)
    check_races(plan)


@given(SEEDS, STREAMS)
@settings(max_examples=tiers.examples(40), deadline=None)
def test_a_plan_without_one_control_edge_is_refused_where_the_edge_held_bytes_apart(seed, streams):
    plan = planned(seed, streams)
    for register in controls(plan):
        mutant = without(plan, register)
        assert refuses(check_shared_bytes, mutant, InternalError) == shares_unordered(mutant)
        if races_in_first_firings(mutant):
            assert refuses(check_races, mutant, REFUSALS), plan.registers[register].name


@given(SEEDS, STREAMS, st.integers(0, 10_000), st.integers(0, 10_000))
@example(5444, 3, 291, 843)  # a broadcast scalar has 4 bytes, however many elements are read
@settings(max_examples=tiers.examples(80), deadline=None)
def test_a_register_laid_over_another_is_refused_unless_a_path_orders_them(
    seed, streams, one, other
):
    plan = planned(seed, streams)
    sized = [r.id for r in plan.registers if r.size_bytes]
    mutant = moved(plan, sized[one % len(sized)], sized[other % len(sized)])
    assert refuses(check_shared_bytes, mutant, InternalError) == shares_unordered(mutant)
    if races_in_first_firings(mutant):
        assert refuses(check_races, mutant, REFUSALS)


def test_the_mutants_are_not_all_harmless():
    by_bytes = by_variables = by_next_step = 0
    for seed in range(30):
        plan = planned(seed, 2)
        for register in controls(plan):
            mutant = without(plan, register)
            if refuses(check_shared_bytes, mutant, InternalError):
                by_bytes += 1
            elif races_in_first_firings(mutant):
                by_variables += 1
            elif all(a.inputs or a.name == "data" for a in mutant.actors):
                by_next_step += refuses(check_races, mutant, RaceError)
    assert by_bytes
    assert by_variables, "an update that overtakes a reader is a race on one register"
    assert by_next_step, "the fence keeps a step from the one before"


def temporaries_of(plan, actor):
    """Return the registers that the actor has to itself, in order of id."""
    written = {plan.views[v].register for launch in actor.launches for v in launch.outputs}
    rows = [plan.registers[r] for r in sorted(written)]
    return [r for r in rows if r.kind is RegisterKind.TEMPORARY and r.size_bytes]


def unordered_pair(first_has, second_has):
    """Return a plan and two actors without a path, with so many temporaries each."""
    for plan in [planned(seed, 2) for seed in range(100)]:
        reach = reach_of(plan)
        for a in plan.actors:
            for b in plan.actors:
                if a == b or reach[a.id][b.id] or reach[b.id][a.id]:
                    continue
                counts = [len(temporaries_of(plan, actor)) for actor in (a, b)]
                if counts[0] >= first_has and counts[1] >= second_has:
                    return plan, a, b
    raise AssertionError("no plan of these has two such actors")


def test_the_error_names_registers_and_actors():
    plan, first, second = unordered_pair(1, 1)
    mine, other = temporaries_of(plan, first)[0], temporaries_of(plan, second)[0]
    with raises(InternalError):
        check_shared_bytes(moved(plan, mine.id, other.id))


def test_bytes_far_inside_a_long_register_are_seen_behind_a_short_one():
    plan, first, second = unordered_pair(2, 1)
    (long, short), other = temporaries_of(plan, first)[:2], temporaries_of(plan, second)[0]
    sizes = {long.id: (0, 4096), short.id: (64, 64), other.id: (2048, 64)}
    registers = []
    for register in plan.registers:
        start, size = sizes.get(register.id, (0, 0))  # the others have no bytes
        registers.append(
            replace(register, size_bytes=size, offsets_bytes=(start,) * register.num_slots)
        )
    with raises(InternalError):
        check_shared_bytes(replace(plan, registers=tuple(registers)))
    registers[other.id] = replace(registers[other.id], offsets_bytes=(4096,))
    check_shared_bytes(replace(plan, registers=tuple(registers)))
