"""Jobs with a byte budget: the same bits, within the bytes, or an error that says what would do."""

import hashlib
import re
from functools import cache

import numpy as np
import pytest
from error_texts import raises
from jobs import GPT, losses_of_fit

import actorflow as af
from actorflow import nn
from compiler.contract.types import Phase
from compiler.lowering.lower import lower

STEPS = 4


class TokenGPT(GPT):
    def __init__(self, layers=2):
        super().__init__(17, seq=24, width=16, layers=layers, dropout=0.1)

    def __call__(self, batch):
        return af.cross_entropy(super().__call__(batch.x).flatten(0, -2), batch.y.flatten())


class UNet(nn.Module):
    """Down and up again, every level joined with its twin: no chain of blocks."""

    def __init__(self):
        self.down = [nn.Linear(24, 48), nn.Linear(48, 96), nn.Linear(96, 96)]
        self.up = [nn.Linear(192, 96), nn.Linear(192, 48), nn.Linear(96, 17)]

    def __call__(self, batch):
        h = batch.x.to("float32") * 0.1
        skips = []
        for layer in self.down:
            h = af.gelu(layer(h), approximate="tanh")
            skips.append(h)
        for layer, skip in zip(self.up, reversed(skips), strict=True):
            h = af.gelu(layer(af.concat([h, skip], axis=-1)), approximate="tanh")
        return af.square(h).mean()


class Shared(nn.Module):
    """One layer, used many times: its update must wait for the last time."""

    def __init__(self):
        self.layer, self.drop = nn.Linear(24, 24), nn.Dropout(0.3)

    def __call__(self, batch):
        h = batch.x.to("float32") * 0.1
        for _ in range(8):
            h = h + self.drop(af.gelu(self.layer(h), approximate="tanh"))
        return af.square(h).mean()


MODELS = {"gpt": TokenGPT, "unet": UNet, "shared": Shared}


def tokens(batch=64):
    rng = np.random.default_rng(3)
    return af.data.Tokens(rng.integers(0, 17, 6000), seq=24, batch=batch, seed=0)


def make_job(**options):
    @af.job(**{"optimizer": af.optim.AdamW(1e-2), **options})
    def train(model, batch):
        return model(batch)

    return train


@cache
def freely(name, steps=STEPS, **options):
    """Return what `train` does without a budget."""
    return train(name, steps, **options)


def train(name, steps=STEPS, **options):
    """Return the plan, and hashes of losses and trained parameters."""
    job, model, data = make_job(**options), MODELS[name](), tokens()
    losses = losses_of_fit(job, model, data, steps)
    return job.compile(model, tokens()), digest_of(losses, model)


def digest_of(losses, model):
    digest = hashlib.sha256(np.array(losses).tobytes())
    for name, array in sorted(model.state().items()):
        digest.update(name.encode() + array.tobytes())
    return digest.hexdigest()


@cache
def smallest(name, **options):
    """Return the smallest budget that the error of an impossible one names."""
    with pytest.raises(af.BudgetError) as caught:
        make_job(memory_budget=1, **options).compile(MODELS[name](), tokens())
    return caught.value.smallest_bytes


def arena(plan):
    return plan.arenas[0].size_bytes


def num_again(plan):
    return sum(x.phase is Phase.RECOMPUTE for a in plan.actors for x in a.launches)


@pytest.mark.thinned(2)
@pytest.mark.one_device("sets budgets in bytes of one arena")
@pytest.mark.parametrize("name", MODELS)
def test_a_job_within_a_budget_trains_to_the_same_bits(name):
    free, expected = freely(name)
    least = smallest(name)
    assert num_again(free) == 0
    assert least < arena(free)
    for share in (0.0, 0.3, 0.7):
        budget = int(least + share * (arena(free) - least))
        plan, digest = train(name, memory_budget=budget)
        assert arena(plan) <= budget
        assert num_again(plan) > 0
        assert digest == expected


@pytest.mark.thinned(2)
@pytest.mark.parametrize("name", MODELS)
def test_the_smallest_budget_named_is_feasible_and_a_smaller_one_is_refused(name):
    least = smallest(name)
    plan = make_job(memory_budget=least).compile(MODELS[name](), tokens())
    assert arena(plan) <= least
    with pytest.raises(af.BudgetError) as caught:
        make_job(memory_budget=least - 1).compile(MODELS[name](), tokens())
    assert caught.value.smallest_bytes == least


@pytest.mark.one_device("sets budgets in bytes of one arena")
def test_an_impossible_budget_is_an_error_with_the_floor_its_line_and_what_is_feasible():
    with pytest.raises(af.BudgetError) as caught:
        make_job(memory_budget="1KiB").compile(TokenGPT(), tokens())
    text = str(caught.value)
    least = caught.value.smallest_bytes
    assert re.match(r".*jobs\.py:\d+: job 'train' does not fit memory_budget", text)
    assert "1.0 KiB (1,024 bytes)" in text
    assert f"({least:,} bytes)" in text
    assert "alone needs" in text


def test_a_budget_that_is_large_enough_changes_nothing_but_the_note():
    free, _ = freely("gpt")
    plan = make_job(memory_budget=arena(free)).compile(TokenGPT(), tokens())
    assert plan.actors == free.actors
    assert plan.registers == free.registers
    assert plan.recomputation[0].num_launches == 0


@pytest.mark.no_gpu(
    "the search is none of all sets: by a GPU's costs it once finds less with more bytes"
)
def test_more_budget_never_costs_more_time():
    model, data = TokenGPT(), tokens()
    free = arena(freely("gpt")[0])
    least = smallest("gpt")
    extras = []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        plan = make_job(memory_budget=int(least + share * (free - least))).compile(model, data)
        extras.append(plan.recomputation[0].extra)
    assert extras == sorted(extras, reverse=True)
    assert extras[-1] == 0.0


@pytest.mark.host("copies to the host are tried, too")
@pytest.mark.parametrize("share", [0.66, 0.7, 0.8, 0.85, 0.9, 0.95])
def test_a_budget_costs_one_lowering_more(monkeypatch, share):
    """The planner's bytes and those beside them are what the plan takes: the first one fits.

    Another follows only where tensors were placed less tightly than the plan's live bytes allow.
    """
    budget = int(share * arena(freely("gpt")[0]))
    lowered = []

    def kept(*args):
        lowered.append(lower(*args))
        return lowered[-1]

    monkeypatch.setattr("compiler.pipeline.pipeline.lower", kept)
    plan = make_job(memory_budget=budget).compile(TokenGPT(), tokens())
    assert plan.recomputation[0].method == "selective"
    assert len(lowered) == 2 or share < 0.8
    _, *tried, last = lowered
    for each in tried:
        assert max(m.lower_bound_bytes for m in each.memory) <= budget < arena(each)
    assert arena(last) <= budget


@pytest.mark.one_device("sets budgets in bytes of one arena")
def test_blocks_recomputes_every_block_without_a_budget():
    free, expected = freely("gpt")
    plan, digest = train("gpt", recompute="blocks")
    assert arena(plan) < arena(free)
    assert plan.recomputation[0].method == "blocks"
    assert digest == expected


@pytest.mark.one_device("sets budgets in bytes of one arena")
def test_a_job_that_may_not_recompute_says_what_it_needs():
    free, _ = freely("gpt")
    with pytest.raises(af.BudgetError, match="without recomputation") as caught:
        make_job(memory_budget=arena(free) - 1, recompute="none").compile(TokenGPT(), tokens())
    assert caught.value.smallest_bytes == arena(free)


@pytest.mark.thinned(2)
@pytest.mark.one_device("sets budgets in bytes of one arena")
@pytest.mark.parametrize(
    "options",
    [{"accumulate": 3}, {"streams": 2}, {"metrics_every": 3}, {"accumulate": 2, "streams": 2}],
    ids=str,
)
def test_a_budget_holds_with_rates_and_streams_and_changes_no_bits(options):
    free, expected = freely("gpt", **options)
    least = smallest("gpt", **options)
    budget = (least + arena(free)) // 2
    plan, digest = train("gpt", memory_budget=budget, **options)
    assert arena(plan) <= budget
    assert num_again(plan) > 0
    assert digest == expected


def test_a_run_continues_under_another_budget_with_the_same_bits(tmp_path):
    _, expected = freely("gpt", steps=6)
    least = smallest("gpt")
    model = TokenGPT()
    losses = []
    for steps, budget in ((3, None), (6, int(1.3 * least))):
        job = make_job(memory_budget=budget)
        losses += losses_of_fit(job, model, tokens(), steps, checkpoint=tmp_path / "run", every=1)
    assert digest_of(losses, model) == expected


def test_a_budget_includes_the_evaluation_between_steps():
    job_of = make_job(memory_budget=1)
    valid = af.Evaluation(make_job(optimizer=None, train=False), tokens(64), every=2, batches=1)
    with pytest.raises(af.BudgetError) as caught:
        job_of.compile(TokenGPT(), tokens(), evaluation=valid)
    assert caught.value.smallest_bytes > smallest("gpt")
    job = make_job(memory_budget=caught.value.smallest_bytes)
    plan = job.compile(TokenGPT(), tokens(), evaluation=valid)
    assert arena(plan) <= caught.value.smallest_bytes


def test_a_budget_of_the_evaluation_is_refused_for_it_shares_the_trainings_arena():
    valid = make_job(optimizer=None, train=False, memory_budget="1GiB")
    with raises(af.CompileError):
        make_job().compile(
            TokenGPT(), tokens(), evaluation=af.Evaluation(valid, tokens(), every=2, batches=1)
        )


@pytest.mark.thinned(2)
@pytest.mark.one_device("sets budgets in bytes of one arena")
@pytest.mark.parametrize("streams", [1, 2, 3])
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_the_smallest_budget_is_never_above_what_saving_everything_takes(rows, streams):
    class Tiny(nn.Module):
        def __init__(self):
            self.a, self.b, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4)

        def __call__(self, batch):
            h = self.a(batch.x)
            return af.square(self.norm(af.gelu(self.b(h), approximate="tanh") + h)).mean()

    spec = {"x": af.TensorType(af.DType.FLOAT32, (rows, 4))}
    free = make_job(streams=streams).compile(Tiny(), spec)
    with pytest.raises(af.BudgetError) as caught:
        make_job(streams=streams, memory_budget=1).compile(Tiny(), spec)
    least = caught.value.smallest_bytes
    assert least <= arena(free)
    assert arena(make_job(streams=streams, memory_budget=least).compile(Tiny(), spec)) <= least


@pytest.mark.parametrize(
    "options",
    [
        {"memory_budget": 0},
        {"memory_budget": -5},
        {"memory_budget": "600 Mx"},
        {"memory_budget": ""},
        {"memory_budget": True},
        {"memory_budget": 1.5},
        {"memory_budget": "1e9"},
        {"memory_budget": "9999999 TiB"},
        {"recompute": "always"},
        {"recompute": None},
    ],
)
def test_options_that_mean_nothing_are_refused_with_the_users_line(options):
    with raises(af.CompileError):
        make_job(**options)
