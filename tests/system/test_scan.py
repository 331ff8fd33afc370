"""Jobs with loops inside: trained, cut to a budget, resumed, planned once whatever the length."""

import numpy as np
import pytest
from jobs import assert_same, losses_of_fit

import actorflow as af
from actorflow import nn
from compiler.contract.errors import PlanFormatError
from compiler.contract.plan import Plan, frame_of, sub_plans
from compiler.contract.types import Phase
from compiler.pipeline.printer import print_plan
from memory.verify import check_no_overlap

STEPS, ROWS, WIDTH = 7, 4, 6


class Net(nn.Module):
    """A recurrent net that reads ids and guesses the next."""

    def __init__(self):
        self.emb = nn.Embedding(11, WIDTH)
        self.cell, self.head = nn.Linear(2 * WIDTH, WIDTH), nn.Linear(WIDTH, 11)


def step_of(model):
    def step(h, ids):
        h = af.tanh(model.cell(af.concat([model.emb(ids), h], 1)))
        return h, h

    return step


def by_scan(model, batch, **options):
    h = np.zeros((ROWS, WIDTH), np.float32)
    return af.scan(step_of(model), h, batch.x.transpose(0, 1), **options)[1]


def by_loop(model, batch, **options):
    h, hs = np.zeros((ROWS, WIDTH), np.float32), []
    for t in range(batch.x.shape[1]):
        h, _ = step_of(model)(h, batch.x[:, t])
        hs.append(h.reshape(1, *h.shape))
    return af.concat(hs, 0)


def job_of(states, seed=3, **options):
    given = {"optimizer": af.optim.AdamW(1e-2), "seed": seed} | options
    recompute = {"recompute": True} if given.pop("again", False) else {}

    @af.job(**given)
    def train(model, batch):
        logits = model.head(states(model, batch, **recompute))
        flat = logits.reshape(-1, 11)
        return af.cross_entropy(flat, batch.y.transpose(0, 1).reshape(-1))

    return train


def tokens(steps=STEPS):
    ids = np.random.default_rng(1).integers(0, 11, 4_000)
    return af.data.Tokens(ids, seq=steps, batch=ROWS, seed=2)


def trained(job, steps=6, **options):
    model = Net()
    losses = losses_of_fit(job, model, tokens(), steps, **options)
    return losses, {name: p.data.copy() for name, p in model.named_parameters()}


def test_a_scan_trains_as_the_unrolled_loop_does():
    losses, parameters = trained(job_of(by_scan))
    expected, others = trained(job_of(by_loop))
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    for name, array in parameters.items():
        np.testing.assert_allclose(array, others[name], rtol=1e-3, atol=1e-5, err_msg=name)


def test_carries_alone_are_kept_where_the_rest_is_computed_again():
    plain, again = job_of(by_scan), job_of(by_scan, again=True)
    losses, parameters = trained(plain)
    other_losses, others = trained(again)
    np.testing.assert_allclose(losses, other_losses, rtol=1e-5)
    for name, array in parameters.items():
        np.testing.assert_allclose(array, others[name], rtol=1e-3, atol=1e-5, err_msg=name)


def test_a_budget_changes_no_bit():
    job = job_of(by_scan)
    least = job.compile(Net(), tokens()).memory[0].peak_bytes
    losses, parameters = trained(job)
    small = job_of(by_scan, memory_budget=least - 256)
    other_losses, others = trained(small)
    assert losses == other_losses
    assert_same(parameters, others)


def test_batches_add_up():
    losses, _ = trained(job_of(by_scan, accumulate=2), steps=3)
    expected, _ = trained(job_of(by_loop, accumulate=2), steps=3)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


def test_a_run_that_was_cut_goes_on(tmp_path):
    losses, parameters = trained(job_of(by_scan))
    job = job_of(by_scan)
    losses_of_fit(job, Net(), tokens(), 3, checkpoint=tmp_path / "run", every=3)
    model = Net()
    rest = losses_of_fit(job, model, tokens(), 6, checkpoint=tmp_path / "run", every=3)
    assert rest == losses[3:]
    assert_same(parameters, {name: p.data for name, p in model.named_parameters()})


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_products_within_are_of_the_jobs_precision(precision):
    losses, _ = trained(job_of(by_scan, precision=precision))
    expected, _ = trained(job_of(by_scan))
    assert losses != expected
    np.testing.assert_allclose(losses, expected, rtol=2e-2)


def plan_of(steps, **options):
    return job_of(by_scan, **options).compile(Net(), tokens(steps))


def ops_by_actor(plan):
    """The ops of each actor before the updates, sorted.

    How many launches the updates take depends on bytes: they join as far as gradients that wait
    raise no peak, and the peak lies elsewhere for many steps than for few.
    """
    launches = [[x for x in actor.launches if x.phase is not Phase.UPDATE] for actor in plan.actors]
    return [sorted(x.op for x in row) for row in launches]


def test_a_plan_is_as_long_for_many_steps_as_for_few():
    few, many = plan_of(3), plan_of(300)
    assert ops_by_actor(few) == ops_by_actor(many)
    assert sum(map(len, ops_by_actor(few))) > 10
    assert [len(inner.launches) for inner in sub_plans(few)] == [
        len(inner.launches) for inner in sub_plans(many)
    ]


def test_a_plan_comes_back_from_its_file_with_its_bodies(tmp_path):
    plan = plan_of(3)
    plan.save(tmp_path / "a.plan")
    again = Plan.load(tmp_path / "a.plan")
    assert again == plan
    assert len([*sub_plans(again)]) == 2
    text = "\n".join(print_plan(again))
    assert "each step, in a frame of" in text


def test_a_body_of_a_file_is_held_against_the_same_rules():
    plan = plan_of(3)
    (inner, *_) = sub_plans(plan)
    number = str(len(inner.operands) - 1).encode()
    name = b"\xa1" + number
    data = plan.to_bytes()
    assert name in data
    with pytest.raises(PlanFormatError):
        Plan.from_bytes(data.replace(name, b"\xa1" + b"z"))


def test_a_frame_holds_what_does_not_lie_outside_and_nothing_twice():
    for inner in sub_plans(plan_of(3)):
        frame, plan = frame_of(inner.plan), inner.plan
        own = [r for r, o in zip(plan.registers, frame.offsets_bytes, strict=True) if o >= 0]
        assert {r.name for r in plan.registers} - {r.name for r in own} == {
            v.name for v in plan.variables
        }
        check_no_overlap(
            [frame.offsets_bytes[r.id] for r in own],
            [r.interval[0] for r in own],
            [r.interval[1] for r in own],
            [r.size_bytes for r in own],
            frame.size_bytes,
            alignment=plan.arenas[0].alignment,
        )
