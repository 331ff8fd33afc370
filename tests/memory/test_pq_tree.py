from itertools import permutations
from math import log

from hypothesis import given
from hypothesis import strategies as st

from memory.pq_tree import any_order, consecutive_sums, order, reduce, replace

NUMBER = 6

constraints = st.lists(
    st.sets(st.integers(0, NUMBER - 1), min_size=1).map(frozenset), min_size=1, max_size=5
)


def as_set(leaves):
    return sum(1 << i for i in leaves)


def is_together(row, leaves):
    places = [row.index(i) for i in leaves]
    return max(places) - min(places) == len(places) - 1


def allowed(sets):
    """All orders with these sets consecutive, by trying every permutation."""
    rows = permutations(range(NUMBER))
    return [row for row in rows if all(is_together(row, leaves) for leaves in sets)]


def tree_of(sets):
    tree = any_order(range(NUMBER))
    for leaves in sets:
        tree = tree and reduce(tree, as_set(leaves))
    return tree


@given(constraints)
def test_a_tree_exists_exactly_where_an_order_does_and_counts_them(sets):
    rows, tree = allowed(sets), tree_of(sets)
    assert (tree is None) == (not rows)
    if tree is not None:
        # Logarithms of each node are rounded to 1024ths.
        assert abs(tree.log_orders - 1024 * log(len(rows))) <= NUMBER


@given(constraints, st.permutations(range(NUMBER)))
def test_every_allowed_order_is_one_of_the_tree(sets, row):
    tree = tree_of(sets)
    place = {leaf: at for at, leaf in enumerate(row)}
    if tree is not None:
        assert all(is_together(order(tree, place), leaves) for leaves in sets)
        if all(is_together(row, leaves) for leaves in sets):
            assert order(tree, place) == list(row)


@given(constraints)
def test_the_sets_that_can_be_consecutive_are_those_of_some_allowed_order(sets):
    tree, rows = tree_of(sets), allowed(sets)
    weights = {i: 1 << i for i in range(0, NUMBER, 2)}
    if tree is not None:
        subsets = [{i for i in weights if bits >> i & 1} for bits in (1, 4, 5, 16, 17, 20, 21)]
        wanted = {
            as_set(leaves) for leaves in subsets if any(is_together(row, leaves) for row in rows)
        }
        assert consecutive_sums(tree, weights, 1000) == wanted


@given(constraints)
def test_consecutive_leaves_are_replaced_where_they_are(sets):
    tree = tree_of(sets)
    if tree is not None:
        after = replace(tree, as_set(sets[-1]), any_order([NUMBER, NUMBER + 1]))
        rest = [leaf for leaf in range(NUMBER) if leaf not in sets[-1]]
        assert after.leaves == as_set([*rest, NUMBER, NUMBER + 1])
        assert is_together(order(after, dict.fromkeys(range(8), 0)), [NUMBER, NUMBER + 1])
