import pytest
from graphs import made_up

from compiler.lowering.plan_builder import PlanBuilder, ValueVersions
from compiler.ops.families.arithmetic import EXP
from compiler.ops.primitives.shape import RESHAPE, TRANSPOSE
from compiler.ops.primitives.slicing import SLICE
from compiler.storage.storage import assign_storage


@pytest.fixture
def numbered(sketch):
    """Return the builder and the numbers of what has been sketched."""

    def make():
        graph, plan = sketch.b.freeze(), PlanBuilder(made_up("host"))
        return plan, ValueVersions(graph, assign_storage(graph), plan)

    return make


def rows(sketch, x, first, last):
    return sketch.b.emit_one(SLICE, x, starts=(first, 0), stops=(last, 6), steps=(1, 1))


def test_every_value_that_something_makes_has_a_number_of_its_own(sketch, numbered):
    x = sketch.input("x", (4, 6), "float32")
    y, z = sketch.b.emit_one(EXP, x), sketch.b.emit_one(EXP, x)
    _, versions = numbered()
    assert len({versions.of(v) for v in (x, y, z)}) == 3
    assert versions.read(y) == versions.of(y)


def test_what_shows_all_of_a_value_row_by_row_is_that_value(sketch, numbered):
    x = sketch.input("x", (4, 6), "float32")
    flat = sketch.b.emit_one(RESHAPE, x, shape=(24,))
    _, versions = numbered()
    assert versions.read(flat) == versions.of(x)


def test_what_shows_a_value_otherwise_is_a_part_and_the_same_window_the_same_part(sketch, numbered):
    x = sketch.input("x", (4, 6), "float32")
    top, middle, again = (rows(sketch, x, *w) for w in ((0, 2), (1, 3), (1, 3)))
    turned = sketch.b.emit_one(TRANSPOSE, x, perm=(1, 0))
    plan, versions = numbered()
    numbers = [versions.read(v) for v in (top, middle, again, turned)]
    assert max(numbers) < 0
    assert numbers[1] == numbers[2]
    assert len(set(numbers)) == 3
    assert plan.part(versions.of(x), 24, (24, 4)) == numbers[1]
    assert plan.part(versions.of(x), 0, (4, 24)) == numbers[3]


def test_a_part_of_a_part_is_one_of_the_value_itself(sketch, numbered):
    x = sketch.input("x", (4, 6), "float32")
    inner = sketch.b.emit_one(
        SLICE, rows(sketch, x, 1, 4), starts=(1, 2), stops=(3, 4), steps=(1, 1)
    )
    plan, versions = numbered()
    assert versions.read(inner) == plan.part(versions.of(x), 2 * 24 + 2 * 4, (24, 4))


def test_a_number_that_is_known_already_is_kept(sketch, numbered):
    w = sketch.variable("w", (4, 6), "float32")
    top = rows(sketch, w, 0, 2)
    plan, versions = numbered()
    taken = plan.version()
    versions.know(w, taken)
    assert versions.of(top) == taken
    assert plan.part(taken, 0, (24, 4)) == versions.read(top)
