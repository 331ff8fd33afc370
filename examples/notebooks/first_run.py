# %% [markdown]
# # A first training run
# A job is a function of a model and a batch. It is traced once, compiled into a static plan, and
# the plan runs all steps. Open this file in Jupyter (jupytext), or run it as a script.

# %%
import numpy as np

import actorflow as af
from actorflow import nn

x = np.random.default_rng(0).standard_normal((1024, 8)).astype(np.float32)
y = x[:, :3].argmax(1)


def score(model, batch):
    logits = model(batch.x)
    return {
        "loss": af.cross_entropy(logits, batch.y),
        "accuracy": af.metrics.accuracy(logits, batch.y),
    }


# %% [markdown]
# One function makes two jobs: one trains, the other measures.

# %%
train = af.job(score, optimizer=af.optim.AdamW(1e-2))
test = af.job(score, train=False)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
data = af.data.ArraySource({"x": x[:768], "y": y[:768]}, batch=32)

# %% [markdown]
# `fit` prints what it will use before the first step: launches, memory, and where the peak is.

# %%
result = train.fit(model, data, steps=300)
print("of the last step:", result.metrics)

# %% [markdown]
# Rows that the training has not seen:

# %%
unseen = test.step(model, {"x": x[768:], "y": y[768:]})
print("of unseen rows:", unseen)

# %% [markdown]
# The values of the model are plain arrays, and go into a file that torch reads, too.

# %%
print({path: array.shape for path, array in model.state().items()})
model.save("first.safetensors")
