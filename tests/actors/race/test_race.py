"""Races are found and named with the edge that mends them, and ordered plans pass."""

from dataclasses import replace

import pytest
from error_texts import raises
from plans import actor_of, register_of, trained_plan, with_actor, with_register

from actors.race.race import RaceError, UnrollLimits, check_races, check_unrolled
from compiler.contract.errors import InternalError
from compiler.contract.plan_tables import ActorKind, Field, Port, Register, RegisterKind
from compiler.contract.types import RegisterId

EVERY = 4


@pytest.fixture(scope="module")
def job_plan(tmp_path_factory):
    """A training step with a snapshot of the variables after every fourth."""
    return trained_plan(tmp_path_factory.mktemp("plans"), EVERY)


def races_of(plan):
    with pytest.raises(RaceError) as caught:
        check_races(plan)
    return caught.value


def pairs_of(error):
    return {frozenset((race.first.actor, race.second.actor)) for race in error.races}


# -- the plan of a job and its mutants -----------------------------------------------------------


def test_the_plan_of_a_training_job_has_no_race(job_plan):
    report = check_races(job_plan)
    assert report.periods >= 3
    assert report.num_firings == report.periods * (3 * EVERY + 2)
    assert report.num_classes >= 4
    assert report.num_pairs > 0
    assert report.is_exhaustive


def test_more_periods_than_needed_are_unrolled_on_demand(job_plan):
    assert check_unrolled(job_plan, periods=20).num_firings == 20 * (3 * EVERY + 2)


def moved_credit(plan):
    """The credit for a snapshot comes from the data source: nothing ties it to the update."""
    updated = register_of(plan, "updated").id
    step, data = actor_of(plan, "step"), actor_of(plan, "data")
    outputs = tuple(port for port in step.outputs if port.register != updated)
    plan = with_actor(plan, "step", outputs=outputs)
    return with_actor(plan, "data", outputs=(*data.outputs, Port(updated, 1)))


def test_a_snapshot_that_does_not_wait_for_the_update_is_a_race_on_every_variable(job_plan):
    error = races_of(moved_credit(job_plan))
    assert pairs_of(error) == {frozenset({"step", "snapshot"})}
    names = {variable.name for variable in job_plan.variables}
    read = {r.first.register for r in error.races} | {r.second.register for r in error.races}
    assert {"up.weight", "up.bias", "down.weight", "down.bias"} <= names & read


def test_a_race_tells_both_accesses_the_bytes_and_the_missing_edge(job_plan):
    error = races_of(moved_credit(job_plan))
    weight = register_of(job_plan, "up.weight")
    race = next(r for r in error.races if r.first.register == "up.weight")
    assert (race.start_bytes, race.end_bytes) == (
        weight.offsets_bytes[0],
        weight.offsets_bytes[0] + 8 * 16 * 4,
    )
    accesses = {race.first.actor: race.first, race.second.actor: race.second}
    assert accesses["step"].is_write
    assert not accesses["snapshot"].is_write
    assert accesses["snapshot"].op == "copy_block"
    assert accesses["snapshot"].scope == "up.weight to adam_v/down.bias"
    assert "plans.py:" in accesses["snapshot"].source
    assert race.is_same_stream
    assert race.missing == ("step", "snapshot")
    assert (race.rates, race.num_slots) == ((1, EVERY), EVERY)
    text = str(error)
    assert "add a control edge from 'step' to 'snapshot' (rates 1 and 4, 4 slots)" in text
    assert "either way round on one stream" in text
    assert f"races:\n  bytes [{error.races[0].start_bytes}," in text
    assert f"and {len(error.races) - 8} more" in text


def test_the_control_edge_that_the_message_asks_for_mends_the_plan(job_plan):
    broken = moved_credit(job_plan)
    check_races(mended(broken, races_of(broken).races[0]))


def test_a_snapshot_without_its_credits_cannot_fire_and_is_refused(job_plan):
    updated = register_of(job_plan, "updated").id
    step = actor_of(job_plan, "step")
    outputs = tuple(port for port in step.outputs if port.register != updated)
    plan = with_actor(job_plan, "step", outputs=outputs)
    with raises(InternalError):
        check_races(with_actor(plan, "snapshot", inputs=()))


def test_one_credit_too_many_lets_the_next_update_run_into_the_snapshot(job_plan):
    loose = with_register(job_plan, "updated", num_slots=EVERY + 1, offsets_bytes=(0,) * 5)
    assert pairs_of(races_of(loose)) == {frozenset({"step", "snapshot"})}


def test_one_credit_too_few_is_refused_because_no_snapshot_could_be_taken(job_plan):
    tight = with_register(job_plan, "updated", num_slots=EVERY - 1, offsets_bytes=(0,) * 3)
    with raises(InternalError):
        check_races(tight)


@pytest.mark.parametrize("name", ["batch", "metrics"])
def test_a_single_slot_on_an_edge_is_slow_but_safe(job_plan, name):
    register = register_of(job_plan, name)
    assert register.num_slots > 1
    offset = register.offsets_bytes[0]
    check_races(with_register(job_plan, name, num_slots=1, offsets_bytes=(offset,)))


@pytest.mark.parametrize(
    ("name", "ends"),
    [
        ("batch", {"data", "step"}),
        ("metrics", {"step", "metrics"}),
        ("staging", {"snapshot", "checkpoint"}),
    ],
)
def test_two_slots_at_the_same_offset_are_a_race_of_producer_and_consumer(job_plan, name, ends):
    offset = register_of(job_plan, name).offsets_bytes[0]
    error = races_of(with_register(job_plan, name, num_slots=2, offsets_bytes=(offset, offset)))
    assert pairs_of(error) == {frozenset(ends)}
    race = error.races[0]
    assert {race.first.register, race.second.register} == {name}
    assert race.first.slot != race.second.slot
    assert "at the same time" in str(race)
    assert "or give both bytes of their own" in str(race)


@pytest.mark.parametrize(
    ("name", "other"), [("batch", "data"), ("metrics", "metrics"), ("staging", "checkpoint")]
)
def test_a_temporary_on_the_bytes_of_an_edge_races_with_the_other_end(job_plan, name, other):
    offset = register_of(job_plan, name).offsets_bytes[-1]
    temporary = next(r for r in job_plan.registers if r.kind is RegisterKind.TEMPORARY)
    moved = with_register(job_plan, temporary.name, offsets_bytes=(offset,))
    error = races_of(moved)
    assert frozenset({"step", other}) in pairs_of(error)
    assert any(
        {race.first.register, race.second.register} == {temporary.name, name}
        for race in error.races
    )


def test_a_sink_that_reads_a_variable_in_place_needs_its_edge_to_have_one_slot(job_plan):
    weight = next(v for v in job_plan.variables if v.name == "up.weight")
    metrics = register_of(job_plan, "metrics")
    field = Field("up.weight", metrics.id, weight.view, 0, weight.between)
    plan = replace(job_plan, fields=(*job_plan.fields, field))
    error = races_of(plan)
    assert pairs_of(error) == {frozenset({"step", "metrics"})}
    (race,) = error.races
    assert {race.first.op, race.second.op} >= {"sink"}
    assert (race.first.register, race.second.register) == ("up.weight", "up.weight")
    offset = metrics.offsets_bytes[0]
    check_races(with_register(plan, "metrics", num_slots=1, offsets_bytes=(offset,)))


# -- small plans ---------------------------------------------------------------------------------


def two_readers(make, *, is_shared):
    """A source feeds two actors that write the same scratch bytes."""
    left, right = make.edge("left"), make.edge("right")
    scratch = make.view(make.register("scratch", RegisterKind.TEMPORARY))
    make.actor("data", ActorKind.SOURCE, outputs=[(left, 1), (right, 1)])
    for name, register in (("one", left), ("two", right)):
        launch = make.launch(name, [make.field_view(register)], [scratch])
        make.actor(name, ActorKind.COMPUTE, inputs=[(register, 1)], launches=[launch])
    plan = make.plan()
    return with_actor(plan, "two", stream=actor_of(plan, "one").stream) if is_shared else plan


@pytest.mark.parametrize("is_shared", [False, True])
def test_actors_without_a_path_race_even_on_one_stream(plan_maker, is_shared):
    (race,) = races_of(two_readers(plan_maker(), is_shared=is_shared)).races
    assert {race.first.actor, race.second.actor} == {"one", "two"}
    assert race.is_same_stream == is_shared


def test_the_first_launch_that_touches_the_bytes_is_named(plan_maker):
    make = plan_maker()
    plan = two_readers(make, is_shared=False)
    one = actor_of(plan, "one")
    nothing, again = make.launch("nothing"), make.launch("again", [], one.launches[0].outputs)
    plan = replace(plan, sources=tuple(make.sources))
    plan = with_actor(plan, "one", launches=(nothing, one.launches[0], again))
    (race,) = races_of(plan).races
    assert {race.first.op, race.second.op} == {"op_one", "op_two"}


@pytest.mark.parametrize("role", ["inputs", "workspace"])
def test_reading_alone_is_no_race_and_a_workspace_counts_as_written(plan_maker, role):
    plan = two_readers(plan_maker(), is_shared=False)
    for name in ("one", "two"):
        launch = actor_of(plan, name).launches[0]
        operand = launch.outputs[0] if role == "workspace" else launch.outputs
        changed = replace(launch, outputs=(), **{role: operand})
        plan = with_actor(plan, name, launches=(changed,))
    if role == "workspace":
        assert len(races_of(plan).races) == 1
    else:
        check_races(plan)


@pytest.mark.parametrize(("offset", "is_race"), [(4, True), (7, True), (8, False)])
def test_views_race_only_where_their_bytes_overlap(plan_maker, offset, is_race):
    make = plan_maker()
    plan = two_readers(make, is_shared=False)
    scratch = plan.registers[2]
    other = replace(
        scratch, id=RegisterId(3), name="other", offsets_bytes=(scratch.offsets_bytes[0] + offset,)
    )
    view = replace(plan.views[-1], register=RegisterId(3))
    plan = replace(plan, registers=(*plan.registers, other), views=(*plan.views, view))
    launch = replace(actor_of(plan, "two").launches[0], outputs=(len(plan.views) - 1,))
    plan = with_actor(plan, "two", launches=(launch,))
    if is_race:
        (race,) = races_of(plan).races
        assert race.end_bytes - race.start_bytes == 8 - offset
    else:
        check_races(plan)


def test_the_reach_of_a_view_with_negative_and_long_strides_counts(plan_maker):
    make = plan_maker()
    plan = two_readers(make, is_shared=False)
    base = plan.registers[2].offsets_bytes[0]
    backwards = replace(plan.views[-1], offset_bytes=40, strides_bytes=(-16,))
    plan = replace(plan, views=(*plan.views[:-1], backwards))
    (race,) = races_of(plan).races
    assert (race.start_bytes, race.end_bytes) == (base + 24, base + 44)


def test_a_race_between_late_slots_is_found_beyond_the_periods_asked_for(plan_maker):
    make = plan_maker()
    edge = make.edge("edge", num_slots=9)
    make.actor("data", ActorKind.SOURCE, outputs=[(edge, 1)])
    make.actor("log", ActorKind.SINK, inputs=[(edge, 1)])
    plan = make.plan()
    check_races(plan)
    offsets = plan.registers[0].offsets_bytes
    error = races_of(with_register(plan, "edge", offsets_bytes=(*offsets[:8], offsets[7])))
    (race,) = error.races
    assert {race.first.slot, race.second.slot} == {7, 8}


def test_a_graph_that_deadlocks_is_refused(plan_maker):
    make = plan_maker()
    start, there, back = make.edge("start"), make.edge("there"), make.edge("back")
    make.actor("data", ActorKind.SOURCE, outputs=[(start, 1)])
    make.actor("ping", ActorKind.COMPUTE, inputs=[(start, 1), (back, 1)], outputs=[(there, 1)])
    make.actor("pong", ActorKind.COMPUTE, inputs=[(there, 1)], outputs=[(back, 1)])
    with raises(InternalError):
        check_races(make.plan())


def test_a_credit_to_start_with_can_leave_a_write_and_a_read_without_an_order(plan_maker):
    make = plan_maker()
    batch, done = make.edge("batch"), make.register("done", RegisterKind.CONTROL, 2)
    state = make.view(make.register("state", RegisterKind.VARIABLE))
    make.actor("data", ActorKind.SOURCE, outputs=[(batch, 1)])
    write, read = make.launch("write", [], [state]), make.launch("read", [state])
    make.actor("step", ActorKind.COMPUTE, [(batch, 1)], [(done, 1)], [write])
    make.actor("save", ActorKind.COMPUTE, [(batch, 1), (done, 1)], [], [read])
    plan = make.plan()
    check_races(plan)
    with pytest.raises(RaceError) as caught:
        check_unrolled(plan, initial={"done": 1})
    assert pairs_of(caught.value) == {frozenset({"step", "save"})}


def test_a_plan_of_enormous_rates_is_checked_in_part_and_says_so(plan_maker):
    make = plan_maker()
    credit = make.register("credit", RegisterKind.CONTROL, 1)
    make.actor("data", ActorKind.SOURCE, outputs=[(credit, 1)])
    make.actor("rare", ActorKind.SINK, inputs=[(credit, 1000)])
    plan = with_register(make.plan(), "credit", num_slots=1000, offsets_bytes=())
    report = check_unrolled(plan, limits=UnrollLimits(max_firings=100, long_period=1 << 62))
    assert not report.is_exhaustive
    assert report.num_firings == 100


def mended(plan, race):
    """The plan with the control edge that the race asks for."""
    number = RegisterId(len(plan.registers))
    slots = race.num_slots
    credit = Register(number, "credit", RegisterKind.CONTROL, 0, 0, slots, (0,) * slots, (0, 1), "")
    plan = replace(plan, registers=(*plan.registers, credit))
    producer, consumer = (actor_of(plan, name) for name in race.missing)
    plan = with_actor(plan, producer.name, outputs=(*producer.outputs, Port(number, race.rates[0])))
    return with_actor(plan, consumer.name, inputs=(*consumer.inputs, Port(number, race.rates[1])))
