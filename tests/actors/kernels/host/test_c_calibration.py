from dataclasses import astuple, replace
from itertools import count, product
from random import Random

import pytest

from actors.kernels.common.cost import (
    ATTENTION_ROWS,
    ATTENTION_WIDTHS,
    C_DISTANCES_BYTES,
    C_EXTENTS,
    MOVES,
    CRates,
)
from actors.kernels.common.kernel import BytePass
from actors.kernels.host import c_calibration
from actors.kernels.host.c_calibration import calibrate_c, stopwatch_c

NUM_HEADS = len(ATTENTION_ROWS) * len(ATTENTION_WIDTHS)


def hidden_rates(seed):
    """Rates of a machine on which one addition takes less than moving its operands."""
    rng = Random(seed)
    passes = [rng.uniform(0.01, 0.02) if s in MOVES else rng.uniform(0.1, 0.5) for s in BytePass]
    passes[list(BytePass).index(BytePass.PLAIN)] = rng.uniform(0.002, 0.008)
    miss = sorted(rng.uniform(0.001, 0.05) for _ in C_DISTANCES_BYTES)
    return CRates(
        num_threads=2,
        call_ns=rng.uniform(5, 50),
        open_ns=rng.uniform(500, 5000),
        wake_ns=rng.uniform(20_000, 50_000),
        pass_speedup=rng.uniform(1.2, 2.0),
        miss_speedup=rng.uniform(1.2, 2.0),
        product_speedup=rng.uniform(1.2, 2.0),
        pass_ns=tuple(passes),
        miss_ns=tuple(miss),
        flops_per_ns=tuple(
            min(rng.uniform(1, 90), m * n * k / 10) for m, n, k in product(C_EXTENTS, repeat=3)
        ),
        forward=tuple(rng.uniform(10, 90) for _ in range(NUM_HEADS)),
        backward=tuple(rng.uniform(10, 90) for _ in range(NUM_HEADS)),
    )


def machine_of(rates):
    """A machine of these rates, exactly."""

    def measure(probe):
        own = rates if probe.on_all_threads else replace(rates, num_threads=1)
        missed_ns = probe.touched_bytes * rates.miss_ns_at(probe.touched_bytes)
        before_ns = 0.0
        if probe.before is not None:
            before_ns = replace(rates, num_threads=1).price(probe.before, 0.0).duration_ns
        return before_ns + own.price(probe.work, missed_ns, before_ns).duration_ns

    return measure


def flat(rates):
    return [x for column in astuple(rates) for x in (column if type(column) is tuple else [column])]


@pytest.mark.parametrize("seed", range(1))
def test_the_rates_of_a_machine_that_follows_the_model_are_found(native, seed):
    hidden = hidden_rates(seed)
    # Opening the pool and one element are a part of what the longest probes take.
    assert flat(calibrate_c(machine_of(hidden))) == pytest.approx(flat(hidden), rel=0.05)


def test_every_probe_of_the_catalogue_can_be_bound_and_run(native):
    ticks = count(step=10**9)  # every reading of this clock is a second after the one before
    measure = stopwatch_c(lambda: next(ticks))
    probes = (
        *[c_calibration.program(op, times, 64) for op, times in c_calibration.INSTRUCTIONS.items()],
        c_calibration.row_sums(4, 64),
        c_calibration.random_bits(64),
        c_calibration.moved(16),
        c_calibration.taken(16, 8),
        c_calibration.added(16, 8),
        c_calibration.shared_product(64, on_all_threads=True),
        c_calibration.attention(32, 32, is_forward=True),
        c_calibration.attention(32, 32, is_forward=False),
        c_calibration.after(
            c_calibration.taken(16, 8), c_calibration.shared_product(64, on_all_threads=True)
        ),
    )
    assert [measure(probe) for probe in probes] == [1e9] * len(probes)


def test_a_probe_takes_the_median_of_its_samples(native):
    # A probe is run twice before; from then on each sample takes as long as one of these.
    ticks, samples = 0, iter([1, 1, *[10, 20, 70] * 8])

    def clock():
        nonlocal ticks, is_end
        ticks += next(samples) * 10**9 if is_end else 0
        is_end = not is_end
        return ticks

    is_end = False
    measure = stopwatch_c(clock)
    assert measure(c_calibration.taken(16, 8)) == 20e9


def test_what_no_kernel_takes_is_told_before_it_is_measured(native, monkeypatch):
    probe = c_calibration.taken(16, 8)
    assert c_calibration.is_taken(probe)
    monkeypatch.setattr("actors.kernels.native.embedding.is_id", lambda ids: False)
    assert not c_calibration.is_taken(probe)
