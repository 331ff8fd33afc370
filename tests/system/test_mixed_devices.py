"""Jobs on two devices: every split gives the bits of the host, and bad placement is refused."""

import os
import re
from pathlib import Path

import numpy as np
import pytest
from error_texts import raises
from jobs import GPT, assert_same

import actorflow as af
from actorflow import nn
from actorflow.compile.targets import SimTarget
from compiler.contract.placement import Device, DeviceKind

TWO = {"devices": ["sim:0", "sim:1"]}
PAGE = Path(__file__).resolve().parents[2] / "docs" / "devices.md"


def device(index):
    """Return the name of a device: of a GPU where the tests run on one, else a simulated one's."""
    kind = "cuda" if os.environ.get("ACTORFLOW_DEVICE", "").startswith("cuda") else "sim"
    return f"{kind}:{index}"


def two():
    return {"devices": [device(0), device(1)]}


def mixed():
    return {"devices": ["host", device(0)]}


def assert_as_whole(got, expected, near=1e-5):
    """Compare what a split job leaves with what a whole one does: bit by bit, but on GPUs.

    A GPU has all kernels generated, and one that is cut in two may sum anew. What AdamW makes of
    the biases of keys is rounding alone: they change nothing of attention.
    """
    if device(0).startswith("sim"):
        assert_same(got, expected)
        return
    assert got.keys() == expected.keys()
    for name, array in expected.items():
        if not name.endswith("qkv.bias"):
            np.testing.assert_allclose(got[name], array, rtol=near, atol=near, err_msg=name)


class Model(nn.Module):
    def __init__(self, width=16):
        self.table = nn.Embedding(24, width)
        self.lower, self.norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.upper = nn.Linear(width, 24)


def body(split, dropout=0.1):
    """Return a training whose upper half is brought to another device in one way or another."""

    def half(model, h):
        return model.upper(af.dropout(model.norm(h), dropout))

    def train(model, batch):
        h = model.table(batch.x)
        h = h + af.gelu(model.lower(af.dropout(h, dropout)), approximate="tanh")
        if split == "region":
            with af.device(device(1)):
                y = half(model, h)
        elif split == "inner region":
            with af.device(device(0)):
                y = half(model, h)
            y = y.to("host")
        elif split == "copies":
            y = half(model, h.to(device(1)))
        else:
            y = half(model, h)
        return {
            "loss": af.cross_entropy(y.flatten(0, -2), batch.y.flatten()),
            "size": (y * y).mean(),
        }

    return train


def data(seed=0):
    rng = np.random.default_rng(5)
    x, y = rng.integers(0, 24, (2, 64, 6))
    return af.data.ArraySource({"x": x, "y": y}, batch=4, seed=seed)


def trained(split, *, steps=5, evaluates=False, options=None, model=None, **fit):
    """Return all that a run left behind: outputs of each step, evaluations, variables."""
    options = {"optimizer": af.optim.AdamW(af.optim.warmup(1e-2, steps=3)), **(options or {})}
    train, seen = af.job(body(split), **options), {}
    evaluate = af.job(body("none", dropout=0.0), train=False)
    evaluation = af.Evaluation(evaluate, data(3), every=2, batches=2) if evaluates else None

    def keep(step, metrics):
        seen.update({f"{name} of {step}": np.asarray(value) for name, value in metrics.items()})

    result = train.fit(
        model or Model(), data(), steps=steps, evaluation=evaluation, progress=False,
        on_step=keep, **fit,
    )  # fmt: skip
    for step, means in result.evaluations:
        seen |= {f"evaluated {name} of {step}": np.asarray(v) for name, v in means.items()}
    return {**seen, **result.variables}


SPLITS = {"region": two, "copies": two, "inner region": mixed}

JOBS = {
    "plain": {},
    "sums of batches, evaluated": {"options": {"accumulate": 2}, "evaluates": True},
    "broken steps skipped, sums": {"options": {"accumulate": 2}, "on_nan": "skip"},
    "bfloat16": {"options": {"precision": "bf16"}},
    "two streams, metrics in pairs": {
        "options": {"streams": 2, "metrics_every": 2}, "steps": 6, "evaluates": True,
    },
    "momentum": {"options": {"optimizer": af.optim.SGD(0.1, momentum=0.9)}},
}  # fmt: skip


@pytest.mark.parametrize("what", JOBS)
@pytest.mark.usefixtures("numpys_kernels")  # a generated kernel that is cut in two may sum anew
def test_every_split_of_a_job_gives_the_bits_of_the_host(what):
    job = {"options": {}, **JOBS[what]}
    expected = trained("none", **job)
    for split, devices in SPLITS.items():
        got = trained(split, **{**job, "options": {**job["options"], **devices()}})
        assert_as_whole(got, expected, near=2e-2 if what == "bfloat16" else 1e-5)


def blocks_on(num_devices):
    """Return a training of a transformer whose blocks take turns on some devices."""

    def train(model, batch):
        h = model.emb(batch.x) + model.pos.weight
        for index, block in enumerate(model.blocks):
            if num_devices == 1:
                h = block(h)
                continue
            with af.device(device(index % num_devices)):
                h = block(h)
        return af.cross_entropy(model.head(model.norm(h)).flatten(0, -2), batch.y.flatten())

    return train


@pytest.mark.usefixtures("numpys_kernels")
@pytest.mark.parametrize("options", [{}, {"offload": "optimizer"}, {"recompute": "blocks"}])
def test_blocks_that_take_turns_on_devices_give_the_bits_of_the_host(options):
    found = []
    for count in (1, 2, 3):
        own = {"devices": [device(i) for i in range(count)]} if count > 1 else {}
        train = af.job(blocks_on(count), optimizer=af.optim.AdamW(1e-2), **own, **options)
        model = GPT(24, 6, 16, layers=3, dropout=0.1)
        found.append(train.fit(model, data(), steps=3, progress=False).variables)
    assert_as_whole(found[1], found[0])
    assert_as_whole(found[2], found[0])


def test_generated_kernels_give_all_splits_the_same_bits_and_the_host_nearly_so():
    host = trained("none")
    first, *others = [trained(split, options=devices()) for split, devices in SPLITS.items()]
    for other in others:
        assert_as_whole(other, first)
    for name, array in host.items():
        np.testing.assert_allclose(first[name], array, rtol=1e-4, atol=1e-7, err_msg=name)


@pytest.mark.usefixtures("numpys_kernels")
def test_lateness_changes_nothing_of_a_split_job(monkeypatch):
    found = []
    for seed in range(10):
        monkeypatch.setenv("ACTORFLOW_SIM_SEED", str(seed))
        found.append(trained("region", options=two(), evaluates=True))
        assert_same(found[-1], found[0])
    assert_as_whole(found[0], trained("none", evaluates=True))


@pytest.mark.usefixtures("numpys_kernels")
def test_a_run_goes_on_over_other_devices_with_the_same_bits(tmp_path):
    where = {"checkpoint": tmp_path / "run", "every": 2}
    expected = trained("none", steps=6)
    trained("region", options=two(), steps=3, **where)
    trained("none", options={"device": device(1)}, steps=5, **where)
    last = trained("copies", options=two(), steps=6, **where)
    assert_as_whole(last, {name: expected[name] for name in last})


@pytest.mark.usefixtures("numpys_kernels")
def test_steps_by_hand_and_jobs_that_do_not_train_run_on_two_devices():
    model, batch = Model(), next(data())
    scores = [
        af.job(body(split, dropout=0.0), train=False, **options).step(model, batch)
        for split, options in (("none", {}), ("region", two()), ("copies", two()))
    ]
    assert_as_whole(scores[1], scores[0])
    assert_as_whole(scores[2], scores[0])


@pytest.mark.usefixtures("numpys_kernels")
def test_a_tied_table_is_copied_each_step_and_its_gradient_comes_back():
    def tied(split):
        def train(model, batch):
            h = af.gelu(model.lower(model.table(batch.x)), approximate="tanh")
            weight = model.table.weight.to(device(1)) if split else model.table.weight
            h = model.norm(h.to(device(1)) if split else h)
            return af.cross_entropy((h @ weight.T).flatten(0, -2), batch.y.flatten())

        return train

    found = []
    for split, options in ((False, {}), (True, two())):
        model = Model()
        model.upper.weight.freeze(), model.upper.bias.freeze()
        train = af.job(tied(split), optimizer=af.optim.AdamW(1e-2), **options)
        found.append(train.fit(model, data(), steps=5, progress=False).variables)
    assert_as_whole(found[1], found[0])


class Deep(nn.Module):
    def __init__(self):
        self.layers = [nn.Linear(64, 64) for _ in range(4)]

    def __call__(self, x):
        for layer in self.layers:
            x = af.gelu(layer(x), approximate="tanh")
        return x


def deep(**options):
    """Return a job that is too large for a device of 180 KiB, its model and data."""

    def train(model, batch):
        return (model(batch.x) * batch.x).mean()

    rows = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
    job = af.job(train, optimizer=af.optim.AdamW(1e-2), **options)
    return job, Deep(), af.data.ArraySource({"x": rows}, batch=8)


@pytest.mark.one_device("names devices of its own, or patches their costs")
@pytest.mark.usefixtures("numpys_kernels")
def test_a_job_that_one_device_is_too_small_for_is_spread_with_the_same_bits():
    found = []
    for options in ({"device": "host"}, {**TWO, "memory_budget": "180KiB"}):
        train, model, rows = deep(**options)
        plan = train.compile(model, rows)
        found.append(train.fit(model, rows, steps=3, progress=False).variables)
    own = [a for a in plan.arenas if a.device.kind is DeviceKind.SIM]
    assert [str(a.device) for a in own] == ["sim:0", "sim:1"]
    assert all(0 < a.size_bytes <= 180 << 10 for a in own)
    homes = {plan.registers[plan.views[v.view].register].arena for v in plan.state}
    assert homes >= {plan.arenas.index(a) for a in own}
    assert_same(*found)


@pytest.mark.one_device("names devices of its own, or patches their costs")
def test_a_chain_that_fits_stays_on_the_first_device():
    train, model, rows = deep(**TWO)
    plan = train.compile(model, rows)
    second = Device(DeviceKind.SIM, 1)
    assert [a.size_bytes for a in plan.arenas if a.device == second] in ([], [0])


@pytest.mark.one_device("names devices of its own, or patches their costs")
def test_devices_that_are_too_small_are_refused_with_the_bytes_that_would_do():
    train, model, rows = deep(**TWO, memory_budget="60KiB")
    with pytest.raises(af.BudgetError) as caught:
        train.compile(model, rows)
    assert re.match(
        r"\S+test_mixed_devices.py:\d+: job 'train' does not fit memory_budget 60.0 KiB"
        r" \(61,440 bytes\) of sim:[01]; the smallest budget found feasible is 1\d\d\.\d KiB",
        str(caught.value),
    )


def test_a_parameter_on_two_devices_is_refused_with_both_lines_and_the_mend():
    def train(model, batch):
        h = model.lower(model.table(batch.x))
        with af.device(device(1)):
            return af.cross_entropy(
                (model.norm(h) @ model.table.weight.T).flatten(0, -2), batch.y.flatten()
            )

    model = Model()
    model.upper.weight.freeze(), model.upper.bias.freeze()
    with raises(af.CompileError):
        af.job(train, optimizer=af.optim.SGD(0.1), **two()).compile(model, data())


def test_an_op_without_a_kernel_on_its_device_is_refused_with_its_line(monkeypatch):
    def query(target, call):
        if call.op == "matmul" and str(target._device) == "sim:1":
            raise LookupError("sim:1 has no kernel for matmul")
        return asked(target, call)

    asked = SimTarget.query
    monkeypatch.setenv("ACTORFLOW_DEVICE", "sim")
    monkeypatch.setattr(SimTarget, "query", query)
    train = body("region", dropout=0.0)
    with raises(af.CompileError):
        af.job(train, optimizer=af.optim.SGD(0.1), **TWO).compile(Model(), data())


def test_an_evaluation_runs_in_its_training_whatever_the_environment_names(monkeypatch):
    expected = trained("none", options={"device": device(0)}, evaluates=True)
    monkeypatch.setenv("ACTORFLOW_DEVICE", f"{device(1)},{device(2)}")
    assert_same(trained("none", options={"device": device(0)}, evaluates=True), expected)


def test_an_evaluation_for_other_devices_is_refused():
    train = af.job(body("region"), optimizer=af.optim.SGD(0.1), **two())
    evaluate = af.job(body("none", dropout=0.0), train=False, device=device(3))
    with raises(af.CompileError):
        train.fit(Model(), data(), steps=1, evaluation=af.Evaluation(evaluate, data(), 1, 1))


def test_the_example_of_the_page_on_devices_runs(run_python):
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    run_python(example)
