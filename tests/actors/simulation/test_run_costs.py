import pytest

from actors.kernels.common.cost import Price
from actors.simulation.costs import RunCosts, on_host
from compiler.contract.plan_tables import ActorKind

COSTS = RunCosts(turn_ns=10.0, hop_ns=5.0, source_ns=100.0, sink_ns=50.0, port_byte_ns=2.0)


@pytest.fixture
def plan(plan_maker):
    make = plan_maker()
    batch, out = make.edge("batch", 2), make.edge("metrics", 2)
    make.actor("data", ActorKind.SOURCE, outputs=[(batch, 1)])
    make.actor("step", ActorKind.COMPUTE, inputs=[(batch, 1)], outputs=[(out, 1)])
    make.actor("metrics", ActorKind.SINK, inputs=[(out, 1)])
    return make.plan()


def test_ports_cost_what_they_move_and_chains_a_turn(plan):
    prices = (Price(0.0, 0.0), Price(400.0, 790.0), Price(0.0, 0.0))
    durations, host = on_host(plan, prices, 2.0, COSTS)
    size = plan.registers[0].size_bytes
    assert durations == (100 + 2 * size, 410, 50 + 2 * size)
    assert host.capacity == 2.0
    assert host.demands == (1.0, 800 / 410, 1.0)


def test_only_threads_are_woken(plan):
    _, host = on_host(plan, (Price(1.0, 1.0),) * 3, 2.0, COSTS)
    assert host.wake_ns == (5.0, 0.0, 5.0)
    assert host.post_ns == (5.0, 0.0, 5.0)


def test_a_firing_that_takes_no_time_wants_one_core(plan):
    _, host = on_host(plan, (Price(0.0, 0.0),) * 3, 2.0, RunCosts())
    assert host.demands == (1.0, 1.0, 1.0)
