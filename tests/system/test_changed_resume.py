"""Runs that go on from a checkpoint with other data or another seed, because somebody says so."""

import logging

import numpy as np
import pytest
from error_texts import raises
from rank_threads import RankThreads

import actorflow as af
from actorflow import nn
from actorflow.checkpoint.errors import CheckpointUnfit
from actorflow.distributed.process_group import ProcessGroup, check_same_steps
from compiler.contract.errors import CompileError

ROWS = {"x": np.arange(64, dtype=np.float32)[:, None], "row": np.arange(64)}


class Noisy(nn.Module):
    def __init__(self, width=4):
        self.up, self.out = nn.Linear(1, width), nn.Linear(width, 1)

    def __call__(self, x):
        return self.out(af.dropout(self.up(x / 64), 0.5))


def source(batch=8, rows=64):
    whole = {name: np.resize(array, (rows, *array.shape[1:])) for name, array in ROWS.items()}
    return af.data.ArraySource(whole, batch=batch, shuffle=False)


@pytest.fixture
def fit(tmp_path, caplog):
    """Train in one directory; return the result, the first rows of all batches, the lines."""

    @af.job(optimizer=af.optim.Adam(1e-2))
    def train(model, batch):
        return {"loss": af.square(model(batch.x)).mean(), "row": batch.row[0]}

    def run(steps, data, model=None, **options):
        rows, model = [], model or Noisy()
        caplog.clear()
        with caplog.at_level(logging.WARNING, "actorflow"):
            result = train.fit(
                model, data, steps=steps, checkpoint=tmp_path / "run", progress=False,
                on_step=lambda step, outputs: rows.append(outputs["row"]), **options,
            )  # fmt: skip
        lines = [line for line in caplog.messages if "continues" in line]
        return result, rows, lines

    return run


def test_another_batch_goes_on_after_the_samples_that_were_seen(fit):
    first, rows, lines = fit(5, source())
    assert rows == [0, 8, 16, 24, 32]
    assert lines == []
    with raises(af.DataError):
        fit(7, source(16))
    second, rows, lines = fit(7, source(16), resume="changed")
    assert (second.first_step, rows) == (5, [32, 48])  # 40 samples are 2.5 batches
    assert lines == [
        "the checkpoint of step 5 continues: the data is another (batch=16 and not batch=8) and"
        " goes on after 2 batches of 16, for 40 samples were seen"
    ]
    # Adam's moments were taken over: they are not those of two steps alone.
    third, _, lines = fit(7, source(16))
    assert lines == []
    assert (third.first_step, second.last_step) == (7, 7)
    moment = [name for name in first.variables if "up.weight" in name and name != "up.weight"]
    assert len(moment) == 2
    for name in ("up.weight", *moment):
        assert (second.variables[name] != first.variables[name]).any()
        np.testing.assert_array_equal(third.variables[name], second.variables[name])


def test_more_data_goes_on_where_the_run_was(fit):
    fit(4, source())
    _, rows, (line,) = fit(6, source(rows=80), resume="changed")
    assert rows == [32, 40]
    assert "goes on after 4 batches of 8" in line


def test_another_kind_of_source_begins_where_it_stands(fit):
    fit(4, source())
    again = af.data.from_iterable(lambda: (next(one) for one in [source()] for _ in range(6)))
    _, rows, (line,) = fit(6, again, resume="changed")
    assert rows == [0, 8]
    assert line.endswith("begins where the source stands")


def test_another_seed_draws_other_numbers(fit):
    fit(3, source(), seed=1)
    with raises(CompileError):
        fit(5, source(), seed=2)
    result, rows, lines = fit(5, source(), seed=2, resume="changed")
    assert rows == [24, 32]
    assert int(result.variables["seed"]) == 2
    assert lines == ["the checkpoint of step 3 continues: the seed is 2 and not 1"]


def test_what_has_not_changed_is_no_line_and_other_types_stay_refused(fit):
    fit(2, source())
    assert fit(3, source(), resume="changed")[1:] == ([16], [])
    with raises(CheckpointUnfit):
        fit(5, source(), Noisy(width=5), resume="changed")
    with raises(CompileError):
        fit(5, source(), resume="other")


def test_ranks_resume_in_one_way():
    ranks = RankThreads(2)

    def check(rank):
        with pytest.raises(CompileError, match="rank 1 has resume 'changed', rank 0 has 'same'"):
            check_same_steps(ProcessGroup(rank, ranks.gather(rank)), 3, ("same", "changed")[rank])

    ranks.run(check)
