"""Whole jobs whose activations come again with their gradients, against jobs that keep them."""

from dataclasses import replace

import numpy as np
import pytest

import actorflow as af
from actorflow import nn
from compiler import pipeline

VOCAB, SEQ, BATCH, DIM = 17, 24, 8, 16


class GPT(nn.Module):
    def __init__(self, layers=3, dropout=0.1):
        self.emb = nn.Embedding(VOCAB, DIM)
        self.blocks = [
            nn.TransformerBlock(DIM, heads=2, causal=True, dropout=dropout) for _ in range(layers)
        ]
        self.head = nn.Linear(DIM, VOCAB)

    def __call__(self, x):
        h = self.emb(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h)


class Gated(nn.Module):
    """Layers that multiply by an activation, whose gradient reads it by the element."""

    def __init__(self, layers=3):
        self.emb = nn.Embedding(VOCAB, DIM)
        self.gates = [nn.Linear(DIM, 4 * DIM) for _ in range(layers)]
        self.values = [nn.Linear(DIM, 4 * DIM) for _ in range(layers)]
        self.down = [nn.Linear(4 * DIM, DIM) for _ in range(layers)]
        self.head = nn.Linear(DIM, VOCAB)

    def __call__(self, x):
        h = self.emb(x)
        for gate, value, down in zip(self.gates, self.values, self.down, strict=True):
            h = h + down(af.silu(gate(h)) * value(h))
        return self.head(h)


MODELS = {"gpt": (GPT, "gelu"), "gated": (Gated, "silu")}


@pytest.fixture
def keep_activations(monkeypatch, tmp_path):
    """Compile from now on without the pass."""

    def keep():
        passes = [
            replace(p, run=lambda graph: graph) if p.name == "remake_activations" else p
            for p in pipeline.PASSES
        ]
        monkeypatch.setattr(pipeline, "PASSES", tuple(passes))
        monkeypatch.setenv("ACTORFLOW_CACHE", str(tmp_path / "cache-of-kept"))

    return keep


def make_job(**options):
    @af.job(optimizer=af.optim.AdamW(1e-2), **options)
    def train(model, batch):
        return af.cross_entropy(model(batch.x), batch.y)

    return train


def tokens(batch=BATCH):
    rng = np.random.default_rng(3)
    return af.data.Tokens(rng.integers(0, VOCAB, 8000), seq=SEQ, batch=batch, seed=0)


def trained(make, **options):
    """Return the plan, the losses and the parameters after some steps."""
    job, model, losses = make_job(**options), make(), []
    job.fit(model, tokens(), steps=4, progress=False, on_step=lambda _, m: losses.append(m["loss"]))
    return job.compile(model, tokens()), losses, model.state()


def ops_of(plan):
    """Return the ops of all launches; of a group its members."""
    launches = [launch for actor in plan.actors for launch in actor.launches]
    return [name for x in launches for name in dict(x.attrs).get("members", (x.op,))]


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"streams": 2}], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_a_job_trains_to_the_bits_of_one_that_keeps_its_activations(
    name, options, keep_activations
):
    make, op = MODELS[name]
    plan, losses, state = trained(make, **options)
    assert ops_of(plan).count(f"{op}_grad_output") == 3
    assert f"{op}_grad" not in ops_of(plan)
    keep_activations()
    plan, kept_losses, kept_state = trained(make, **options)
    assert ops_of(plan).count(f"{op}_grad") == 3
    assert losses == kept_losses
    for path, array in kept_state.items():
        np.testing.assert_array_equal(state[path], array, err_msg=path)


def test_the_arena_falls_by_the_activations_of_all_layers_but_the_last(keep_activations):
    # There the backward pass begins: a gradient of that size is alive beside all that is kept.
    # Scratch of whichever kernel runs at the peak is no activation.
    def tensor_bytes():
        (account,) = make_job().compile(GPT(layers=6), tokens(256)).memory
        return account.peak_live_bytes - account.peak_workspace_bytes

    activation_bytes = 4 * 256 * SEQ * 4 * DIM
    remade = tensor_bytes()
    keep_activations()
    assert tensor_bytes() - remade >= 5 * activation_bytes


@pytest.mark.parametrize("name", MODELS)
def test_gradient_and_output_lie_in_the_place_of_the_inputs(name, numpys_kernels):
    make, op = MODELS[name]
    plan = make_job().compile(make(), tokens())
    remade = [
        launch
        for actor in plan.actors
        for launch in actor.launches
        if launch.op == f"{op}_grad_output"
    ]
    assert len(remade) == 3
    for launch in remade:
        inputs, outputs = ([plan.views[v] for v in row] for row in (launch.inputs, launch.outputs))
        assert {v.register for v in outputs} == {v.register for v in inputs}
        assert len({v.register for v in outputs}) == 2
