import pytest

from actorflow.cli import simulate
from actorflow.cli.simulate import cached_costs, costs_of, least_of
from actorflow.environment.settings import Settings
from actors.simulation.costs import RunCosts

COSTS = RunCosts(1.0, 2.0, 3.0, 4.0, 5.0)


def firing(name, number, begin_us, end_us):
    return {"ph": "X", "name": name, "ts": begin_us, "dur": end_us - begin_us,
            "args": {"firing": number}}  # fmt: skip


def test_a_trace_tells_turns_hops_and_ports():
    """Steps of 100 us with 7 us between them; a listener begins 12 us after each step."""
    events = [{"ph": "M", "name": "thread_name"}]
    for n in range(8):
        end = 107 * n + 100
        events += [
            firing("step", n, 107 * n, end),
            firing("metrics", n, end + 12, end + 32),
            firing("data", n, 107 * n, 107 * n + 30),
        ]
    costs = costs_of(events, 1000)
    assert costs == RunCosts(7e3, 5e3, 15e3, 20e3, 15.0)


def test_the_median_of_a_moment_counts():
    events = [firing("metrics", n, 0, took) for n, took in enumerate((1, 2, 9))]
    assert costs_of(events, 1000).sink_ns == 2e3


def test_of_some_runs_each_cost_is_the_least():
    assert least_of([COSTS, RunCosts(5.0, 1.0, 9.0, 9.0, 0.5)]) == RunCosts(1.0, 1.0, 3.0, 4.0, 0.5)


def test_a_trace_with_nothing_in_it_costs_nothing():
    assert costs_of([], 1000) == RunCosts()


@pytest.fixture
def measured(monkeypatch):
    calls = []
    monkeypatch.setattr(simulate, "measure_costs", lambda settings: calls.append(settings) or COSTS)
    return calls


def test_costs_are_measured_once_and_again_on_demand(tmp_path, measured):
    settings = Settings()
    for is_fresh, count in ((False, 1), (False, 1), (True, 2)):
        assert cached_costs(tmp_path, "here", settings, is_fresh=is_fresh) == COSTS
        assert len(measured) == count


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:20],
        lambda content: content.replace(b"1.0", b"9.0"),
        lambda content: b"",
    ],
)
def test_damaged_costs_are_measured_anew_with_a_line(tmp_path, measured, damage, caplog):
    cached_costs(tmp_path, "here", Settings(), is_fresh=False)
    (path,) = tmp_path.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    assert cached_costs(tmp_path, "here", Settings(), is_fresh=False) == COSTS
    assert len(measured) == 2
    assert f"{path} is damaged" in caplog.text
    assert "what a run costs is measured anew" in caplog.text


@pytest.mark.parametrize("values", [{"turn_ns": 1.0}, {"turn_ns": "fast"}, {}])
def test_a_sealed_file_that_holds_no_costs_is_damaged(tmp_path, measured, values, caplog):
    simulate.replace_object(tmp_path / "run-costs-here.json", values)
    assert cached_costs(tmp_path, "here", Settings(), is_fresh=False) == COSTS
    assert "these are no costs" in caplog.text
