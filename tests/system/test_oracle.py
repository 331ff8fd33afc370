"""Whole jobs against an independent evaluation: reference semantics, node by node, in float64."""

import numpy as np
import pytest

import actorflow as af
from actorflow import nn
from actorflow.tensor.initial_values import initial_values
from compiler.graph.registry import reference
from compiler.ops.primitives.sources import INPUT, VARIABLE
from compiler.passes import autodiff


class TinyGPT(nn.Module):
    def __init__(self, dropout=0.0):
        self.emb, self.pos = nn.Embedding(17, 12), nn.Embedding(6, 12)
        self.block = nn.TransformerBlock(12, heads=3, causal=True, dropout=dropout)
        self.norm, self.head = nn.LayerNorm(12), nn.Linear(12, 17)

    def __call__(self, x):
        return self.head(self.norm(self.block(self.emb(x) + self.pos.weight)))


def job_with(optimizer):
    @af.job(optimizer=optimizer)
    def train(model, batch):
        return af.cross_entropy(model(batch.x).flatten(0, -2), batch.y.flatten())

    return train


def reference_losses(graph, values, batches):
    """Train by walking the differentiated graph with numpy semantics in float64."""
    graph = autodiff.differentiate(graph)
    state = {n: a.astype(np.float64) if a.dtype.kind == "f" else a for n, a in values.items()}
    losses = []
    for batch in batches:
        column = {}
        names = {}
        for node in graph.nodes:
            if node.op is INPUT:
                column[node.outputs[0]] = batch[node.attrs["name"]]
            elif node.op is VARIABLE:
                names[node.outputs[0]] = node.attrs["name"]
                column[node.outputs[0]] = state.get(node.attrs["name"], 0)  # unused seed
            else:
                arrays = [column[v] for v in node.inputs]
                made = reference.get(node.op)(node.attrs, *arrays)
                column.update(zip(node.outputs, made, strict=True))
        losses.append(float(column[graph.outputs[0].value]))
        for write in graph.writes:
            state[names[write.variable]] = column[write.value]
    return losses, state


OPTIMIZERS = {
    "adamw": af.optim.AdamW(1e-2),
    "adamw with warmup and cosine": af.optim.AdamW(
        af.optim.warmup(af.optim.cosine(1e-2, steps=8), steps=3)
    ),
    "sgd": af.optim.SGD(0.1),
    "nesterov": af.optim.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_training_follows_the_reference_semantics(name, dropout):
    train = job_with(OPTIMIZERS[name])
    rng = np.random.default_rng(3)
    tokens = rng.integers(0, 17, 5000)
    data = af.data.Tokens(tokens, seq=6, batch=4, seed=5)
    batches = [{k: v.copy() for k, v in next(data).items()} for _ in range(8)]
    model = TinyGPT(dropout)
    plan = train.compile(model, data)
    values = initial_values(plan, {}, 0)
    expected, state = reference_losses(train.graph(model, data.spec()), values, batches)
    got = [train.step(model, batch)["loss"] for batch in batches]
    train.close(model)
    np.testing.assert_allclose(got, expected, rtol=2e-4)
    np.testing.assert_allclose(model.head.weight.data, state["head.weight"], rtol=2e-2, atol=2e-3)


def test_gradients_of_the_whole_model_match_torch():
    torch = pytest.importorskip("torch", reason="torch is an optional oracle")
    functional = torch.nn.functional
    model = TinyGPT()
    train = job_with(af.optim.SGD(1.0))
    rng = np.random.default_rng(0)
    batch = {k: rng.integers(0, 17, (4, 6)).astype(np.int32) for k in ("x", "y")}
    plan = train.compile(model, af.data.Tokens(np.zeros(99, np.int32), seq=6, batch=4))
    values = initial_values(plan, {}, 0)
    loss = train.step(model, batch)["loss"]
    train.close(model)
    p = {
        n: torch.tensor(a, dtype=torch.float64, requires_grad=True)
        for n, a in values.items()
        if a.dtype.kind == "f"
    }
    x, y = (torch.tensor(batch[k], dtype=torch.long) for k in ("x", "y"))

    def norm(h, name):
        return functional.layer_norm(h, (12,), p[f"{name}.weight"], p[f"{name}.bias"])

    def linear(h, name):
        return h @ p[f"{name}.weight"].T + p[f"{name}.bias"]

    h = p["emb.weight"][x] + p["pos.weight"]
    qkv = linear(norm(h, "block.norm1"), "block.attn.qkv").reshape(4, 6, 3, 3, 4)
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    h = h + linear(mixed.transpose(1, 2).reshape(4, 6, 12), "block.attn.proj")
    hidden = functional.gelu(linear(norm(h, "block.norm2"), "block.mlp.up"), approximate="tanh")
    h = h + linear(hidden, "block.mlp.down")
    logits = linear(norm(h, "norm"), "head")
    expected = functional.cross_entropy(logits.reshape(-1, 17), y.reshape(-1))
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    for name, tensor in p.items():
        got = values[name] - dict(model.named_parameters())[name].data
        np.testing.assert_allclose(got, tensor.grad.numpy(), rtol=1e-3, atol=2e-6, err_msg=name)
