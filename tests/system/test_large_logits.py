"""Whole jobs whose logits never exist as a whole, against the same jobs with all of them."""

import numpy as np
import pytest
from changed_passes import change_passes
from graphs import WideFrom

import actorflow as af
from actorflow import nn
from actorflow.compile.cuda_target import CudaTarget
from compiler.contract.types import DType, TensorType
from compiler.fusion import regions
from compiler.graph.target import WIDE_IN_CACHE

CLASSES = 23


class Tied(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self, classes=CLASSES, width=8):
        self.emb, self.norm = nn.Embedding(classes, width), nn.LayerNorm(width)

    def __call__(self, x):
        return self.norm(self.emb(x)) @ self.emb.weight.T


class Headed(nn.Module):
    def __init__(self, classes=CLASSES, width=8, bias=True):
        self.emb, self.head = nn.Embedding(classes, width), nn.Linear(width, classes, bias=bias)

    def __call__(self, x):
        return self.head(af.gelu(self.emb(x), approximate="tanh"))


MODELS = {"tied": Tied, "bias": Headed, "no bias": lambda: Headed(bias=False)}


@pytest.fixture
def limit(monkeypatch, tmp_path):
    """Set the bytes up to which logits stay, and rows per chunk; each limit has its own cache."""

    def set_limit(min_wide_bytes, chunk_rows=5):
        def chunk(graph, context):
            return regions.run(graph, WideFrom(min_wide_bytes, chunk_rows))

        change_passes(monkeypatch, chunk_wide=chunk)
        monkeypatch.setenv("ACTORFLOW_CACHE", str(tmp_path / f"cache-{min_wide_bytes}"))

    return set_limit


def spec(*shape):
    return {name: TensorType(DType.INT32, shape) for name in ("x", "y")}


def job_with(**options):
    @af.job(optimizer=af.optim.AdamW(1e-2), **options)
    def train(model, batch):
        return af.cross_entropy(model(batch.x).flatten(0, -2), batch.y.flatten())

    return train


def batches(count):
    rng = np.random.default_rng(3)
    shape = (4, 6)
    names = ("x", "y")
    return [
        {n: rng.integers(0, CLASSES, shape).astype(np.int32) for n in names} for _ in range(count)
    ]


def launches_of(plan):
    return [launch for actor in plan.actors for launch in actor.launches]


def ops_of(plan):
    """Return the ops of all launches; of fused ones and regions their members."""
    launches = launches_of(plan)
    return [name for x in launches for name in dict(x.attrs).get("members", (x.op,))]


def regions_of(plan):
    regions = [dict(x.attrs)["region"] for x in launches_of(plan) if x.op == "region"]
    return [region for region in regions if region.chunk_rows]


def train(make, options, steps=6):
    """Return the plan, the losses and the parameters after some steps."""
    job, model, k = job_with(**options), make(), options.get("accumulate", 1)
    data = batches(steps * k)
    plan = job.compile(model, spec(4, 6))
    groups = [data[i : i + k] for i in range(0, len(data), k)]
    losses = [job.step(model, group if k > 1 else group[0])["loss"] for group in groups]
    job.close(model)
    return plan, losses, {name: p.data.copy() for name, p in model.named_parameters()}


@pytest.mark.one_device("looks for a loss that is one region, and a cut ends it")
@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"streams": 2}], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_training_goes_as_with_all_logits(name, options, limit):
    limit(1 << 40)
    plan, losses, parameters = train(MODELS[name], options)
    assert not regions_of(plan)
    limit(0)
    plan, got_losses, got = train(MODELS[name], options)
    assert regions_of(plan)
    assert "matmul" not in [launch.op for launch in launches_of(plan)]
    np.testing.assert_allclose(got_losses, losses, rtol=1e-5)
    for path, array in parameters.items():
        np.testing.assert_allclose(got[path], array, rtol=1e-3, atol=1e-4, err_msg=path)


@pytest.mark.one_device("looks for a loss that is one region, and a cut ends it")
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), ("bf16", 2e-2)])
@pytest.mark.parametrize("make", [Tied, lambda: Tied(5_000)], ids=["small", "large"])
def test_the_square_of_a_loss_computes_the_logits_twice(make, precision, tolerance, limit):
    losses = {}
    for size in (1 << 40, 0):
        limit(size)

        # Small steps: where losses grow from 100 to 1,000 rounding grows with them.
        @af.job(optimizer=af.optim.SGD(1e-3), precision=precision)
        def squared(model, batch):
            loss = af.cross_entropy(model(batch.x).flatten(0, -2), batch.y.flatten())
            return loss * loss

        model = make()
        assert len(regions_of(squared.compile(model, spec(4, 6)))) == (2 if size == 0 else 0)
        losses[size] = [squared.step(model, batch)["loss"] for batch in batches(3)]
        squared.close(model)
    np.testing.assert_allclose(losses[0], losses[1 << 40], rtol=tolerance)
    assert np.ptp(losses[0]) > 0.05 * losses[0][0]  # each step is seen in the next one's loss


def test_two_runs_have_the_same_bits(limit):
    limit(0)
    first, second = (train(MODELS["bias"], {}) for _ in range(2))
    assert first[1] == second[1]
    for path, array in first[2].items():
        np.testing.assert_array_equal(second[2][path], array)


@pytest.mark.one_device("looks for a loss that is one region, and a cut ends it")
def test_an_evaluation_has_the_same_loss_and_hits_by_the_chunk(limit):
    losses, hits = [], []
    for size in (1 << 40, 0):
        limit(size)

        @af.job(train=False)
        def evaluate(model, batch):
            logits = model(batch.x)
            hit = (logits.argmax(-1) == batch.y.to("int64")).to("float32")
            return {
                "loss": af.cross_entropy(logits.flatten(0, -2), batch.y.flatten()),
                "hits": hit.sum(),
            }

        model = Headed()
        assert len(regions_of(evaluate.compile(model, spec(4, 6)))) == (size == 0)
        steps = [evaluate.step(model, batch) for batch in batches(3)]
        losses.append([metrics["loss"] for metrics in steps])
        hits.append([metrics["hits"] for metrics in steps])
        evaluate.close(model)
    np.testing.assert_allclose(*losses, rtol=1e-5)
    assert hits[0] == hits[1]
    assert sum(hits[0]) > 0


def test_a_label_out_of_range_is_named_with_the_line_of_the_loss(limit):
    limit(0)
    job, model = job_with(), Tied()
    (batch,) = batches(1)
    batch["y"][2, 1] = CLASSES
    with pytest.raises(af.ActorFailed) as caught:
        job.step(model, batch)
    assert isinstance(caught.value.__cause__, IndexError)
    assert f"label {CLASSES} at position 13 is outside 0..22" in str(caught.value.__cause__)
    assert "cross_entropy_rows" in caught.value.op
    assert "test_large_logits.py:" in caught.value.source


@pytest.fixture
def wide(request):
    """What is wide where jobs run."""
    device = request.config.getoption("--device") or ""
    return CudaTarget.wide_values if device.startswith("cuda") else WIDE_IN_CACHE


def large(wide, **options):
    """Compile a job with logits of twice the largest chunk, and run nothing."""

    @af.job(optimizer=af.optim.SGD(0.1))
    def train(model, batch):
        logits = model(batch.x)
        metrics = {"loss": af.cross_entropy(logits.flatten(0, -2), batch.y.flatten())}
        if options.get("accuracy"):
            metrics["accuracy"] = (logits.argmax(-1) == batch.y.to("int64")).to("float32").mean()
        return metrics

    return train.compile(Tied(50_000), spec(batch_of(wide), 64))


def batch_of(wide):
    return 2 * wide.most_chunk_bytes // (64 * 50_000 * 4) + 1


def arena_bytes(plan):
    return sum(arena.size_bytes for arena in plan.arenas)


@pytest.mark.one_device("looks for a loss that is one region, and a cut ends it")
def test_a_plan_with_large_logits_needs_a_chunk_of_them(limit, wide):
    by_the_chunk = large(wide)
    assert len(regions_of(by_the_chunk)) == 1
    limit(1 << 40)
    logits_bytes = batch_of(wide) * 64 * 50_000 * 4
    saved = arena_bytes(large(wide)) - arena_bytes(by_the_chunk)
    assert saved > logits_bytes - wide.most_chunk_bytes - (8 << 20)


@pytest.mark.one_device("looks for a loss that is one region, and a cut ends it")
def test_an_accuracy_goes_by_the_chunk_too(wide):
    assert len(regions_of(large(wide, accuracy=True))) == 1
