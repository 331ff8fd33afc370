import math
from dataclasses import astuple, replace
from itertools import count
from random import Random

import pytest

from actors.kernels.common import cost
from actors.kernels.common.cost import REFERENCE
from actors.kernels.common.kernel import BytePass
from actors.kernels.host.calibration import _SORTS, calibrate, probes, stopwatch
from actors.kernels.library import runtime


def hidden_rates(seed, num_threads):
    """Rates of a machine that differs from the reference in what a probe stands for."""
    rng = Random(seed)
    factors = {s: f for ss in _SORTS.values() for f in [rng.uniform(0.4, 0.9)] for s in ss}
    factors[BytePass.SCORE] = 8.0  # or it is lost beside the products of attention
    passes = zip(BytePass, REFERENCE.pass_ns, strict=True)
    return replace(
        REFERENCE,
        call_ns=rng.uniform(50, 150),
        loop_ns=rng.uniform(5, 40),
        pass_ns=tuple([ns * factors[sort] for sort, ns in passes]),
        miss_ns=tuple(sorted(rng.uniform(0.002, 0.03) for _ in REFERENCE.miss_ns)),
        flops_per_ns=tuple([rng.uniform(100, 250) for _ in REFERENCE.flops_per_ns]),
        num_threads=num_threads,
        compute_gain=rng.uniform(1.2, 1.9),
        move_gain=rng.uniform(1.2, 1.9),
        wake_ns=rng.uniform(20_000, 50_000),
    )


def machine_of(rates):
    """A machine of these rates, exactly."""

    def measure(probe):
        threads = rates if probe.on_all_threads else replace(rates, num_threads=1)
        swept = cost.swept((*probe.inputs, *probe.outputs), probe.work)
        total = sum([cost.footprint_bytes(operand) for operand in swept])
        idle_ns = math.inf if probe.is_asleep else 0.0
        missed_ns = total * rates.miss_ns_at(total)
        return threads.price(probe.work, missed_ns, idle_ns).duration_ns

    return measure


def flat(rates):
    columns = [v if isinstance(v, tuple) else (v,) for v in astuple(rates)]
    return [x for column in columns for x in column]


@pytest.mark.parametrize("seed", range(5))
def test_the_rates_of_a_machine_that_follows_the_model_are_measured(native, seed):
    hidden = hidden_rates(seed, 2)
    # Opening the pool and a few instructions are a part of what the longest probes take.
    assert flat(calibrate(machine_of(hidden))) == pytest.approx(flat(hidden), rel=0.08)


def test_rates_of_numpy_are_measured_where_c_is_off(monkeypatch):
    monkeypatch.setattr(runtime._state, "is_on", False)
    hidden = replace(
        hidden_rates(1, 1), compute_gain=1.0, move_gain=1.0, wake_ns=0.0, call_ns=900.0
    )
    rates = calibrate(machine_of(hidden))
    for name in ("call_ns", "loop_ns", "flops_per_ns"):
        assert getattr(rates, name) == pytest.approx(getattr(hidden, name), rel=0.1)
    for sort in (BytePass.PLAIN, BytePass.EXP, BytePass.GATHER):
        assert rates.pass_ns_of(sort) == pytest.approx(hidden.pass_ns_of(sort), rel=0.1)


def test_a_moment_in_which_the_machine_is_slow_leaves_no_trace():
    times = count()
    machine = machine_of(REFERENCE)
    slow = calibrate(lambda probe: machine(probe) * (3 if next(times) < len(probes()) else 1))
    assert slow == calibrate(machine)


def test_every_probe_can_be_run(native):
    ticks = count(step=10**9)  # every reading of this clock is a second after the one before
    measure = stopwatch(lambda: next(ticks))
    assert [measure(probe) for probe in probes().values()] == [1e9] * len(probes())


def test_a_probe_takes_the_median_of_its_samples(native):
    # A probe is run once to be timed; from then on each sample takes as long as one of these.
    ticks, samples, is_end = 0, iter([1, *[10] * 12, 20, *[70] * 12]), False

    def clock():
        nonlocal ticks, is_end
        ticks += next(samples) * 10**9 if is_end else 0
        is_end = not is_end
        return ticks

    assert stopwatch(clock)(probes()["row"]) == 20e9
