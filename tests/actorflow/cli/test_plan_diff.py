"""What changed from one plan to another, against changes that are made one at a time."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actorflow.cli.plan_diff import compare


def edited(plan, name, edit):
    """Return a plan in which one actor is another."""
    return replace(plan, actors=tuple([edit(a) if a.name == name else a for a in plan.actors]))


def found(before, after, step_ns=(1.0, 1.0)):
    changes = compare(before, after, step_ns).changes
    return {(change.what, change.mark) for change in changes}, changes


def test_a_plan_and_itself_have_no_difference(training_plan):
    diff = compare(training_plan, replace(training_plan), (1.0, 1.0))
    assert (diff.is_equal, diff.changes) == (True, ())
    assert diff.lines()[0].startswith("no difference: plan 'train'")


def test_what_differs_elsewhere_alone_is_no_equality(training_plan):
    moved = replace(training_plan, sources=tuple(
        [replace(line, line=line.line + 1) for line in training_plan.sources]))  # fmt: skip
    diff = compare(training_plan, moved, (1.0, 1.0))
    assert not diff.is_equal
    assert "source lines differ" in diff.lines()[1]


def test_a_step_and_an_arena_tell_by_how_much_they_changed(training_plan):
    accounts = tuple([replace(m, peak_bytes=m.peak_bytes * 2) for m in training_plan.memory])
    marks, _ = found(training_plan, larger := replace(training_plan, memory=accounts), (2e6, 1e6))
    assert marks == {("step", "changed"), ("arena", "changed")}
    text = "\n".join(compare(training_plan, larger, (2e6, 1e6)).lines())
    assert "takes 2.000 ms -> 1.000 ms (-50.0%)" in text
    assert "(+100.0%)" in text


def test_slots_and_bytes_of_a_register_are_told_with_its_number(training_plan):
    registers = [
        replace(r, num_slots=r.num_slots + 1, size_bytes=4096) if r.name == "batch" else r
        for r in training_plan.registers
    ]
    marks, changes = found(training_plan, replace(training_plan, registers=tuple(registers)))
    assert marks == {("register", "changed")}
    assert [training_plan.registers[c.index].name for c in changes] == ["batch"]
    assert "slots" in changes[0].text
    assert "-> 4.0 KiB" in changes[0].text


@given(places=st.sets(st.integers(0, 999), max_size=6))
def test_launches_that_are_left_out_are_what_is_removed_and_the_reverse_is_added(
    training_plan, places
):
    step = next(a for a in training_plan.actors if a.name == "step")
    gone = {place % len(step.launches) for place in places}
    rest = tuple([x for i, x in enumerate(step.launches) if i not in gone])
    less = edited(training_plan, "step", lambda a: replace(a, launches=rest))
    removed = [c for c in compare(training_plan, less, (1, 1)).changes if c.what == "launch"]
    added = [c for c in compare(less, training_plan, (1, 1)).changes if c.what == "launch"]
    expected = sorted([f"step: {step.launches[i].label} ({step.launches[i].phase.value})"
                       for i in gone])  # fmt: skip
    assert {c.mark for c in removed} <= {"removed"}
    assert sorted([c.name for c in removed]) == expected
    assert {c.mark for c in added} <= {"added"}
    assert sorted([c.name for c in added]) == expected
    launches = [x for actor in training_plan.actors for x in actor.launches]
    for change in added:
        assert launches[change.index].label in change.name


def test_another_kernel_changes_its_launch_and_the_counts_of_kernels(training_plan):
    def other_kernel(actor):
        first = replace(actor.launches[0], kernel="mine.kernel")
        return replace(actor, launches=(first, *actor.launches[1:]))

    marks, changes = found(training_plan, edited(training_plan, "step", other_kernel))
    assert {("launch", "changed"), ("kernel", "added")} <= marks
    assert {what for what, _ in marks} == {"launch", "kernel"}
    assert "-> mine.kernel" in next(c.text for c in changes if c.what == "launch")


@pytest.mark.parametrize(("is_full", "count"), [(False, 8), (True, 20)])
def test_of_many_changes_the_first_are_told_unless_all_are_wanted(training_plan, is_full, count):
    options = tuple([(f"name{i}", "\x1b[2J") for i in range(20)])
    diff = compare(training_plan, replace(training_plan, options=training_plan.options + options),
                   (1, 1))  # fmt: skip
    lines = diff.lines(is_full=is_full)
    assert len([line for line in lines if line.startswith("  + ")]) == count
    assert any(["12 others" in line for line in lines]) != is_full
    assert "\x1b" not in "".join(lines)
