"""Steady-state steps allocate nothing: every tensor of a step lives in the arena."""

import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
from jobs import GPT

import actorflow as af


@af.job(optimizer=af.optim.AdamW(1e-3))
def train(model, batch):
    return af.cross_entropy(model(batch.x).flatten(0, -2), batch.y.flatten())


@pytest.mark.no_gpu("the host that acts one multiplies in memory of its own")
def test_steady_state_steps_allocate_less_than_64_kib_net_and_at_their_peak():
    data = af.data.Tokens(np.arange(50_000) % 64, seq=32, batch=32)
    warmup, measured = 10, 40
    seen = []

    def watch(step, metrics):
        if step == warmup:
            tracemalloc.start()
        elif step > warmup:
            current, peak = tracemalloc.get_traced_memory()
            seen.append((current, peak))
            tracemalloc.reset_peak()

    try:
        train.fit(
            GPT(64, 32, 32, heads=4, dropout=0.1),
            data,
            steps=warmup + measured,
            progress=False,
            on_step=watch,
        )
    finally:
        tracemalloc.stop()
    settled = seen[5:]
    activation_bytes = 32 * 32 * 128 * 4
    assert activation_bytes > 64 << 10  # a single leaked activation would show
    net = [b[0] - a[0] for a, b in pairwise(settled)]
    peak = [b[1] - a[0] for a, b in pairwise(settled)]
    assert max(net) < 64 << 10
    assert max(peak) < 64 << 10
