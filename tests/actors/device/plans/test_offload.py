"""State and activations in host memory, on a device that is late on purpose: the same bits."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from error_texts import raises

import actorflow as af
from actorflow import nn
from actors.kernels.host import catalogue
from actors.race.race import RaceError, check_races
from actors.testing.simulated import poison
from compiler.budget import offload
from compiler.contract.plan_tables import RegisterKind
from compiler.pipeline import pipeline


class Model(nn.Module):
    def __init__(self):
        self.up, self.mid, self.down = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 5)

    def __call__(self, x):
        hidden = af.dropout(af.relu(self.up(x)), 0.2)
        return self.down(af.gelu(self.mid(hidden), approximate="tanh"))


def compiled(cache, move, **options):
    """The plan of a training job whose ordered graph `move` has changed."""

    @af.job(optimizer=af.optim.AdamW(1e-2), **options)
    def train(model, batch):
        return af.cross_entropy(model(batch.x), batch.y)

    def moving(graph, target, *rest):
        return lower(move(graph, target), target, *rest)

    lower = pipeline.lower
    data = {"x": np.zeros((16, 8), np.float32), "y": np.zeros(16, np.int32)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACTORFLOW_CACHE", str(cache))
        patch.setattr(pipeline, "lower", moving)
        return train.compile(Model(), af.data.ArraySource(data, batch=4), every=3)


def move(graph, target):
    """All optimizer state, and every activation that is idle at all, in buckets of 600 bytes."""
    names = offload.state_names(graph)
    idle = [i.value for i in offload.idle_values(graph, target) if i.idle_ns > 0]
    assert len(names) == 12
    assert len(idle) >= 3
    graph = offload.offload_variables(graph, names, target, bucket_bytes=600)
    return offload.spill_values(graph, idle, target, bucket_bytes=600)


@pytest.fixture(scope="module", params=[{}, {"accumulate": 2}, {"streams": 2}], ids=str)
def both(request, tmp_path_factory):
    """The plan of a job as it is, and with all that can go in host memory."""
    caches = [tmp_path_factory.mktemp(name) for name in ("plain", "moved")]
    plain = compiled(caches[0], lambda graph, target: graph, **request.param)
    return plain, compiled(caches[1], move, **request.param)


def test_the_same_bits_on_the_host_and_on_the_device_however_late_copies_are(both, plans):
    plain, moved = both
    kernels = catalogue.kernels_by_name()
    expected = plans.on_host(plain, kernels)
    assert plans.on_host(moved, kernels) == expected
    on_device = plans.put_on_device(moved)
    assert {s.name for s in on_device.streams if s.device == plans.GPU} >= {"compute", "h2d", "d2h"}
    for seed in range(25):
        rng = Random(seed)
        assert plans.on_device(on_device, kernels, rng, max_ahead=rng.randint(1, 3)) == expected


def test_the_same_bits_when_every_actor_has_a_stream_and_free_bytes_are_scribbled_over(both, plans):
    plain, moved = both
    kernels = catalogue.kernels_by_name()
    expected = plans.on_host(plain, kernels)
    plan = poison(plans.put_on_device(moved, is_apart=True))
    check_races(plan)
    for seed in range(15):
        assert plans.on_device(plan, kernels, Random(seed)) == expected, seed


def test_the_same_bits_through_the_real_loop_with_threads_for_the_copies(both, plans):
    plain, moved = both
    kernels = catalogue.kernels_by_name()
    expected = plans.on_host(plain, kernels)
    for _ in range(3):
        world = plans.World(moved, kernels)
        world.loop()
        assert world.result() == expected


def test_each_memory_is_one_block_and_the_variables_lie_in_theirs(both, plans):
    _, moved = both
    world = plans.World(moved, catalogue.kernels_by_name())
    assert len(moved.arenas) == 2
    device, host = world.blocks[moved.arenas[0].device]
    for number, variable in enumerate(moved.variables):
        view = moved.views[variable.view]
        world.bound.variables.write(variable.name, np.full(view.type.shape, number + 1))
        written = world.bound.variables.read(variable.name).tobytes()
        begin = moved.registers[view.register].offsets_bytes[0] + view.offset_bytes
        block = host if variable.role == "optimizer" else device
        assert block[begin : begin + len(written)].tobytes() == written


def test_a_copy_out_that_waits_for_nothing_gives_other_bits(both, plans):
    plain, moved = both
    kernels = catalogue.kernels_by_name()
    expected = plans.on_host(plain, kernels)
    plan = plans.put_on_device(moved, is_apart=True)
    outs = [a.id for a in plan.actors if a.name.startswith("copy_out")]
    forgetful = plans.without_waits(lambda actor, wait: actor in outs)
    options = {"max_ahead": 3, "find_waits": forgetful}
    runs = (plans.on_device(plan, kernels, Random(s), **options) for s in range(20))
    assert any(found != expected for found in runs)


def without(plan, *edges):
    actors = [
        replace(
            actor,
            inputs=tuple([port for port in actor.inputs if port.register not in edges]),
            outputs=tuple([port for port in actor.outputs if port.register not in edges]),
        )
        for actor in plan.actors
    ]
    return replace(plan, actors=tuple(actors))


def test_a_plan_that_does_not_order_an_update_and_its_copy_out_is_refused(both):
    _, moved = both
    updating = {
        actor.name
        for actor in moved.actors
        if any([launch.op == "adamw_update" for launch in actor.launches])
    }
    edges_into = {}
    for register in moved.registers:
        before, _, after = register.name.partition(">")
        is_order = register.kind is RegisterKind.CONTROL and before in updating
        if is_order and after.startswith("copy_out"):
            edges_into.setdefault(after, []).append(register.id)
    assert len(edges_into) >= 3
    for edges in edges_into.values():
        with raises(RaceError):
            check_races(without(moved, *edges))
