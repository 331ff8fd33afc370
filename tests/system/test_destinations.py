"""Parts that are written where the tensor that joins them wants them, in whole jobs."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import tiers
from error_texts import raises
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import actorflow as af
from actorflow import nn
from actors.race.race import check_races
from compiler.contract.errors import InternalError
from compiler.contract.plan import Plan
from compiler.contract.types import DType, TensorType
from compiler.lowering import destinations
from compiler.verify.verify import verify_plan

WIDTH, ROWS = 6, 4
X = {"x": TensorType(DType.FLOAT32, (ROWS, WIDTH))}
NUMBERS = np.random.default_rng(3).normal(size=(ROWS, WIDTH)).astype(np.float32)


class Both:
    """One way to write a graph, for tensors of ours and for arrays."""

    def __init__(self, lib):
        self.lib = lib

    def concat(self, parts, axis):
        return af.concat(parts, axis=axis) if self.lib is af else np.concatenate(parts, axis)

    def split(self, x, axis):
        return af.chunk(x, 2, axis=axis) if self.lib is af else np.split(x, 2, axis)

    def relu(self, x):
        return af.relu(x) if self.lib is af else np.maximum(x, np.float32(0))


@st.composite
def recipes(draw):
    """Steps (kind, indices, axis) on a growing list of matrices; shapes decide what is done."""
    steps = []
    for _ in range(draw(st.integers(2, 9))):
        kind = draw(
            st.sampled_from(["relu", "neg", "double", "concat", "split", "turn", "flat", "cut"])
        )
        steps.append(
            (
                kind,
                draw(st.lists(st.integers(0, 30), min_size=3, max_size=3)),
                draw(st.integers(0, 1)),
            )
        )
    return steps, draw(st.lists(st.integers(0, 30), min_size=1, max_size=3))


def follow(recipe, x, both):
    steps, wanted = recipe
    made = [x, both.relu(x * np.float32(2) if both.lib is np else x * 2.0)]
    for kind, picks, axis in steps:
        a = made[picks[0] % len(made)]
        if kind == "relu":
            made.append(both.relu(a))
        elif kind == "neg":
            made.append(-a)
        elif kind == "double":
            made.append(a + a)
        elif kind == "concat":
            parts = [
                p
                for p in (a, *[made[i % len(made)] for i in picks[1:]])
                if p.shape[1 - axis] == a.shape[1 - axis]
            ]
            if sum(np.prod(p.shape) for p in parts) < 400:
                made.append(both.concat(parts, axis))
        elif kind == "split" and a.shape[axis] % 2 == 0 and a.shape[axis]:
            made += both.split(a, axis)
        elif kind == "turn":
            made.append(a.transpose(1, 0))
        elif kind == "flat":
            made.append(a.reshape(1, a.shape[0] * a.shape[1]))
        elif kind == "cut":
            made.append(a[:, 1:] if axis and a.shape[1] > 1 else a[: max(1, a.shape[0] - 1)])
    return {f"y{i}": made[-1 - i % len(made)] for i, _ in enumerate(wanted)}


@settings(max_examples=tiers.examples(60), deadline=None, suppress_health_check=list(HealthCheck))
@given(recipes())
def test_random_graphs_of_parts_compute_what_numpy_computes(recipe):
    @af.job(train=False)
    def compute(model, batch):
        return follow(recipe, batch.x, Both(af))

    model = nn.Module()
    plan = compute.compile(model, X)
    check_races(plan)
    got = compute.step(model, {"x": NUMBERS})
    compute.close(model)
    for name, want in follow(recipe, NUMBERS, Both(np)).items():
        np.testing.assert_array_equal(got[name], want)


class Joined(nn.Module):
    """Two layers side by side, and perhaps what they read."""

    def __init__(self, with_input=False):
        self.a, self.b = nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 24)
        self.with_input = with_input
        self.c = nn.Linear(32 + WIDTH * with_input, 200)

    def __call__(self, x):
        parts = [
            af.relu(self.a(x)),
            af.gelu(self.b(x), approximate="tanh"),
            *([x] if self.with_input else []),
        ]
        return self.c(af.concat(parts, axis=1))


class Gated(nn.Module):
    def __init__(self):
        self.a, self.c = nn.Linear(WIDTH, 32), nn.Linear(16, 3)

    def __call__(self, x):
        p, q = af.chunk(self.a(x), 2, axis=1)
        return self.c(af.gelu(p, approximate="tanh") * q)


class Cut(nn.Module):
    """Slices of other widths than each other's."""

    def __init__(self):
        self.a, self.c = nn.Linear(WIDTH, 32), nn.Linear(10, 200)
        # Its gradient makes the peak, not the workspace of that of the slices.
        self.d = nn.Linear(200, 2000)

    def __call__(self, x):
        h = self.a(x)
        p, q, r, s = h[:, :10], h[:, 10:20], h[:, 20:30], h[:, 30:]
        return self.d(self.c(af.gelu(p, approximate="tanh") * r + q) * s.mean())


class Picked(nn.Module):
    def __init__(self):
        self.tables = [nn.Embedding(9, 4) for _ in range(3)]
        self.c = nn.Linear(12 + WIDTH, 3)

    def __call__(self, x, ids):
        rows = [table(ids[:, i]) for i, table in enumerate(self.tables)]
        return self.c(af.concat([*rows, x], axis=1))


class Attending(nn.Module):
    def __init__(self):
        self.up, self.block = nn.Linear(WIDTH, 12), nn.TransformerBlock(12, heads=3, causal=True)
        # Wide, so that no workspace of attention makes the peak.
        self.down = nn.Linear(12, 8000)

    def __call__(self, x):
        return self.down(self.block(self.up(x).reshape(2, ROWS // 2, 12)))


MODELS = {
    "two layers": (Joined, 0),
    "two layers and an input": (partial(Joined, with_input=True), 1),
    "halves of one": (Gated, 0),
    "slices of one": (Cut, 1),
    "rows of tables": (Picked, 1),
    "heads": (Attending, 0),
}
"""Models, each with the parts that have to be copied."""


BATCH = {"x": NUMBERS, "ids": np.arange(3 * ROWS, dtype=np.int32).reshape(ROWS, 3) % 7}
TYPES = X | {"ids": TensorType(DType.INT32, (ROWS, 3))}


def training():
    # By the fixed rule: which library multiplies fastest is measured, and changes last bits.
    @af.job(optimizer=af.optim.SGD(0.1), deterministic=True)
    def train(model, batch):
        y = model(batch.x, batch.ids) if isinstance(model, Picked) else model(batch.x)
        return (y * y).mean()

    return train


@pytest.mark.one_device("counts launches and bytes of one arena")
@pytest.mark.parametrize("name", MODELS)
def test_no_launch_joins_parts_that_can_be_written_in_place(name):
    make, num_copies = MODELS[name]
    plan = training().compile(make(), TYPES)
    check_races(plan)
    found = [launch.op for actor in plan.actors for launch in actor.launches]
    assert not {"concat", "split", "reshape", "slice", "pad"} & set(found)
    assert found.count("copy") == num_copies
    assert plan.joins
    assert Plan.from_bytes(plan.to_bytes()) == plan


@pytest.mark.one_device("counts launches and bytes of one arena")
@pytest.mark.parametrize("name", MODELS)
def test_parts_in_place_change_no_bit_and_take_no_more_bytes(name, monkeypatch, tmp_path):
    losses, arenas = [], []
    for is_in_place in (True, False):
        monkeypatch.setenv("ACTORFLOW_CACHE", str(tmp_path / str(is_in_place)))
        if not is_in_place:
            monkeypatch.setattr(destinations.concat_slices, "has", lambda op: False)
        train, model = training(), MODELS[name][0]()
        losses.append([float(train.step(model, BATCH)["loss"]) for _ in range(4)])
        plan = train.compile(model, TYPES)
        arenas.append(plan.arenas[0].size_bytes)
        assert bool(plan.joins) == is_in_place
        train.close(model)
    assert losses[0] == losses[1]
    # A product into a slice may take scratch that one into a dense tensor does not: 320 bytes of
    # 28,800 with the fixed rule for libraries.
    assert arenas[0] <= 1.02 * arenas[1]


def test_a_part_that_would_keep_a_large_tensor_alive_for_long_is_copied():
    class Skipping(nn.Module):
        """A narrow part is made first, and the wide one it is joined with last."""

        def __init__(self):
            self.first, self.last = nn.Linear(WIDTH, 4), nn.Linear(1500, 300)
            self.up = nn.Linear(WIDTH, 1500)

        def __call__(self, x):
            early = af.relu(self.first(x))
            high = self.up(x * early.sum())
            return af.concat([early, self.last(af.softmax(high))], axis=1)

    @af.job(train=False)
    def compute(model, batch):
        return model(batch.x).sum()

    plan = compute.compile(Skipping(), X)
    assert [launch.op for actor in plan.actors for launch in actor.launches].count("concat") == 1


@pytest.mark.one_device("counts launches and bytes of one arena")
def test_a_plan_that_swaps_parts_or_leaves_one_out_is_refused():
    plan = training().compile(Joined(), TYPES)
    (join,) = plan.joins
    for changed in (
        replace(join, inputs=join.inputs[::-1]),
        replace(join, reads=join.reads[::-1]),
        replace(join, inputs=join.inputs[:1], reads=join.reads[:1]),
    ):
        with raises(InternalError):
            verify_plan(replace(plan, joins=(changed,)))
    with raises(InternalError):
        verify_plan(replace(plan, joins=()))
