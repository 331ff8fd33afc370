import pytest

from compiler.ops.families.arithmetic import EXP, NEG
from compiler.ops.primitives.shape import RESHAPE
from compiler.storage.buffers import launch_times


@pytest.fixture
def times(sketch, fake_target):
    """Three launches of a microsecond, with a view between the first two."""
    x = sketch.input("x", (4,), "float32")
    a = sketch.b.emit_one(EXP, x)
    b = sketch.b.emit_one(NEG, sketch.b.emit_one(RESHAPE, a, shape=(2, 2)))
    c = sketch.b.emit_one(EXP, b)
    graph = sketch.b.freeze()
    made = launch_times(graph, fake_target, is_per_step=False)
    return made, (a, b, c)


def test_launches_run_one_after_the_other_and_views_take_no_time(times):
    made, values = times
    assert made.made == values
    assert made.ends_ns == (1000.0, 2000.0, 3000.0)
    assert [made.begin_ns[node] for node in made.nodes] == [0.0, 1000.0, 2000.0]
    assert [made.duration_ns(launch) for launch in range(3)] == [1000.0] * 3


@pytest.mark.parametrize(
    ("time_ns", "launch"), [(-1.0, None), (999.0, None), (1000.0, 0), (2999.0, 1), (9e9, 2)]
)
def test_the_last_launch_before_a_time_is_the_one_that_has_ended(times, time_ns, launch):
    made, values = times
    assert made.last_before(time_ns) == (None if launch is None else values[launch])


def test_what_runs_at_the_other_rate_is_left_out(sketch, fake_target):
    graph = sketch.b.freeze()
    made = launch_times(graph, fake_target, is_per_step=True)
    assert (made.nodes, made.last_before(1e9)) == ((), None)
