"""A plan of a device is checked as it will run there: by what is waited for, not by messages."""

from dataclasses import replace
from random import Random

import pytest
from error_texts import raises

from actors.machine.table import MachineTable
from actors.race.race import RaceError, UnrollLimits, check_order, check_races, check_unrolled
from actors.race.waits import asynchronous_streams, order_of_run, order_of_work, wait_table
from actors.testing.simulated import POISON_KERNELS
from compiler.contract.placement import Device, DeviceKind


def waits_of(plan):
    table = MachineTable.of(plan)
    streams = asynchronous_streams(plan)
    return table, streams, wait_table(table, streams, 1).needed


USUAL = UnrollLimits()


def races_without(plan, left_out, periods=3, limits=USUAL):
    """The races of a plan whose executor leaves out the waits for which a function says so."""
    table, streams, needed = waits_of(plan)
    kept = [
        tuple([wait for wait in row if not left_out(actor, wait)])
        for actor, row in enumerate(needed)
    ]
    try:
        check_order(plan, table, order_of_work(table, kept, streams), periods, limits=limits)
    except RaceError as error:
        return error.races
    return ()


def test_a_plan_on_the_host_is_checked_by_its_own_table(job_plan):
    table = MachineTable.of(job_plan)
    assert order_of_run(job_plan, table) is table


@pytest.mark.parametrize("is_apart", [False, True])
def test_the_plan_of_a_job_has_no_race_on_a_device(is_apart, job_plan, plans):
    plan = plans.put_on_device(job_plan, is_apart=is_apart)
    report = check_races(plan)
    assert report.is_exhaustive
    assert report.num_firings > check_races(job_plan).num_firings


def test_without_any_wait_what_messages_order_is_a_race_that_says_so(job_plan, plans):
    plan = plans.put_on_device(job_plan, is_apart=True)
    races = races_without(plan, lambda actor, wait: True)
    ends = {frozenset((race.first.actor, race.second.actor)) for race in races}
    assert {frozenset(("step", "snapshot")), frozenset(("step", "data"))} <= ends
    assert all([race.is_enqueued for race in races])
    assert "a wait for its event is missing" in str(races[0])
    assert "add a control edge" not in str(races[0])


def test_what_no_message_orders_wants_an_edge_on_a_device_too(pipeline):
    with raises(RaceError) as caught:
        check_races(pipeline(has_turn=False))
    assert not any([race.is_enqueued for race in caught.value.races])


@pytest.mark.parametrize("num_slots", [1, 2])
def test_a_wait_less_is_a_race_exactly_where_numbers_come_out_wrong(
    num_slots, pipeline, fake_kernel, plans
):
    plan = pipeline(num_slots=num_slots)
    _, _, needed = waits_of(plan)
    places = [(actor, wait) for actor, row in enumerate(needed) for wait in row]
    outcomes = set()
    for place in places:
        races = races_without(plan, lambda *found, place=place: found == place)
        logs = [log_without(plan, place, seed, fake_kernel, plans) for seed in range(120)]
        is_wrong = any([log != plans.as_on_paper(8) for log in logs])
        assert bool(races) == is_wrong, place
        outcomes.add(is_wrong)
    assert True in outcomes


def log_without(plan, place, seed, fake_kernel, plans):
    """What the pipeline logs on a device whose executor lacks one wait."""
    kernels = {"fold": fake_kernel(plans.fold), **POISON_KERNELS}
    rng = Random(seed)
    forgetful = plans.without_waits(lambda *some: some == place)
    world = plans.World(plan, kernels, rng, max_ahead=3, find_waits=forgetful)
    world.explore(rng, steps=8)
    return [token["x"].tolist() for row in world.sinks["log"].rows for token in row]


def test_streams_of_two_devices_are_ordered_by_events_between_them(job_plan, plans):
    plan = plans.put_on_device(job_plan, is_apart=True)
    other = Device(DeviceKind.SIM, 1)
    streams = [
        replace(s, device=other) if s.name == "stream of snapshot" else s for s in plan.streams
    ]
    plan = replace(plan, streams=tuple(streams))
    check_races(plan)
    snapshot = next(a.id for a in plan.actors if a.name == "snapshot")
    races = races_without(plan, lambda actor, wait: actor == snapshot)
    assert {race.is_enqueued for race in races} == {True}


def test_a_long_period_on_a_device_is_checked_to_its_end(pipeline):
    plan = pipeline()
    whole = check_unrolled(plan, periods=60)
    short = check_unrolled(plan, periods=60, limits=UnrollLimits(long_period=0))
    assert short.is_exhaustive
    assert short.num_firings < whole.num_firings / 2


@pytest.mark.parametrize("num_slots", [1, 2, 3])
def test_what_is_left_out_of_a_long_period_hides_no_race(num_slots, pipeline):
    plan = pipeline(num_slots=num_slots)
    _, _, needed = waits_of(plan)
    places = [(actor, wait) for actor, row in enumerate(needed) for wait in row]
    found = []
    for limits in (USUAL, UnrollLimits(long_period=0)):
        found.append(
            [
                bool(races_without(plan, lambda *some, place=place: some == place, 40, limits))
                for place in places
            ]
        )
        check_unrolled(plan, periods=40, limits=limits)
    assert found[0] == found[1]
    assert any(found[0])
