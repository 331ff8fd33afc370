import sys
from pathlib import Path

import actorflow as af
from actorflow import nn
from compiler.contract.types import DType, TensorType

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))

from engines.flops import model_flops
from engines.launches import launch_table

X = {"x": TensorType(DType.FLOAT32, (4, 8))}
TEXT = {"x": TensorType(DType.FLOAT32, (2, 16, 8))}


class Two(nn.Module):
    def __init__(self):
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 3)

    def __call__(self, x):
        return self.down(af.relu(self.up(x)))


def mean(model, batch):
    return model(batch.x).mean()


def job_of(function=mean, **options):
    return af.job(function, **options)


def test_inference_counts_each_product_once():
    graph = job_of(train=False).graph(Two(), X)
    assert model_flops(graph) == 2 * 4 * (8 * 32 + 32 * 3)


def test_training_counts_gradients_but_not_that_of_the_data():
    graph = job_of(optimizer=af.optim.SGD(0.1)).graph(Two(), X)
    assert model_flops(graph) == 2 * 4 * (2 * 8 * 32 + 3 * 32 * 3)


def test_what_a_scan_computes_counts_at_each_step():
    def recurrent(model, batch):
        return model(batch.x)[0].mean()

    rows, steps, width, fan_in = 16, 2, 5, 8  # TEXT is [steps, rows, features]
    forward = 2 * rows * steps * 4 * width * (fan_in + width)
    graph = job_of(recurrent, train=False).graph(nn.LSTM(fan_in, width), TEXT)
    assert model_flops(graph) == forward
    graph = job_of(recurrent, optimizer=af.optim.SGD(0.1)).graph(nn.LSTM(fan_in, width), TEXT)
    # The gradient of the data is not needed; that of the states is.
    data = 2 * rows * steps * 4 * width * fan_in
    assert model_flops(graph) == 3 * forward - data


def test_products_of_causal_attention_count_half():
    found = []
    for causal in (False, True):
        block = nn.Attention(8, heads=2, causal=causal)
        found.append(model_flops(job_of(train=False).graph(block, TEXT)))
    scores_and_mix = 2 * (2 * 2 * 2 * 16 * 16 * 4)
    assert found[0] - found[1] == scores_and_mix / 2


def test_the_launches_of_a_plan_are_told_longest_first():
    plan = job_of(optimizer=af.optim.SGD(0.1)).compile(Two(), X)
    table = launch_table(plan)
    assert len(table) == sum(len(actor.launches) for actor in plan.actors)
    times = [row["us"] for row in table]
    assert times == sorted(times, reverse=True)
    assert max(row["gflops"] for row in table) > 0


def test_measured_times_take_the_place_of_estimates():
    plan = job_of(train=False).compile(Two(), X)
    count = sum(len(actor.launches) for actor in plan.actors)
    table = launch_table(plan, [1e6] * count)
    assert {row["us"] for row in table} == {1000.0}
