"""Several optimizers in one job: a GAN and its like, against a walk in float64."""

import json

import numpy as np
import pytest
from error_texts import raises
from jobs import assert_same

import actorflow as af
from actorflow import nn

STEPS = 5


class MLP(nn.Module):
    def __init__(self, inputs, hidden, outputs):
        self.up, self.down = nn.Linear(inputs, hidden), nn.Linear(hidden, outputs)

    def __call__(self, x):
        return self.down(af.tanh(self.up(x)))


class GAN(nn.Module):
    def __init__(self):
        self.generator, self.discriminator = MLP(3, 7, 4), MLP(4, 6, 1)


def optimizers():
    return [
        af.optim.on("generator.*", af.optim.AdamW(2e-2, weight_decay=0.0), loss="g_loss"),
        af.optim.on("discriminator.*", af.optim.SGD(0.1, momentum=0.5), loss="d_loss"),
    ]


def gan(parts=optimizers, **options):
    @af.job(optimizer=parts(), **options)
    def train(model, batch):
        fake = model.generator(batch.z)
        right, wrong = model.discriminator(batch.x), model.discriminator(fake)
        d_loss = ((right - 1.0) * (right - 1.0)).mean() + (wrong * wrong).mean()
        g_loss = ((wrong - 1.0) * (wrong - 1.0)).mean()
        return {"g_loss": g_loss, "d_loss": d_loss, "fake": fake}

    return train


def arrays(steps=STEPS, every=1, seed=5):
    rng = np.random.default_rng(seed)
    return {
        "x": rng.standard_normal((8 * steps * every, 4)).astype(np.float32),
        "z": rng.standard_normal((8 * steps * every, 3)).astype(np.float32),
    }


def source(values):
    return af.data.ArraySource(values, batch=8, shuffle=False)


def filled(model, seed=8):
    rng = np.random.default_rng(seed)
    model.load(
        {
            n: (0.4 * rng.standard_normal(p.type.shape)).astype(np.float32)
            for n, p in model.named_parameters()
        }
    )
    return model


def fitted(train, model, values, steps=STEPS, **options):
    rows = []
    result = train.fit(
        model, source(values), steps=steps, progress=False,
        on_step=lambda step, m: rows.append((m["g_loss"], m["d_loss"])), **options,
    )  # fmt: skip
    return rows, result


def forward(p, name, x):
    h = np.tanh(x @ p[f"{name}.up.weight"].T + p[f"{name}.up.bias"])
    return h, h @ p[f"{name}.down.weight"].T + p[f"{name}.down.bias"]


def pulled(p, name, x, h, dy):
    """Return the gradients of one network, and of its input."""
    dh = dy @ p[f"{name}.down.weight"] * (1 - h * h)
    own = {
        "up.weight": dh.T @ x, "up.bias": dh.sum(0),
        "down.weight": dy.T @ h, "down.bias": dy.sum(0),
    }  # fmt: skip
    return {f"{name}.{n}": g for n, g in own.items()}, dh @ p[f"{name}.up.weight"]


def losses_and_gradients(p, x, z):
    gh, fake = forward(p, "generator", z)
    rh, right = forward(p, "discriminator", x)
    wh, wrong = forward(p, "discriminator", fake)
    g_loss, d_loss = np.mean((wrong - 1) ** 2), np.mean((right - 1) ** 2) + np.mean(wrong**2)
    of_right, _ = pulled(p, "discriminator", x, rh, 2 * (right - 1) / right.size)
    of_wrong, _ = pulled(p, "discriminator", fake, wh, 2 * wrong / wrong.size)
    _, dfake = pulled(p, "discriminator", fake, wh, 2 * (wrong - 1) / wrong.size)
    of_fake, _ = pulled(p, "generator", z, gh, dfake)
    return (g_loss, d_loss), {**of_fake, **{n: of_right[n] + of_wrong[n] for n in of_right}}


def walk(p, values, every=1, clip_norm=None):
    """Both optimizers go from the values before the step."""
    p = {n: a.astype(np.float64) for n, a in p.items()}
    m, v, buffers, rows = {}, {}, {}, []
    batches = [{n: a.astype(np.float64) for n, a in b.items()} for b in _batches(values)]
    for t in range(1, len(batches) // every + 1):
        own = [losses_and_gradients(p, **b) for b in batches[(t - 1) * every : t * every]]
        rows.append(tuple(np.mean([losses for losses, _ in own], axis=0)))
        g = {n: sum(one[n] for _, one in own) / every for n in p}
        if clip_norm is not None:
            norm = np.sqrt(sum(np.sum(a * a) for a in g.values()))
            g = {n: a * min(1.0, clip_norm / (norm + 1e-6)) for n, a in g.items()}
        for n in p:
            if n.startswith("generator"):
                m[n] = 0.9 * m.get(n, 0.0) + 0.1 * g[n]
                v[n] = 0.999 * v.get(n, 0.0) + 0.001 * g[n] ** 2
                root = np.sqrt(v[n] / (1 - 0.999**t)) + 1e-8
                p[n] = p[n] - 2e-2 * m[n] / (1 - 0.9**t) / root
            else:
                buffers[n] = 0.5 * buffers.get(n, 0.0) + g[n]
                p[n] = p[n] - 0.1 * buffers[n]
    return rows, p


def _batches(values):
    return [{n: a[i : i + 8] for n, a in values.items()} for i in range(0, len(values["x"]), 8)]


@pytest.mark.parametrize("clip", [{}, {"clip_norm": 0.05}], ids=str)
@pytest.mark.parametrize("every", [1, 3])
def test_each_part_descends_its_own_loss_from_the_values_before_the_step(every, clip):
    values, model = arrays(every=every), filled(GAN())
    before = model.state()
    rows, result = fitted(gan(accumulate=every, **clip), model, values)
    expected_rows, expected = walk(before, values, every, **clip)
    np.testing.assert_allclose(rows, expected_rows, rtol=1e-5)
    for name, array in expected.items():
        np.testing.assert_allclose(result.variables[name], array, rtol=2e-4, atol=2e-6)
    assert "adam_m/generator.up.weight" in result.variables
    assert "momentum/discriminator.up.weight" in result.variables
    assert "adam_m/discriminator.up.weight" not in result.variables


@pytest.mark.parametrize(
    "options",
    [{"streams": 2}, {"metrics_every": 4}, {"recompute": "blocks"}, {"device": "sim"}],
    ids=str,
)
def test_parts_compute_the_same_under_every_option(options):
    plain, first = fitted(gan(), filled(GAN()), arrays())
    rows, result = fitted(gan(**options), filled(GAN()), arrays())
    assert rows == plain
    assert_same(result.variables, first.variables)


def test_a_resumed_run_goes_on_as_one_that_was_not_cut(tmp_path):
    train = gan(accumulate=2, clip_norm=0.05)
    values = arrays(6, 2)
    rows, whole = fitted(train, filled(GAN()), values, 6, checkpoint=tmp_path / "a")
    for steps in (2, 6):
        again, result = fitted(train, filled(GAN()), values, steps, checkpoint=tmp_path / "b")
    assert again == rows[2:]
    assert_same(result.variables, whole.variables)
    lines = (tmp_path / "b" / "metrics.jsonl").read_text().splitlines()
    assert {"g_loss", "d_loss"} <= json.loads(lines[-1]).keys()


@pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning")
@pytest.mark.parametrize("field", ["x", "z"])
def test_a_step_in_which_any_loss_is_broken_is_skipped_for_all_parts(field):
    values, good = arrays(), arrays()
    values[field][8:16] = np.nan
    good = {n: np.concatenate([a[:8], a[16:]]) for n, a in good.items()}
    train = gan(lambda: [
        af.optim.on("generator.*", af.optim.SGD(0.1), loss="g_loss"),
        af.optim.on("discriminator.*", af.optim.SGD(0.1, momentum=0.5), loss="d_loss"),
    ])  # fmt: skip
    _, result = fitted(train, filled(GAN()), values, on_nan="skip")
    assert result.num_skipped == 1
    _, expected = fitted(train, filled(GAN()), good, STEPS - 1)
    left_out = {"step", "skipped"}
    for name in expected.variables.keys() - left_out:
        np.testing.assert_array_equal(result.variables[name], expected.variables[name])


@pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning")
def test_the_loss_that_is_not_finite_is_named():
    values = arrays()
    values["x"][16:24] = np.inf
    with raises(af.NonFiniteLoss):
        fitted(gan(), filled(GAN()), values)


def test_losses_in_float16_have_one_scale():
    plain, _ = fitted(gan(), filled(GAN()), arrays())
    rows, result = fitted(gan(precision="fp16", loss_scale=256.0), filled(GAN()), arrays())
    np.testing.assert_allclose(rows, plain, rtol=3e-2)
    assert result.metrics["loss_scale"] == 256.0


def test_what_no_part_names_is_read_as_it_is():
    """A target network: one loss, and a part of the model that only others change."""

    @af.job(optimizer=af.optim.on("generator.*", af.optim.SGD(0.1)))
    def train(model, batch):
        return (model.discriminator(model.generator(batch.z)) ** 2.0).mean()

    model = filled(GAN())
    before = model.state()
    train.fit(model, source(arrays()), steps=2, progress=False)
    after = model.state()
    moved = [n for n in after if not np.array_equal(after[n], before[n])]
    assert moved == [n for n in after if n.startswith("generator")]


def test_two_jobs_that_take_turns_are_the_alternating_game():
    together, apart = filled(GAN()), filled(GAN())
    jobs = [gan(lambda part=part: [part]) for part in optimizers()]
    first, second = _batches(arrays())[:2]
    gan().step(together, first)
    jobs[0].step(apart, first)
    jobs[1].step(apart, first)
    states = together.state(), apart.state()
    for name in states[0]:
        is_same = np.array_equal(states[0][name], states[1][name])
        assert is_same == name.startswith("generator"), name
    jobs[0].step(apart, second)


WRONG = {
    "two claim one": (
        lambda: [
            af.optim.on("*", af.optim.SGD(0.1), loss="g_loss"),
            af.optim.on("discriminator.*", af.optim.SGD(0.1), loss="d_loss"),
        ],
        r"parameter 'discriminator\.up\.weight' is claimed by 'discriminator\.\*' here and by '\*'",
    ),
    "a loss that is not returned": (
        lambda: [af.optim.on("*", af.optim.SGD(0.1), loss="gloss")],
        r"returned \['d_loss', 'fake', 'g_loss'\]; a training job's dict needs the key 'gloss'",
    ),
    "the default loss is not returned": (
        lambda: af.optim.on("*", af.optim.SGD(0.1)),
        "a training job's dict needs the key 'loss'",
    ),
    "a loss that is no scalar": (
        lambda: [af.optim.on("*", af.optim.SGD(0.1), loss="fake")],
        r"the loss 'fake' of job 'train' must be a float scalar, it is float32\[8, 4\]",
    ),
    "nothing of the name": (
        lambda: [af.optim.on("genrator.*", af.optim.SGD(0.1), loss="g_loss")],
        r"test_parts\.py:\d+.*on\(\): pattern 'genrator\.\*' matches no parameter; there is 'gen",
    ),
    "no path to its loss": (
        lambda: [
            af.optim.on("generator.*", af.optim.SGD(0.1), loss="r_loss"),
            af.optim.on("discriminator.*", af.optim.SGD(0.1), loss="d_loss"),
        ],
        r"parameter 'generator\.up\.\w+' has no path to the loss",
    ),
    "no part": (lambda: [af.optim.SGD(0.1)], r"or a list of af\.optim\.on"),
    "an empty list": (list, r"or a list of af\.optim\.on\(patterns, .*, got \[\]"),
    "no optimizer": (lambda: [af.optim.on("*", af.optim.SGD)], r"on\(\) needs an optimizer"),
    "no pattern": (lambda: [af.optim.on("", af.optim.SGD(1.0))], r"on\(\) needs a pattern"),
    "no key": (lambda: [af.optim.on("*", af.optim.SGD(1.0), loss=3)], "loss must be a key"),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_parts_that_cannot_be_are_errors_that_say_how_to_mend(wrong):
    parts, message = WRONG[wrong]

    def compiled():
        @af.job(optimizer=parts())
        def train(model, batch):
            fake = model.generator(batch.z)
            right, wrong = model.discriminator(batch.x), model.discriminator(fake)
            made = {"g_loss": wrong.mean(), "d_loss": right.mean(), "fake": fake}
            return made | ({"r_loss": right.mean()} if "path" in message else {})

        train.compile(GAN(), source(arrays()))

    with raises(af.CompileError):
        compiled()


def test_a_part_that_is_frozen_whole_is_told():
    model = GAN()
    model.generator.freeze()
    with raises(af.CompileError):
        gan().compile(model, source(arrays()))
    with raises(af.CompileError):
        gan(trainable="discriminator.*").compile(GAN(), source(arrays()))
