"""An LSTM job: cut to a budget, in parts, resumed; and what a step of its loops runs."""

import numpy as np
from jobs import assert_same, losses_of_fit

import actorflow as af
from actorflow import nn
from compiler.contract.plan import sub_plans

STEPS, ROWS, VOCAB = 6, 4, 11


class Net(nn.Module):
    def __init__(self, dropout=0.2):
        self.emb, self.head = nn.Embedding(VOCAB, 6), nn.Linear(10, VOCAB)
        self.lstm = nn.LSTM(6, 5, 2, batch_first=True, dropout=dropout, bidirectional=True)

    def __call__(self, x, lengths):
        return self.head(self.lstm(self.emb(x), lengths=lengths)[0])


def job_of(**options):
    @af.job(**{"optimizer": af.optim.AdamW(1e-2), "seed": 3} | options)
    def train(model, batch):
        scores = model(batch.x, batch.x[:, 0] % STEPS + 1)
        return af.cross_entropy(scores.flatten(0, 1), batch.y.flatten())

    return train


def tokens(rows=ROWS):
    ids = np.random.default_rng(1).integers(0, VOCAB, 4_000)
    return af.data.Tokens(ids, seq=STEPS, batch=rows, seed=2)


def trained(job, steps=6, rows=ROWS, dropout=0.2, **options):
    model = Net(dropout)
    losses = losses_of_fit(job, model, tokens(rows), steps, **options)
    return losses, {name: p.data.copy() for name, p in model.named_parameters()}


def test_a_budget_changes_no_bit_and_a_run_that_was_cut_goes_on(tmp_path):
    job = job_of()
    losses, parameters = trained(job)
    least = job.compile(Net(), tokens()).memory[0].peak_bytes
    small, others = trained(job_of(memory_budget=least - 256))
    assert small == losses
    assert_same(parameters, others)
    folder = {"checkpoint": tmp_path / "run", "every": 3}
    losses_of_fit(job, Net(), tokens(), 3, **folder)
    rest, others = trained(job, **folder)
    assert rest == losses[3:]
    assert_same(parameters, others)


def test_batches_in_parts_are_one_batch():
    losses, _ = trained(job_of(accumulate=2), steps=3, rows=ROWS, dropout=0.0)
    expected, _ = trained(job_of(), steps=3, rows=2 * ROWS, dropout=0.0)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


def test_a_step_is_one_product_and_one_kernel_and_weights_have_theirs_after_the_loop():
    @af.job(optimizer=af.optim.SGD(0.1))
    def train(model, batch):
        return (model(batch.x)[0] ** 2.0).mean()

    data = af.data.ArraySource({"x": np.zeros((2 * STEPS, ROWS, 6), np.float32)}, batch=STEPS)
    plan = train.compile(nn.LSTM(6, 5), data)
    moves = ("copy", "carry")
    kinds = [[x.op for x in inner.launches if x.op not in moves] for inner in sub_plans(plan)]
    assert kinds == [["matmul", "fused"], ["fused", "matmul"]]
