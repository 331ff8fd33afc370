# %% [markdown]
# # A memory budget and the plan
# All memory of a step is planned before it runs. With a budget, parts of the forward pass run again
# during the backward pass, and the losses keep their bits.

# %%
import numpy as np

import actorflow as af
from actorflow import nn


class Language(nn.Module):
    def __init__(self, width=32, layers=4):
        self.letters = nn.Embedding(64, width)
        self.blocks = [nn.TransformerBlock(width, heads=4, causal=True) for _ in range(layers)]
        self.head = nn.Linear(width, 64)

    def __call__(self, x):
        h = self.letters(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h)


def loss(model, batch):
    return af.cross_entropy(model(batch.x).flatten(0, 1), batch.y.flatten())


def job(**options):
    return af.job(loss, optimizer=af.optim.AdamW(1e-3), deterministic=True, **options)


# %% [markdown]
# What the step takes, and which launch is at the peak:

# %%
data = af.data.Tokens(np.arange(20_000) % 64, seq=64, batch=8)
plan = job().compile(Language(), data)
whole = plan.arenas[0].size_bytes
print(whole, "bytes; the parts:", plan.memory[0].parts)

# %% [markdown]
# The same step in three quarters of that. Too little is an error that names what is feasible.

# %%
small = job(memory_budget=whole * 3 // 4)
print(small.compile(Language(), data).arenas[0].size_bytes, "bytes")
try:
    job(memory_budget="64KiB").compile(Language(), data)
except af.BudgetError as error:
    print(error)

# %%
runs = [each.fit(Language(), data, steps=5, progress=False) for each in (job(), small)]
print("the same bits:", runs[0].metrics == runs[1].metrics)
