"""PQ-trees: all orders of some leaves in which given sets of leaves are consecutive.

The children of a *P node* may stand in any order, those of a *Q node* in one order or its reverse
(Booth, Lueker 1976, "Testing for the consecutive ones property"). Trees are never changed, so that
many share their branches. A set of leaves is the bits of an integer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import lgamma

MOST_LEAVES = 300
"""A tree is at most as deep, and each level takes up to two calls, of which Python allows 1,000."""


_LOG_FACTORIAL = tuple([round(1024 * lgamma(number + 1)) for number in range(MOST_LEAVES + 1)])


class PQTree:
    """A leaf, a P node or, where `is_ordered`, a Q node.

    log_orders: 1024 times the logarithm of how many orders the tree allows, as an integer, which is
    equal on every machine.
    """

    __slots__ = ("children", "is_ordered", "leaves", "log_orders")

    def __init__(self, children: Sequence[PQTree], is_ordered: bool, leaves: int = 0) -> None:
        self.children, self.is_ordered, self.leaves = tuple(children), is_ordered, leaves
        self.log_orders = _LOG_FACTORIAL[2 if is_ordered else len(children)]
        for child in children:
            self.leaves |= child.leaves
            self.log_orders += child.log_orders


def any_order(leaves: Iterable[int]) -> PQTree:
    """Return all orders of at least one leaf."""
    return _join([PQTree((), False, 1 << number) for number in leaves])


def _join(children: Sequence[PQTree], is_ordered: bool = False) -> PQTree:
    # A child alone stands for itself. Two have two orders, in a Q node as in a P node.
    return children[0] if len(children) == 1 else PQTree(children, is_ordered and len(children) > 2)


def reduce(tree: PQTree, full: int) -> PQTree | None:
    """Return the orders in which the leaves `full`, at least one, are consecutive; None for none.

    O(children of the nodes that hold leaves of both kinds).
    """
    if tree.leaves & full == tree.leaves:
        return tree
    children = tree.children
    touched = [i for i, child in enumerate(children) if child.leaves & full]
    first, last = touched[0], touched[-1]
    if first == last:
        inner = reduce(children[first], full)
        if inner is None:
            return None
        return _join((*children[:first], inner, *children[first + 1 :]), tree.is_ordered)
    if tree.is_ordered:
        inside = children[first + 1 : last]
        left, right = _full_last(children[first], full), _full_last(children[last], full)
        if left is None or right is None or any([child.leaves & ~full for child in inside]):
            return None
        run = (*left, *inside, *reversed(right))
        return _join((*children[:first], *run, *children[last + 1 :]), is_ordered=True)
    empty, partial, filled = _by_state(children, full)
    # A partial child on each side, with its full leaves towards the middle.
    sides = [_full_last(child, full) for child in partial]
    if len(sides) > 2 or None in sides:
        return None
    left, right = (*[side for side in sides if side], (), ())[:2]
    run = (*left, *_together(filled), *reversed(right))
    return _join((*empty, _join(run, is_ordered=True)))


def _full_last(tree: PQTree, full: int) -> tuple[PQTree, ...] | None:
    """Return the children of a Q node in place of a tree: without full leaves first, then full."""
    if tree.leaves & full == tree.leaves:
        return (tree,)
    empty, partial, filled = _by_state(tree.children, full)
    middle = _full_last(partial[0], full) if partial else ()
    if middle is None or len(partial) > 1:
        return None
    if not tree.is_ordered:
        return (*_together(empty), *middle, *_together(filled))
    # A Q node has one order and its reverse: one of them must have this form already.
    for children in (tree.children, tree.children[::-1]):
        if children == (*empty, *partial, *filled):
            return (*empty, *middle, *filled)
        empty, filled = empty[::-1], filled[::-1]
    return None


def _by_state(children: Sequence[PQTree], full: int) -> list[tuple[PQTree, ...]]:
    """Return the children that have no full leaf, some, and full leaves only."""
    states: list[list[PQTree]] = [[], [], []]
    for child in children:
        inside = child.leaves & full
        states[(inside != 0) + (inside == child.leaves)].append(child)
    return [tuple(some) for some in states]


def _together(children: tuple[PQTree, ...]) -> tuple[PQTree, ...]:
    return (_join(children),) if children else ()


def replace(tree: PQTree, consecutive: int, part: PQTree) -> PQTree:
    """Put `part` in place of leaves that `reduce` has made consecutive."""
    if tree.leaves & consecutive == tree.leaves:
        return part
    children, pending = [], [part]
    for child in tree.children:
        if not child.leaves & consecutive:
            children.append(child)
        elif pending:
            # Of a run of children the first is replaced, which may hold the leaves alone.
            children.append(replace(child, consecutive, pending.pop()))
    return _join(children, tree.is_ordered)


def order(tree: PQTree, place: Mapping[int, int] | Sequence[int]) -> list[int]:
    """Return the leaves in an order of the tree that agrees with their places.

    Such an order must exist. Leaves of the same place, which are consecutive, have any order.
    """
    if not tree.children:
        return [tree.leaves.bit_length() - 1]
    parts = [order(child, place) for child in tree.children]
    if not tree.is_ordered:
        parts.sort(key=lambda part: place[part[0]])
    elif place[parts[0][0]] > place[parts[-1][0]]:
        parts.reverse()
    return [number for part in parts for number in part]


def consecutive_sums(tree: PQTree, weights: Mapping[int, int], limit: int) -> set[int]:
    """Return the summed weights of sets of weighted leaves that can be made consecutive.

    Of all such sets, unless there are more than `limit` at one node.
    """
    whole, _, inside = _sums(tree, sum([1 << number for number in weights]), weights, limit)
    return (inside | {whole}) - {0}


def _sums(
    tree: PQTree, weighted: int, weights: Mapping[int, int], limit: int
) -> tuple[int, set[int], set[int]]:
    """Return the sum of all leaves, or 0; of proper sets at an end; of all consecutive ones."""
    if not tree.leaves & weighted:
        return 0, set(), set()
    if not tree.children:
        return weights[tree.leaves.bit_length() - 1], set(), set()
    parts = [_sums(child, weighted, weights, limit) for child in tree.children]
    wholes = [part[0] for part in parts]
    whole = sum(wholes) if all(wholes) else 0
    inside = set(wholes).union(*[part[2] for part in parts])
    at_end = set[int]()
    # Sums of whole children, and of proper sets at the ends of none, one and two others. In a Q
    # node those of runs, which have not begun, reach up to the last child, or ended before it.
    for some in (parts, parts[::-1])[: 1 + tree.is_ordered]:
        none, one, two = {0}, set[int](), set[int]()
        for added, ends, _ in some:
            if len(none) + len(one) + len(two) > limit:
                break
            both = {a + b for a in one for b in ends}
            if tree.is_ordered:
                two |= one | both
                one = ends | ({a + added for a in one | none} if added else set())
            else:
                two |= both | {a + added for a in two}
                one |= {a + added for a in one} | {a + b for a in none for b in ends}
                none |= {a + added for a in none}
        at_end |= none | one
        inside |= at_end | two
    return whole, at_end - {0, whole}, inside - {0, whole}
