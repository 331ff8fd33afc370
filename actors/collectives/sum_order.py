"""The order in which the operands of a group are added, whatever hosts the ranks are on.

A sum over the places 0 .. P - 1 of a group is a binary tree: the left part of [begin, end) has the
largest power of two of places that is less than all, the right part has the rest. So a group of
aligned powers of two per host adds inside each host, and between the partial sums, what one host
would add; and where hosts hold other places, the ranks of a host add what lies below the nodes that
are whole inside it, and send those sums, or single operands, as they are.

Floating-point sums differ in their last bits by the order alone: a flat order, rank by rank, and
one in two levels differ in 30 to 46 % of the elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from actors.collectives.segments import AS_SUM, END, JOIN


def middle(begin: int, end: int) -> int:
    """Return where the right part of [begin, end) begins, of at least two places."""
    return begin + (1 << ((end - begin - 1).bit_length() - 1))


def sum_steps(num_places: int) -> tuple[int, ...]:
    """Return the sum over the operands of all places, as steps of `af_reduce` in meet.c."""
    return (*_steps(0, num_places, lambda place: (place,)), END)


def _steps(begin: int, end: int, leaf: Callable[[int], Sequence[int]]) -> Iterator[int]:
    if end - begin == 1:
        yield from leaf(begin)
        return
    mid = middle(begin, end)
    yield from _steps(begin, mid, leaf)
    yield from _steps(mid, end, leaf)
    yield JOIN


def subtrees(hosts: Sequence[object], begin: int = 0, end: int | None = None) -> list[range]:
    """Return the places below each node that is whole inside one host and whose parent is not.

    `hosts` are those of the places. They are in the order of places, and cover each once.
    """
    end = len(hosts) if end is None else end
    if all([hosts[place] == hosts[begin] for place in range(begin, end)]):
        return [range(begin, end)]
    mid = middle(begin, end)
    return [*subtrees(hosts, begin, mid), *subtrees(hosts, mid, end)]


def partial_steps(subtree: range, sources: Sequence[int]) -> tuple[int, ...]:
    """Return the sum below one node; `sources` are the numbers of the operands, by place."""
    return (*_steps(subtree.start, subtree.stop, lambda place: (sources[place],)), END)


def total_steps(
    hosts: Sequence[object], own: object, sources: Sequence[int], first_partial: int
) -> tuple[int, ...]:
    """Return the sum over all places on the host `own`, of its operands and sums of other hosts.

    The sums of other hosts, or single operands, are numbered from `first_partial`, in order.
    """
    # By the first place of each subtree of another host: its step, and the places it stands for.
    foreign = [part for part in subtrees(hosts) if hosts[part.start] != own]
    numbers = {part.start: (first_partial + n, part) for n, part in enumerate(foreign)}

    def walk(begin: int, end: int) -> Iterator[int]:
        number, part = numbers.get(begin, (0, range(0)))
        if part == range(begin, end):
            yield number | (AS_SUM if len(part) > 1 else 0)
        elif end - begin == 1:
            yield sources[begin]
        else:
            mid = middle(begin, end)
            yield from walk(begin, mid)
            yield from walk(mid, end)
            yield JOIN

    return (*walk(0, len(hosts)), END)
