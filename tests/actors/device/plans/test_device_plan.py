"""Whole plans on a simulated device give, bit for bit, what they give on the host."""

from dataclasses import replace
from random import Random

import pytest
from error_texts import raises

from actors.kernels.host import catalogue
from actors.machine.errors import ActorFailed
from actors.machine.protocol import DeviceFailure
from actors.race.race import RaceError, check_races
from compiler.contract.errors import DeviceError, InternalError
from compiler.contract.placement import Device, DeviceKind, Memory

# -- plans of jobs -------------------------------------------------------------------------------


@pytest.mark.parametrize("is_apart", [False, True])
def test_a_training_job_gives_the_same_bits_on_the_device(is_apart, job_plan, plans):
    kernels = catalogue.kernels_by_name()
    expected = plans.on_host(job_plan, kernels)
    assert len(expected[0]) == plans.STEPS + 3
    plan = plans.put_on_device(job_plan, is_apart=is_apart)
    for seed in range(100):
        rng = Random(seed)
        assert plans.on_device(plan, kernels, rng, max_ahead=rng.randint(1, 3)) == expected, seed


def with_two_slots_of(plan, name):
    """The plan with fewer slots, so that a short run comes round to them."""
    registers = [
        replace(r, num_slots=2, offsets_bytes=r.offsets_bytes[:2]) if r.name == name else r
        for r in plan.registers
    ]
    return replace(plan, registers=tuple(registers))


@pytest.mark.parametrize("actor", ["data", "step", "metrics", "snapshot", "checkpoint"])
def test_a_training_job_without_the_waits_of_one_actor_gives_other_bits(actor, job_plan, plans):
    kernels = catalogue.kernels_by_name()
    expected = plans.on_host(job_plan, kernels)
    plan = plans.put_on_device(with_two_slots_of(job_plan, "batch"), is_apart=True)
    number = next(a.id for a in plan.actors if a.name == actor)
    forgetful = plans.without_waits(lambda actor, wait: actor == number)
    options = {"max_ahead": 3, "find_waits": forgetful}
    runs = (plans.on_device(plan, kernels, Random(s), **options) for s in range(40))
    assert any(found != expected for found in runs)


@pytest.mark.parametrize("is_apart", [False, True])
def test_a_training_job_gives_the_same_bits_through_the_real_loop(is_apart, job_plan, plans):
    kernels = catalogue.kernels_by_name()
    expected = plans.on_host(job_plan, kernels)
    plan = plans.put_on_device(job_plan, is_apart=is_apart)
    for seed in range(15):
        world = plans.World(plan, kernels, Random(seed))
        world.loop()
        assert world.result() == expected


# -- a pipeline over three streams whose scratch memory is shared --------------------------------


@pytest.mark.parametrize("num_slots", [1, 2, 3])
def test_a_pipeline_over_three_streams_gives_the_numbers_on_paper(
    num_slots, pipeline, log_of, plans
):
    plan = pipeline(num_slots=num_slots)
    check_races(plan)
    for seed in range(150):
        assert log_of(plan, seed) == plans.as_on_paper(8)


def test_shared_bytes_without_their_control_edge_are_wrong_numbers_and_a_named_race(
    pipeline, log_of, plans
):
    plan = pipeline(num_slots=2, has_turn=False)
    wrong = sum([log_of(plan, seed) != plans.as_on_paper(8) for seed in range(150)])
    assert wrong >= 10
    with pytest.raises(RaceError) as caught:
        check_races(plan)
    (race,) = caught.value.races
    assert {race.first.register, race.second.register} == {"one", "other"}
    assert race.missing == ("up", "step")
    unshared = pipeline(num_slots=2, has_turn=False, is_shared=False)
    check_races(unshared)
    assert all([log_of(unshared, seed) == plans.as_on_paper(8) for seed in range(50)])


def test_two_slots_on_the_same_bytes_are_wrong_numbers_and_a_named_race(pipeline, log_of, plans):
    plan = pipeline(num_slots=2, has_turn=False, is_shared=False)
    register = next(r for r in plan.registers if r.name == "x")
    folded = replace(register, offsets_bytes=register.offsets_bytes[:1] * 2)
    registers = [folded if r.name == "x" else r for r in plan.registers]
    plan = replace(plan, registers=tuple(registers))
    assert sum([log_of(plan, seed) != plans.as_on_paper(8) for seed in range(150)]) >= 10
    with raises(RaceError):
        check_races(plan)


# -- failures and refusals -----------------------------------------------------------------------


def test_a_kernel_that_fails_on_the_device_fails_the_run_with_its_place(
    pipeline, fake_kernel, no_thread_is_left, plans
):
    for seed in range(20):
        calls = iter(range(1000))

        def fail(inputs, outputs, calls=calls):
            if next(calls) == 3 * 6 + 2:
                raise ZeroDivisionError("no luck")
            plans.fold(inputs, outputs)

        plan = pipeline()
        steps = [a for a in plan.actors if a.name == "step"]
        launches = [replace(launch, kernel="fail") for launch in steps[0].launches]
        actors = [replace(a, launches=tuple(launches)) if a in steps else a for a in plan.actors]
        kernels = {"fold": fake_kernel(plans.fold), "fail": fake_kernel(fail)}
        world = plans.World(replace(plan, actors=tuple(actors)), kernels, Random(seed))
        with pytest.raises(ActorFailed) as caught:
            world.loop(steps=20)
        failed = caught.value
        assert (failed.actor, failed.firing, failed.launch) == ("step", 6, 2)
        assert isinstance(failed.__cause__, ZeroDivisionError)
        assert world.bound.variables.lost_with.startswith("launch ")
        with raises(DeviceFailure):
            world.bound.variables.read("any")
        world.bound.release()


def test_release_waits_for_the_device_and_lets_go_of_the_memory(pipeline, fake_kernel, plans):
    plan, ran = pipeline(), []
    kernels = {"fold": fake_kernel(lambda inputs, outputs: ran.append(1))}
    world = plans.World(plan, kernels, eagerness=0.0)
    (fire,) = world.bound.chains[1][0]
    fire()
    assert ran == []
    world.bound.release()
    world.bound.release()
    assert ran == [1] * len(plan.actors[1].launches)
    assert world.bound.chains == ()


def on_two_devices(plan):
    """Put every other stream of a device on another one."""
    streams = [
        replace(s, device=Device(s.device.kind, s.id % 2)) if s.device.kind is DeviceKind.SIM else s
        for s in plan.streams
    ]
    return replace(plan, streams=tuple(streams))


def test_streams_on_two_devices_give_the_same_bits(job_plan, pipeline, log_of, plans):
    kernels = catalogue.kernels_by_name()
    expected = plans.on_host(job_plan, kernels)
    plan = on_two_devices(plans.put_on_device(job_plan, is_apart=True))
    assert {str(s.device) for s in plan.streams} == {"host:0", "sim:0", "sim:1"}
    for seed in range(50):
        assert plans.on_device(plan, kernels, Random(seed)) == expected, seed
    plan = on_two_devices(pipeline(num_slots=2))
    for seed in range(100):
        assert log_of(plan, seed) == plans.as_on_paper(8), seed


def test_a_device_that_is_not_here_is_refused_with_what_is(pipeline, plans):
    plan = pipeline()
    streams = [replace(s, device=Device(DeviceKind.CUDA, 1)) for s in plan.streams]
    with raises(DeviceError):
        plans.World(replace(plan, streams=tuple(streams)), {})


def test_a_source_on_a_device_is_refused_with_the_way_out(pipeline, fake_kernel, plans):
    plan = pipeline()
    streams = [replace(s, device=plans.GPU) for s in plan.streams]
    with raises(InternalError):
        plans.World(replace(plan, streams=tuple(streams)), {"fold": fake_kernel(plans.fold)})


def test_a_port_sees_no_memory_of_a_device(pipeline, fake_kernel, plans):
    plan = pipeline()
    arenas = [replace(a, device=plans.GPU, memory=Memory.DEVICE) for a in plan.arenas]
    with raises(InternalError):
        plans.World(replace(plan, arenas=tuple(arenas)), {"fold": fake_kernel(plans.fold)})


def test_initial_credits_are_counted_when_a_resumed_run_starts_between_two_snapshots(
    job_plan, plans
):
    kernels = catalogue.kernels_by_name()
    plan, initial = plans.put_on_device(job_plan, is_apart=True), {"updated": 2}
    results = []
    for seed in range(20):
        rng = Random(seed)
        on_device = plan if seed else job_plan
        world = plans.World(on_device, kernels, rng, initial=initial)
        world.explore(rng, initial=initial)
        results.append(world.result())
    assert all(result == results[0] for result in results)
    assert [s["step"] for row in world.sinks["checkpoint"].rows for s in row] == [1, 4, 7, 7]
