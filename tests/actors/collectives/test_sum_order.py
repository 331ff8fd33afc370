"""The order of sums: one tree for every placement, checked as texts without a rank."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.collectives.segments import AS_SUM, END, JOIN
from actors.collectives.sum_order import partial_steps, subtrees, sum_steps, total_steps


def text(steps, names):
    """Return the sum that steps make of named operands, with all its brackets."""
    stack = []
    *steps, last = steps
    assert last == END
    for step in steps:
        if step == JOIN:
            right = stack.pop()
            stack.append(f"({stack.pop()}+{right})")
        else:
            stack.append(names[step & (AS_SUM - 1)])
    (left,) = stack
    return left


@pytest.mark.parametrize(
    ("count", "wanted"),
    [
        (1, "0"),
        (2, "(0+1)"),
        (3, "((0+1)+2)"),
        (4, "((0+1)+(2+3))"),
        (5, "(((0+1)+(2+3))+4)"),
        (7, "(((0+1)+(2+3))+((4+5)+6))"),
    ],
)
def test_the_left_part_of_a_sum_has_the_largest_power_of_two(count, wanted):
    assert text(sum_steps(count), "0123456") == wanted


def test_a_tree_is_no_deeper_than_the_stack_of_its_blocks():
    depth = most = 0
    for step in sum_steps(1 << 16):
        depth += 1 if step >= 0 else -1
        most = max(most, depth)
    assert most == 17


@given(st.lists(st.integers(0, 3), min_size=1, max_size=20))
def test_sums_of_hosts_make_the_sum_of_one_host(hosts):
    """Wherever the places are: each host adds what it has whole, and any of them adds the rest."""
    places = range(len(hosts))
    whole = text(sum_steps(len(hosts)), [str(place) for place in places])
    parts = subtrees(hosts)
    assert [place for part in parts for place in part] == [*places]
    for own in set(hosts):
        members = [place for place in places if hosts[place] == own]
        sources = [members.index(place) if place in members else -1 for place in places]
        foreign = []
        for part in [part for part in parts if hosts[part.start] != own]:
            there = [place for place in places if hosts[place] == hosts[part.start]]
            numbers = [there.index(place) if place in there else -1 for place in places]
            foreign.append(text(partial_steps(part, numbers), [str(place) for place in there]))
        names = [*[str(place) for place in members], *foreign]
        assert text(total_steps(hosts, own, sources, len(members)), names) == whole


def test_aligned_hosts_send_one_sum_each():
    assert subtrees("aabb") == [range(2), range(2, 4)]
    assert subtrees("aaab") == [range(2), range(2, 3), range(3, 4)]
    assert subtrees("abba") == [range(1), range(1, 2), range(2, 3), range(3, 4)]
