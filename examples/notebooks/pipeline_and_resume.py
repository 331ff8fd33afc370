# %% [markdown]
# # A data pipeline, and a run that goes on
# A pipeline is a value: where samples come from, what is done to each, in which order, in what
# batches. Its position is a few numbers, so that a run continues with the very next sample.

# %%
import numpy as np

import actorflow as af
from actorflow import nn

rng = np.random.default_rng(0)
table = {"x": rng.standard_normal((500, 8)).astype(np.float32)}
table["y"] = table["x"][:, :3].argmax(1)


def noisy(sample, rng):  # rng has numbers of its own for each sample and epoch
    noise = 0.1 * rng.standard_normal(8).astype(np.float32)
    return {"x": sample["x"] + noise, "y": sample["y"]}


def pipeline():
    rows = af.data.from_arrays(table).shuffle(seed=1).map(noisy)
    return rows.repeat().batch(32)


# %% [markdown]
# The same position gives the same batch, whatever came before:

# %%
data = pipeline()
batches = [next(data) for _ in range(5)]
again = pipeline()
again.restore(data.state() | {"batches": 4})
print("the fifth batch again:", np.array_equal(next(again)["x"], batches[4]["x"]))


# %%
@af.job(optimizer=af.optim.AdamW(1e-2))
def train(model, batch):
    return af.cross_entropy(model(batch.x), batch.y)


# %% [markdown]
# A run of 60 steps, and one of 25 that is started again. `kill -9` at any moment does no more.

# %%
options = {"every": 5, "progress": False}
whole = train.fit(nn.Linear(8, 3), pipeline(), steps=60, checkpoint="runs/whole", **options)
train.fit(nn.Linear(8, 3), pipeline(), steps=25, checkpoint="runs/parts", **options)
parts = train.fit(nn.Linear(8, 3), pipeline(), steps=60, checkpoint="runs/parts", **options)
print("went on after step", parts.first_step)
print(
    "the same weights:", (af.load("runs/whole")["weight"] == af.load("runs/parts")["weight"]).all()
)
