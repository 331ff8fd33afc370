"""Random small trainings: models of layers and formulas, meshes, options; by the number of a seed.

A state of [rows, places, width] goes through random blocks. Some cross rows, and so ranks.
"""

from dataclasses import dataclass, replace
from random import Random

import numpy as np
from rank_trainings import on_ranks

import actorflow as af
from actorflow import nn
from actorflow.data import ArraySource

STEPS = 2
NUM_IDS, NUM_CLASSES = 11, 5
MESHES = (
    {"data": 2}, {"data": 3}, {"model": 2}, {"data": 2, "model": 2}, {"stage": 2},
    {"data": 2, "stage": 2}, {"stage": 2, "model": 2}, {"model": 3},
)  # fmt: skip
LAYERS = (
    "linear", "mlp", "attention", "layer_norm", "rms_norm", "batch_norm", "group_norm", "conv",
    "gru", "lstm", "embedding", "dropout", "pool", "block", "own",
)  # fmt: skip


@dataclass(frozen=True)
class Recipe:
    """What is trained, and how; `blocks` are kinds with a number each."""

    seed: int
    mesh: dict
    blocks: tuple
    places: int
    width: int
    batch: int
    loss: str
    options: dict
    optimizer: tuple
    stages: "Stages"


@dataclass(frozen=True)
class Stages:
    """How many a pipeline has; which has no layer, which none to train; and what is asked of it.

    An `idle` one has a formula in the place of blocks. `skips`: whether broken steps are skipped.
    """

    count: int = 1
    idle: int | None = None
    frozen: int | None = None
    skips: bool = False
    evaluates: bool = False


def recipe(seed):
    """Return the training of a seed."""
    rng = Random(seed)
    mesh = rng.choice(MESHES)
    kinds = (*LAYERS, *FORMULAS)
    blocks = tuple([(rng.choice(kinds), rng.randrange(1 << 30)) for _ in range(rng.randint(1, 6))])
    options = {"accumulate": rng.choice([1, 1, 1, 2, 3])}
    if "data" in mesh and rng.random() < 0.35:
        options["zero"] = True
    if rng.random() < 0.2:
        options["precision"] = rng.choice(["bf16", "fp16"])
    if rng.random() < 0.2:
        options["streams"] = 2
    if rng.random() < 0.2:
        options["recompute"] = "blocks"
    if rng.random() < 0.2:
        options["ema"] = 0.9
    if rng.random() < 0.3:
        options["clip_norm"] = rng.choice([0.05, 10.0])
    training = Recipe(
        seed, mesh, blocks, rng.choice([3, 4, 6]), rng.choice([4, 6, 8]),
        rng.choice([3, 4, 5, 6, 7, 8]), rng.choice(["classes", "squares", "own", "many"]),
        options, rng.choice(OPTIMIZERS), Stages(mesh.get("stage", 1)),
    )  # fmt: skip
    return training if training.stages.count == 1 else _in_stages(training)


def _in_stages(own):
    """Return a training with what stages make of a step together, and what some have none of."""
    rng = Random(f"stages {own.seed}")
    count, without = rng.choice([2, 2, 3]), rng.choice(["nothing", "idle", "frozen"])
    stages = Stages(
        count,
        idle=rng.randrange(count) if without == "idle" else None,
        frozen=rng.randrange(count) if without == "frozen" else None,
        skips=rng.random() < 0.4,
        evaluates=rng.random() < 0.3,
    )
    options = {**own.options, "accumulate": rng.choice([1, 2, 3])}
    if rng.random() < 0.5:
        options["clip_norm"] = rng.choice([0.05, 10.0])
    if "data" in own.mesh and rng.random() < 0.5:
        options["zero"] = True
    return replace(
        own,
        mesh={**own.mesh, "stage": count},
        loss="of stages" if rng.random() < 0.5 else own.loss,
        options=options,
        stages=stages,
    )


OPTIMIZERS = (
    ("SGD", {"lr": 0.05, "momentum": 0.9}),
    ("SGD", {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    ("AdamW", {"lr": 0.003, "eps": 1e-2}),
    ("Adam", {"lr": 0.003, "eps": 1e-2, "amsgrad": True}),
    ("Adagrad", {"lr": 0.003, "eps": 1e-2}),
    ("RMSprop", {"lr": 0.003, "eps": 1e-2, "momentum": 0.5, "centered": True}),
    ("LAMB", {"lr": 0.003, "eps": 1e-2}),
    ("Adafactor", {"lr": 0.003}),
)


def _rolled(h, ids, n):
    return h + 0.5 * af.roll(h, 1, n % 3)


def _chosen(h, ids, n):
    axis = n % 3
    return h + af.amax(af.relu(h), axis, keepdim=True)


def _scanned(h, ids, n):
    def step(carry, x):
        carry = 0.5 * carry + af.tanh(x)
        return carry, carry

    _, out = af.scan(step, h[:, 0] * 0.0, h.transpose(0, 1), reverse=bool(n % 2))
    return h + out.transpose(0, 1)


def _looped(h, ids, n):
    def more(state):
        return state[0] < 3

    def body(state):
        return state[0] + 1, af.tanh(state[1]) * 0.9 + 0.1 * h.mean()

    start = (af.sum(ids[:1, :1] * 0).to(af.DType.INT32), h)
    return af.while_loop(more, body, start, max_steps=4)[1]


def _wide(h, ids, n):
    return af.concat([h, h[..., :2] * 2.0], -1)[..., 2:]


def _cut(h, ids, n):
    axis = n % 3
    first = af.concat([h[1:], h[:1]], 0) if axis == 0 else h
    return first + af.pad(h[:, 1:], (0, 0, 1, 0))


def _shaped(h, ids, n):
    rows, places, width = h.shape
    flat = h.reshape((places, rows * width)) if n % 2 else h.reshape((rows * places, width))
    return h + 0.1 * af.softmax(flat, -1).reshape((rows, places, width))


FORMULAS = {
    "rolled": _rolled,
    "ties": _chosen,
    "scanned": _scanned,
    "looped": _looped,
    "wide": _wide,
    "cut": _cut,
    "shaped": _shaped,
    "where": lambda h, ids, n: af.where(h > 0, h, 0.1 * h) + af.where(ids[..., None] > 4, 1, 0.0),
    "gathered": lambda h, ids, n: h + af.index_select(h, n % 3, [2, 0]).mean(n % 3, keepdim=True),
    "by index": lambda h, ids, n: h + af.gather(h, 2, (ids[..., None] % 3)),
    "sums": lambda h, ids, n: h + 0.1 * af.cumsum(h, n % 3),
    "sorted": lambda h, ids, n: h + 0.1 * af.sort(h, n % 3).values,
    "soft": lambda h, ids, n: h + af.softmax(h, n % 3),
    "centred": lambda h, ids, n: h - h.mean(n % 3, keepdim=True),
    "logs": lambda h, ids, n: h - 0.1 * af.logsumexp(h, n % 3, keepdim=True),
    "turned": lambda h, ids, n: h + 0.3 * af.flip(h, n % 3),
    "either": lambda h, ids, n: af.cond(h.mean() > 0, af.tanh, lambda x: 0.5 * x, h),
    "swapped": lambda h, ids, n: (h.transpose(1, 2) * 1.5).transpose(1, 2) + 0.1,
    "products": lambda h, ids, n: h + 0.1 * af.einsum("bsw,btw->bst", h, h).mean(2, keepdim=True),
    "across rows": lambda h, ids, n: h + 0.05 * af.einsum("bsw,csw->bc", h, h).mean(),
}


class Block(nn.Module):
    """A layer or a formula, with words for the axis "model" and its stage."""

    def __init__(self, kind, number, width, mesh):
        self.kind, self.number, rng = kind, number, Random(number)
        self.stage = None
        word = None
        if "model" in mesh and rng.random() < 0.6:
            word = {"model": rng.choice([af.split(0), af.split(1)])}
        self.word = {"model": rng.choice([af.split(n) for n in range(3)] + [af.broadcast])}
        self.is_laid = "model" in mesh and rng.random() < 0.2
        by_parts = {"sbp": {"model": af.split(0)}} if word and mesh["model"] == 2 else {}
        self.layer = {
            "linear": lambda: nn.Linear(width, width, sbp=word),
            "mlp": lambda: nn.MLP(width, **by_parts),
            "attention": lambda: nn.Attention(width, heads=2, causal=bool(number % 2), **by_parts),
            "block": lambda: nn.TransformerBlock(width, heads=2, **by_parts),
            "layer_norm": lambda: nn.LayerNorm(width),
            "rms_norm": lambda: nn.RMSNorm(width),
            "batch_norm": lambda: nn.BatchNorm1d(width),
            "group_norm": lambda: nn.GroupNorm(2, width),
            "conv": lambda: nn.Conv1d(width, width, 3, padding=1),
            "gru": lambda: nn.GRU(width, width, batch_first=True),
            "lstm": lambda: nn.LSTM(width, width, batch_first=True),
            "embedding": lambda: nn.Embedding(NUM_IDS, width, sbp=word),
            "dropout": lambda: nn.Dropout(0.3),
            "pool": lambda: nn.MaxPool1d(3, stride=1, padding=1),
            "own": lambda: nn.Linear(width, width, bias=False),
        }.get(kind, lambda: None)()

    def __call__(self, h, ids):
        if self.stage is not None:
            with af.stage(self.stage):
                return self._made(h, ids)
        return self._made(h, ids)

    def _made(self, h, ids):
        h = h.to_sbp(**self.word) if self.is_laid else h
        if self.layer is None:
            return FORMULAS[self.kind](h, ids, self.number)
        if self.kind == "embedding":
            return h + self.layer(ids)
        if self.kind in ("gru", "lstm"):
            return h + self.layer(h)[0]
        if self.kind in ("conv", "pool", "batch_norm", "group_norm"):
            return h + self.layer(h.transpose(1, 2)).transpose(1, 2)
        if self.kind == "own":
            return af.tanh(h @ self.layer.weight) + h
        return h + self.layer(h) if self.kind != "dropout" else self.layer(h)


class Net(nn.Module):
    """Blocks between two layers; with stages each has a run of them."""

    def __init__(self, own):
        count, idle = own.stages.count, own.stages.idle
        self.first = nn.Linear(3, own.width)
        self.blocks = [Block(kind, number, own.width, own.mesh) for kind, number in own.blocks]
        self.last = nn.Linear(own.width, NUM_CLASSES)
        self.busy, self.count = [stage for stage in range(count) if stage != idle], count
        for index, block in enumerate(self.blocks):
            block.stage = self.busy[index * len(self.busy) // len(self.blocks)]
        for name, parameter in self.named_parameters():
            layer, _, rest = name.partition(".")
            at = {"first": self.busy[0], "last": self.busy[-1]}.get(layer)
            at = self.blocks[int(rest.partition(".")[0])].stage if at is None else at
            if at == own.stages.frozen:
                parameter.freeze()

    def states(self, x, ids):
        """Return what each stage makes."""
        h, hidden = x, []
        for stage in range(self.count):
            blocks = [block for block in self.blocks if block.stage == stage]
            with af.stage(stage):
                h = self.first(h) if stage == self.busy[0] else h
                h = h if blocks else af.tanh(h)
                for block in blocks:
                    h = block(h, ids)
                h = self.last(h) if stage == self.busy[-1] else h
            hidden.append(h)
        return hidden

    def __call__(self, x, ids):
        return self.states(x, ids)[-1]


def _loss(kind):
    def classes(model, batch):
        y = model(batch.x, batch.ids)
        return af.cross_entropy(y.flatten(0, 1), batch.ids.flatten() % NUM_CLASSES)

    def squares(model, batch):
        return af.mse_loss(model(batch.x, batch.ids).mean(1), batch.y)

    def own(model, batch):
        error = model(batch.x, batch.ids).mean(1) - batch.y
        return af.log(1 + error * error).sum() / batch.y.shape[0] + 0.01 * error.mean(0).abs().max()

    def many(model, batch):
        y = model(batch.x, batch.ids)
        largest = af.amax(af.relu(y), (0, 1))
        return {"loss": af.mse_loss(y.mean(1), batch.y), "largest": largest, "mean": y.mean()}

    def of_stages(model, batch):
        states = model.states(batch.x, batch.ids)
        numbers = {f"mean{i}": h.mean() for i, h in enumerate(states)}
        numbers |= {f"most{i}": af.amax(af.relu(h), (0, 1)) for i, h in enumerate(states)}
        return {"loss": af.mse_loss(states[-1].mean(1), batch.y), **numbers}

    kinds = {"classes": classes, "squares": squares, "own": own, "many": many}
    return {**kinds, "of stages": of_stages}[kind]


def source(own):
    rng = np.random.default_rng(own.seed)
    rows = own.batch * STEPS * own.options["accumulate"]
    x = rng.standard_normal((rows, own.places, 3)).astype(np.float32)
    y = rng.standard_normal((rows, NUM_CLASSES)).astype(np.float32)
    ids = rng.integers(0, NUM_IDS, (rows, own.places))
    return ArraySource({"x": x, "ids": ids, "y": y}, batch=own.batch, seed=1)


def train(own, mesh, nudge=0.0):
    """Return by rank what is told of the steps, and the variables; `nudge` moves parameters."""
    name, hyper = own.optimizer
    options = {k: v for k, v in own.options.items() if k != "zero" or mesh is not None}
    job = af.job(optimizer=getattr(af.optim, name)(**hyper), mesh=mesh, **options)(_loss(own.loss))
    evaluate = af.job(_loss(own.loss), train=False)
    how = {"on_nan": "skip"} if own.stages.skips else {}

    def one(group):
        model, evaluation = Net(own), None
        if own.stages.evaluates:
            evaluation = af.Evaluation(evaluate, source(own), every=1, batches=2)
        plan = job.compile(model, source(own), rank=group.rank, evaluation=evaluation, **how)
        values = None
        if nudge:
            runner, rng = af.Runner(plan, group=group), np.random.default_rng(7)
            values = {
                k: (v * (1 + nudge * rng.standard_normal(v.shape))).astype(v.dtype)
                for k, v in runner.variables().items()
                if v.dtype.kind == "f"
            }
            runner.close()
        rows = []
        trained = af.Runner(plan, values=values, group=group).fit(
            source(own), steps=STEPS, progress=False, evaluation=evaluation, **how,
            on_step=lambda step, outputs: rows.append({k: np.array(v) for k, v in outputs.items()}),
        )  # fmt: skip
        rows += [{k: np.array(v) for k, v in means.items()} for _, means in trained.evaluations]
        return rows, trained.variables

    return on_ranks(mesh, one)


def differences(own):
    """Return in words where ranks differ from one rank, or from each other; none where not."""
    (alone,) = train(own, None)
    low = own.options.get("precision", "fp32") != "fp32"
    (moved,) = train(own, None, nudge=3e-3 if low else 1e-6)
    ranks, faults, first_of = train(own, af.Mesh(**own.mesh)), [], {}
    for rank, (steps, variables) in enumerate(ranks):
        for step, (mine, its, other) in enumerate(zip(steps, alone[0], moved[0], strict=True)):
            for key in its:
                faults += _far(
                    f"rank {rank} step {step} {key}", mine[key], its[key], other[key], low
                )
        for key, array in variables.items():
            if first_of.setdefault(key, array).tobytes() != array.tobytes():
                faults.append(f"replicas of {key} differ on rank {rank}")
            if key in alone[1]:
                its, other = alone[1][key], moved[1][key]
                faults += _far(f"rank {rank} {key}", array, its, other, low)
    missing = alone[1].keys() - first_of.keys()
    return faults + [f"no rank has {key}" for key in sorted(missing)]


def _far(what, mine, its, other, low):
    mine, its, other = [np.asarray(a, np.float64) for a in (mine, its, other)]
    if mine.shape != its.shape:
        return [f"{what}: {mine.shape} in the place of {its.shape}"]
    if not its.size or (np.isnan(its).all() and np.isnan(mine).all()):
        return []
    scale = max(float(np.abs(its).max()), 1e-3)
    near = 30 * float(np.abs(other - its).max()) + (2e-2 if low else 2e-5) * scale
    away = float(np.abs(mine - its).max())
    return [] if away <= near else [f"{what}: {away:.3g} away, {near:.3g} expected, of {scale:.3g}"]
