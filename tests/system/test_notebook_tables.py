"""What a notebook shows of a job and what belongs to it."""

import numpy as np

import actorflow as af
from actorflow import nn


class Net(nn.Module):
    def __init__(self):
        self.layer = nn.Linear(4, 2)

    def __call__(self, x):
        return self.layer(x)


def job(**options):
    def function(model, batch):
        loss = af.square(model(batch["<b>"])).mean()
        return {"loss": loss, "<i>": loss * 2}

    function.__name__ = function.__qualname__ = "step"
    return af.job(optimizer=af.optim.SGD(0.1), **options)(function)


def source(rows=8):
    return af.data.ArraySource({"<b>": np.ones((rows, 4), np.float32)}, batch=2)


def shown(value):
    """Return the table that a notebook asks for; no name in it is markup."""
    text = value._repr_html_()
    assert text.startswith("<table><caption>")
    assert not {"<b>", "<i>"} & {text[at : at + 3] for at in range(len(text))}
    return text


def test_a_job_its_plan_and_its_graph_are_tables():
    train = job(seed=3)
    assert "<th>seed</th><td>3</td>" in shown(train)
    assert "test_notebook_tables.py:" in shown(train)
    plan = train.compile(Net(), source())
    assert f"<td>{plan.arenas[0].size_bytes:,} bytes</td>" in shown(plan)
    graph = train.graph(Net(), source())
    assert f"<th>nodes</th><td>{len(graph.nodes)}</td>" in shown(graph)
    assert "<th>loss</th><td>float32[]</td>" in shown(graph)


def test_the_result_of_a_run_says_what_is_a_mean_and_what_is_of_the_last_step():
    result = job().fit(Net(), source(), steps=4, progress=False)
    text = shown(result)
    assert f"<th>loss (last step)</th><td>{result.metrics['loss']}</td>" in text
    assert f"<th>loss (mean of 4 steps)</th><td>{result.mean_loss}</td>" in text
    assert "<th>steps</th><td>0 to 4</td>" in text


def test_sources_are_tables_of_what_a_batch_has():
    row = "<th>&lt;b&gt;</th><td>float32[2, 4]</td>"
    assert row in shown(source())
    assert row in shown(
        af.data.from_iterable([{"<b>": np.ones((2, 4), np.float32)}] * 2, spec=source().spec())
    )
    pipeline = af.data.from_arrays({"<b>": np.ones((8, 4), np.float32)}).batch(2)
    assert "8 samples, batches of 2" in shown(pipeline)
    pipeline.spec()
    assert row in shown(pipeline)
    tokens = af.data.Tokens(np.arange(100) % 50, seq=4, batch=2)
    assert "<th>x</th><td>int32[2, 4]</td>" in shown(tokens)
