"""Jobs whose updates are one launch on a GPU: the bits of those that have a launch each.

In bfloat16 they write the rounded weights of the next step, too: with the bits of a cast.
"""

import json

import numpy as np
import pytest

import actorflow as af
from actorflow import nn
from actorflow.compile.cuda_target import CudaTarget
from actorflow.run.live_variables import LiveVariables


class Narrow(nn.Module):
    """Many small layers, of one column some of them."""

    def __init__(self, layers, width):
        self.first = nn.Linear(5, width)
        self.between = [nn.Linear(width, width) for _ in range(layers)]
        self.last = nn.Linear(width, 3)

    def __call__(self, x):
        x = af.tanh(self.first(x))
        for layer in self.between:
            x = x + af.tanh(layer(x))
        return self.last(x)


@pytest.fixture(autouse=True)
def emulated(native_toolchain, monkeypatch):
    monkeypatch.setenv("ACTORFLOW_CUDA", "emulated")


@pytest.fixture
def apart(monkeypatch):
    """Return a function from which on every update has a launch of its own, and casts are made."""

    def set_apart():
        known = CudaTarget.fingerprint.fget
        own = property(lambda self: known(self) + " apart")
        monkeypatch.setattr(CudaTarget, "fingerprint", own)
        monkeypatch.setattr(CudaTarget, "max_merged_updates", lambda self, num_full: 1)

    return set_apart


def data(bad=None):
    x = np.random.default_rng(0).normal(size=(32, 5)).astype(np.float32)
    y = x[:, :3].argmax(1)
    if bad is not None:
        x[bad] = np.nan
    return af.data.ArraySource({"x": x, "y": y}, batch=8, seed=1)


def loss(model, batch):
    return af.cross_entropy(model(batch.x), batch.y)


def trained(layers, width, steps, on_nan="raise", **options):
    """Return losses, variables, and the launches of updates of a job."""
    job = af.job(loss, seed=3, device="cuda", **options)
    model, found = Narrow(layers, width), []

    def note(_, metrics):
        found.append(metrics["loss"])

    job.fit(model, data(), steps=steps, on_nan=on_nan, progress=False, on_step=note)
    plan = job.compile(Narrow(layers, width), data(), on_nan=on_nan)
    ops = [launch for actor in plan.actors for launch in actor.launches if "update" in launch.op]
    return found, {k: np.array(v) for k, v in model.state().items()}, ops


CASES = {
    "adamw": {"optimizer": af.optim.AdamW(3e-3)},
    "momentum": {"optimizer": af.optim.SGD(0.1, momentum=0.9)},
    "bf16": {"optimizer": af.optim.AdamW(3e-3), "precision": "bf16"},
    "accumulate": {"optimizer": af.optim.AdamW(3e-3), "accumulate": 2},
    "bf16 sums": {"optimizer": af.optim.SGD(0.1), "accumulate": 2, "precision": "bf16"},
    "skip": {"optimizer": af.optim.AdamW(3e-3), "on_nan": "skip"},
    "schedule": {"optimizer": af.optim.AdamW(af.optim.cosine(3e-3, steps=20))},
}


@pytest.mark.thinned(2)
@pytest.mark.parametrize("case", CASES)
def test_joined_updates_train_with_the_bits_of_updates_apart(case, apart):
    losses, variables, launches = trained(6, 7, 20, **CASES[case])
    assert [launch.op for launch in launches].count("joined_updates") >= 1
    assert len(launches) < 8
    apart()
    expected = trained(6, 7, 20, **CASES[case])
    assert {launch.op for launch in expected[2]} & {"joined_updates"} == set()
    assert len(expected[2]) == 16
    assert losses == expected[0]
    for name, value in variables.items():
        np.testing.assert_array_equal(value, expected[1][name])


def test_300_parameters_are_a_handful_of_launches_that_name_them():
    _, _, launches = trained(149, 1, 2, optimizer=af.optim.SGD(0.1))
    names = [name for x in launches for name in dict(x.attrs).get("variables", ())]
    assert len(launches) <= 6
    assert len(set(names)) == len(names) >= 290
    assert {"first.weight", "last.bias"} <= {*names}
    assert all([" x sgd_update" in x.label for x in launches if x.op == "joined_updates"])


BF16 = {"optimizer": af.optim.AdamW(3e-2), "precision": "bf16", "device": "cuda", "seed": 3}


def rounded_of(plan):
    return {dict(v.init)["of"] for v in plan.variables if v.role == "rounded"}


def test_weights_that_products_read_are_cast_no_more(apart):
    def plan():
        return af.job(loss, **BF16).compile(Narrow(2, 7), data())

    def casts(made):
        ops = [x.made_of for actor in made.actors for x in actor.launches]
        return [own for own in ops if own == ("cast",)]

    made = plan()
    assert {"first.weight", "between.1.weight", "last.weight"} <= rounded_of(made)
    assert len(casts(made)) <= 1  # that of the batch
    assert {v.role for v in made.state} == {"parameter", "optimizer", "counter"}
    apart()
    assert len(casts(plan())) >= 4
    assert rounded_of(plan()) == set()


def test_what_the_user_loads_between_steps_is_what_products_read(apart):
    def losses():
        job, model, source = af.job(loss, **BF16), Narrow(2, 7), data()
        found = [job.step(model, next(source))["loss"] for _ in range(3)]
        model.load({name: -2 * array for name, array in model.state().items()})
        found += [job.step(model, next(source))["loss"] for _ in range(3)]
        job.close(model)
        return found

    together = losses()
    apart()
    assert together == losses()


def test_a_checkpoint_has_no_rounded_weights_and_a_resumed_run_has_them(tmp_path):
    def steps(name, *ends):
        found, model = [], Narrow(2, 7)
        for end in ends:
            af.job(loss, **BF16).fit(
                model if end == ends[0] else Narrow(2, 7), data(), steps=end, progress=False,
                checkpoint=tmp_path / name, every=2,
                on_step=lambda step, m: found.append((step, m["loss"])),
            )  # fmt: skip
        return found

    assert steps("cut", 4, 9) == steps("whole", 9)
    newest = max((tmp_path / "cut").glob("step-*"))
    manifest = json.loads((newest / "manifest.json").read_text().splitlines()[0])
    names = [tensor["name"] for tensor in manifest["tensors"]]
    assert "first.weight" in names
    assert [name for name in names if "bfloat16" in name] == []


def test_broken_steps_and_evaluations_leave_them_what_they_are(apart):
    def rows():
        watched = af.Evaluation(evaluate, data(), every=3, batches=2)
        found = []
        result = af.job(loss, **BF16).fit(
            Narrow(2, 7), data(bad=3), steps=11, on_nan="skip", evaluation=watched,
            progress=False, on_step=lambda _, m: found.append(m["loss"]),
        )  # fmt: skip
        assert result.num_skipped == np.isnan(found).sum() > 1
        return found, [(step, dict(means)) for step, means in result.evaluations]

    evaluate = af.job(loss, precision="bf16", train=False, device="cuda")
    together = rows()
    apart()
    np.testing.assert_equal(together, rows())


class WithoutBias(nn.Module):
    def __init__(self):
        self.up, self.down = nn.Linear(5, 7, bias=False), nn.Linear(7, 3, bias=False)

    def __call__(self, x):
        return self.down(af.tanh(self.up(x)))


def test_who_reads_rounded_weights_alone_is_within_a_step_too():
    """Or a value that is loaded would come while it reads them."""
    plan = af.job(loss, **BF16, accumulate=2).compile(WithoutBias(), data())
    own = {plan.views[v.view].register for v in plan.state}
    (gradient,) = [actor for actor in plan.actors if actor.name == "gradient"]
    assert not {plan.views[x].register for y in gradient.launches for x in y.inputs} & own
    (steps, *_) = LiveVariables(plan, None, None)._between_steps.rounds
    assert dict(steps)[gradient.id] == 2
