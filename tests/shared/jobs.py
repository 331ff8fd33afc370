"""A model, its training, and what two runs have in common: for tests of whole jobs."""

import numpy as np

from actorflow import nn


class GPT(nn.Module):
    """A small transformer: tokens [batch, seq] give logits [batch, seq, vocab]."""

    def __init__(self, vocab, seq, width, layers=1, heads=2, dropout=0.0):
        self.emb, self.pos = nn.Embedding(vocab, width), nn.Embedding(seq, width)
        self.blocks = [
            nn.TransformerBlock(width, heads=heads, causal=True, dropout=dropout)
            for _ in range(layers)
        ]
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab)

    def __call__(self, x):
        h = self.emb(x) + self.pos.weight
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


def rows_of_fit(train, model, source, steps, **options):
    """Return (step, loss) of every step, and what fit returns."""
    rows = []
    result = train.fit(
        model, source, steps=steps, progress=False,
        on_step=lambda step, metrics: rows.append((step, metrics["loss"])), **options,
    )  # fmt: skip
    return rows, result


def losses_of_fit(*arguments, **options):
    """Return the loss of every step."""
    return [loss for _, loss in rows_of_fit(*arguments, **options)[0]]


def assert_same(one, other):
    """Compare arrays by name, bit by bit."""
    assert one.keys() == other.keys()
    for name, array in one.items():
        np.testing.assert_array_equal(array, other[name], err_msg=name)
