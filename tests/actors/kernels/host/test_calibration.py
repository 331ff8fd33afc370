from dataclasses import replace
from itertools import count
from random import Random

import numpy as np
import pytest
import tiers
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.kernels.common import cost
from actors.kernels.common.cost import DISTANCES_BYTES, EXTENTS, REFERENCE, Rates
from actors.kernels.common.kernel import BytePass
from actors.kernels.host.calibration import cached_rates, calibrate, probes, stopwatch


def priced(rates):
    """A machine of these rates, exactly."""
    return lambda probe: cost.duration_ns(probe.operands, probe.work, rates)


def random_rates(seed):
    rng = Random(seed)
    miss = sorted(rng.uniform(0.001, 0.05) for _ in DISTANCES_BYTES)
    return Rates(
        rng.uniform(200, 1000),
        rng.uniform(2, 40),
        tuple(rng.uniform(0.1, 0.5) for _ in BytePass),
        tuple(miss),
        tuple(rng.uniform(1.0, 50.0) for _ in range(len(EXTENTS) ** 3)),
    )


def flat(rates):
    columns = (rates.pass_ns, rates.miss_ns, rates.flops_per_ns)
    return np.array([rates.call_ns, rates.loop_ns, *[x for column in columns for x in column]])


@given(st.integers(0, 1000))
@settings(max_examples=tiers.examples(10), deadline=None)
def test_the_rates_of_a_machine_that_follows_the_model_are_found(seed):
    hidden = random_rates(seed)
    # The first probe also sweeps a few bytes, which it takes for a part of the call.
    np.testing.assert_allclose(flat(calibrate(priced(hidden))), flat(hidden), rtol=0.1)


def test_every_rate_has_one_probe_and_the_call_another_at_the_end():
    first, *revealed = [(probe.field, probe.place) for probe in probes()]
    assert first == revealed[-1] == ("call_ns", 0)
    assert len(set(revealed)) == len(revealed) == flat(REFERENCE).size


def test_a_moment_in_which_the_machine_is_slow_leaves_no_trace():
    times = count()
    machine = priced(REFERENCE)
    slow = calibrate(lambda probe: machine(probe) * (3 if next(times) < 50 else 1))
    assert slow == calibrate(machine)


def test_a_probe_is_run_as_often_as_its_time_allows_and_divided_by_it():
    ticks = count(step=1000)
    probe = next(p for p in probes() if p.field == "pass_ns")
    # Every reading of this clock is 1,000 ns after the one before, whatever runs in between.
    repeats = int(3e6 / 5 / 1000)
    assert stopwatch(lambda: next(ticks))(probe) == 1000 / repeats


def test_the_probes_of_every_kernel_can_be_run():
    ticks = count(step=10**9)
    measure = stopwatch(lambda: next(ticks))
    by_op = {probe.op: replace(probe, num_copies=1) for probe in reversed(tuple(probes()))}
    assert [measure(probe) for probe in by_op.values()] == [1e9] * len(by_op)


def test_kept_rates_are_not_measured_again(tmp_path):
    first = cached_rates(tmp_path / "new", "this", priced(REFERENCE))

    def refuse(probe):
        raise AssertionError("measured again")

    assert cached_rates(tmp_path / "new", "this", refuse) == first
    assert [path.suffix for path in (tmp_path / "new").iterdir()] == [".json"]


@pytest.mark.parametrize(("machine", "is_fresh"), [("that", False), ("this", True)])
def test_another_machine_or_the_wish_to_is_measured(tmp_path, machine, is_fresh):
    cached_rates(tmp_path, "this", priced(REFERENCE))
    other = random_rates(1)
    found = cached_rates(tmp_path, machine, priced(other), is_fresh=is_fresh)
    assert found == calibrate(priced(other))


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[: len(content) // 2],
        lambda content: content.replace(b"0", b"1", 1),
        lambda content: b"",
        lambda content: b"[" * 100_000,
    ],
)
def test_damaged_rates_are_measured_anew_with_a_line(tmp_path, damage, caplog):
    rates = cached_rates(tmp_path, "this", priced(REFERENCE))
    (path,) = tmp_path.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    assert cached_rates(tmp_path, "this", priced(REFERENCE)) == rates
    assert len(caplog.records) == 1
    assert f"{path} is damaged" in caplog.text
    assert "measured anew" in caplog.text
    assert cached_rates(tmp_path, "this", None) == rates


def test_rates_that_cannot_be_kept_are_measured_and_used(tmp_path, caplog):
    rates = cached_rates(tmp_path, "this", priced(REFERENCE))
    (path,) = tmp_path.iterdir()
    path.unlink()
    path.mkdir()
    assert cached_rates(tmp_path, "this", priced(REFERENCE)) == rates
    assert "not a regular file" in caplog.text
    assert "cannot be written" in caplog.text
    assert list(tmp_path.iterdir()) == [path]
