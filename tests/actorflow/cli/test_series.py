"""Metrics as columns that are read on: equal to reading the whole file, whenever one looks."""

import json
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actorflow.cli.series import MetricSeries
from actorflow.run.report import read_metrics


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def line(step, **values):
    return json.dumps({"step": step, **values}) + "\n"


def seen(series):
    series.read_on()
    return {name: points.tolist() for name, points in series.items()}


def test_a_resumed_run_shows_the_last_value_of_a_step(path):
    values = [(1, 1.0), (2, 1.0), (3, 1.0), (2, 5.0)]
    path.write_text("".join([line(step, loss=loss) for step, loss in values]))
    assert seen(MetricSeries(path)) == {"loss": [[1.0, 1.0], [2.0, 5.0], [3.0, 1.0]]}


def test_what_is_new_is_added_and_a_line_without_an_end_waits_for_it(path):
    series = MetricSeries(path)
    path.write_text(line(1, loss=1.0) + line(2, loss=2.0)[:9])
    assert seen(series) == seen(series) == {"loss": [[1.0, 1.0]]}
    with path.open("a") as file:
        file.write(line(2, loss=2.0)[9:] + line(3, accuracy=0.5, elapsed_s=3.0, note="x"))
    assert seen(series) == {"loss": [[1.0, 1.0], [2.0, 2.0]], "accuracy": [[3.0, 0.5]]}


@pytest.mark.parametrize("way", ["replaced", "written anew", "cut", "gone"])
def test_another_file_of_the_name_is_read_from_its_beginning(path, way):
    series = MetricSeries(path)
    path.write_text("".join([line(step, loss=1.0) for step in range(9)]))
    series.read_on()
    if way == "replaced":
        other = path.with_name("other")
        other.write_text("".join([line(step, other=2.0) for step in range(30)]))
        os.replace(other, path)
    elif way == "written anew":
        path.write_text("".join([line(step, other=2.0) for step in range(30)]))
    elif way == "cut":
        path.write_text(line(0, other=2.0))
    else:
        path.unlink()
        with pytest.raises(FileNotFoundError):
            series.read_on()
        path.write_text(line(0, other=2.0))
    assert list(seen(series)) == ["other"]


VALUES = st.sampled_from([1, 2.5, -3, True, None, "nan", [1], {"step": 1}, 1e400])
NAMES = st.sampled_from(["step", "loss", "accuracy", "elapsed_s", "note"])


@given(st.lists(st.dictionaries(NAMES, VALUES), max_size=12))
def test_values_of_any_types_are_those_that_are_numbers(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("m") / "metrics.jsonl"
    path.write_text("".join([json.dumps(row) + "\n" for row in rows]).replace("Infinity", "1e400"))
    expected = {}
    for row in rows:
        if isinstance(row.get("step"), int | float):
            for name in row.keys() - {"step", "elapsed_s"}:
                if isinstance(row[name], int | float):
                    expected.setdefault(name, {})[float(row["step"])] = float(row[name])
    assert seen(MetricSeries(path)) == {
        name: [[step, value] for step, value in sorted(values.items())]
        for name, values in expected.items()
    }


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 40)), max_size=12), st.data())
def test_any_cut_of_the_file_gives_what_the_whole_gives(tmp_path_factory, rows, data):
    path = tmp_path_factory.mktemp("m") / "metrics.jsonl"
    content = "".join([line(step, loss=1.5 * value) for step, value in rows]) + "{bad\n[1]\n"
    cuts = sorted(data.draw(st.lists(st.integers(0, len(content)), max_size=3)))
    series = MetricSeries(path)
    for cut in [*cuts, len(content)]:
        path.write_text(content[:cut])
        series.read_on()
    expected = {row["step"]: row["loss"] for row in read_metrics(path)}
    points = [[float(step), value] for step, value in sorted(expected.items())]
    assert seen(series) == ({"loss": points} if points else {})


def test_a_line_longer_than_what_is_read_at_once_is_a_line(path):
    path.write_text(line(1, note="x" * (3 << 20), loss=4.0) + line(2, loss=5.0))
    assert seen(MetricSeries(path)) == {"loss": [[1.0, 4.0], [2.0, 5.0]]}


def test_neither_a_link_nor_a_pipe_is_read(path):
    path.symlink_to(path.with_name("elsewhere"))
    with pytest.raises(OSError, match="symbolic link"):
        MetricSeries(path).read_on()
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(OSError, match="regular file"):
        MetricSeries(path).read_on()
