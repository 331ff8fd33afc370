"""Parameter groups: which settings a parameter gets, and what is refused."""

import numpy as np
import pytest
from error_texts import raises

import actorflow as af
from actorflow import nn
from compiler.contract.errors import CompileError


class Net(nn.Module):
    def __init__(self):
        self.first, self.norm, self.last = nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)

    def __call__(self, x):
        return self.last(self.norm(self.first(x)))


X = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)


def job_of(optimizer, **options):
    return af.job(
        lambda model, batch: model(batch.x).square().sum(), optimizer=optimizer, **options
    )


def moved(optimizer, steps=1):
    """Return how far parameters moved from where they began, by path."""
    job, model = job_of(optimizer), Net()
    rng = np.random.default_rng(1)
    begin = {n: rng.normal(size=p.type.shape).astype(np.float32)
             for n, p in model.named_parameters()}  # fmt: skip
    model.load(begin)
    for _ in range(steps):
        job.step(model, {"x": X})
    job.close(model)
    return {name: np.array(value) - begin[name] for name, value in model.state().items()}


def same(got, expected, *names):
    for name in names:
        np.testing.assert_array_equal(got[name], expected[name], err_msg=name)


BIASES = ("first.bias", "norm.bias", "last.bias")
WEIGHTS = ("first.weight", "norm.weight", "last.weight")


def test_the_first_group_that_matches_decides_and_the_rest_is_as_without_groups():
    sgd, group = af.optim.SGD, af.optim.group
    groups = [group("*.bias", "norm.*", weight_decay=0.5), group("last.*", "norm.*", lr=0.01)]
    got = moved(sgd(0.1, weight_decay=0.1, groups=groups))
    same(got, moved(sgd(0.1, weight_decay=0.5)), *BIASES, "norm.weight")
    same(got, moved(sgd(0.01, weight_decay=0.1)), "last.weight")
    same(got, moved(sgd(0.1, weight_decay=0.1)), "first.weight")


def test_a_group_has_a_rate_of_its_own_as_number_schedule_or_factor():
    sgd, group = af.optim.SGD, af.optim.group
    fall = af.optim.linear(0.2, steps=4)
    groups = [group("first.*", lr=fall), group("norm.*", lr_scale=0.5), group("last.*", lr=0.02)]
    got = moved(sgd(0.1, groups=groups))
    same(got, moved(sgd(fall)), "first.weight", "first.bias")
    same(got, moved(sgd(0.05)), "norm.weight", "norm.bias")
    same(got, moved(sgd(0.02)), "last.weight", "last.bias")


def test_a_frozen_group_stays_and_has_no_state():
    optimizer = af.optim.AdamW(0.1, groups=[af.optim.group("first.*", frozen=True)])
    got = moved(optimizer, steps=3)
    assert not np.any(got["first.weight"])
    assert not np.any(got["first.bias"])
    assert np.all(got["last.bias"] != 0)
    plan = job_of(optimizer).compile(Net(), {"x": af.data.spec_of({"x": X}, "")["x"]})
    states = [v.name for v in plan.variables if v.role == "optimizer"]
    assert len(states) == 8
    assert [name for name in states if "first" in name] == []


def test_no_decay_on_biases_and_scales_is_one_word():
    for kind in (af.optim.AdamW, af.optim.SGD, af.optim.Lion):
        got = moved(kind(0.1, weight_decay=0.3, decay_only="matrices"))
        same(got, moved(kind(0.1, weight_decay=0.3)), "first.weight", "last.weight")
        same(got, moved(kind(0.1, weight_decay=0.0)), *BIASES, "norm.weight")


def test_the_decay_that_a_group_names_holds_for_vectors_too():
    groups = [af.optim.group("norm.*", weight_decay=0.7), af.optim.group("last.*", lr=0.1)]
    got = moved(af.optim.SGD(0.1, weight_decay=0.3, decay_only="matrices", groups=groups))
    same(got, moved(af.optim.SGD(0.1, weight_decay=0.7)), "norm.weight", "norm.bias")
    same(got, moved(af.optim.SGD(0.1)), "last.bias")


def test_parameters_that_are_treated_alike_read_one_rate():
    groups = [af.optim.group(f"*{n}*", lr_scale=0.5, weight_decay=0.0) for n in ("first", "last")]
    plan = job_of(af.optim.SGD(0.1, groups=groups)).compile(
        Net(), {"x": af.data.spec_of({"x": X}, "")["x"]}
    )
    launches = [launch for actor in plan.actors for launch in actor.launches]
    rates = {launch.inputs[-1] for launch in launches if launch.op == "sgd_update"}
    assert len(rates) == 2


@pytest.mark.parametrize(
    "make",
    [
        lambda: af.optim.group(),
        lambda: af.optim.group(3),
        lambda: af.optim.group("a", lr=-1.0),
        lambda: af.optim.group("a", lr_scale=float("nan")),
        lambda: af.optim.group("a", frozen=1),
        lambda: af.optim.group("a", frozen=True, lr=0.1),
        lambda: af.optim.SGD(0.1, groups=3),
        lambda: af.optim.SGD(0.1, groups=["*.bias"]),
        lambda: af.optim.SGD(0.1, groups=[af.optim.group("a", betas=(0.9, 0.9))]),
        lambda: af.optim.AdamW(groups=[af.optim.group("a", betas=(2.0, 0.9))]),
        lambda: af.optim.AdamW(decay_only="weights"),
    ],
)
def test_what_is_no_group_is_an_error_with_the_users_line(make):
    with raises(CompileError):
        make()


@pytest.mark.parametrize("groups", [[("*.bais",)], [("first.*", "frist.*")], [("first",)]])
def test_a_pattern_that_matches_nothing_names_what_is_near(groups):
    optimizer = af.optim.SGD(0.1, groups=[af.optim.group(*own, lr=0.2) for own in groups])
    with raises(CompileError):
        moved(optimizer)


def test_groups_that_freeze_everything_are_an_error():
    optimizer = af.optim.SGD(0.1, groups=[af.optim.group("*", frozen=True)])
    with raises(CompileError):
        moved(optimizer)
