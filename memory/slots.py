"""How many slots an edge gets: from estimated durations, under a budget of bytes."""

from __future__ import annotations

from math import ceil

from memory.report import format_bytes


def choose_slots(
    consume: int,
    producer_ns: float,
    consumer_ns: float,
    *,
    size_bytes: int,
    budget_bytes: int,
    most: int,
    latency_ns: float = 0.0,
    names: tuple[str, str] = ("producer", "consumer"),
) -> tuple[int, str]:
    """Return the number of slots for an edge, and the reason in words: "2: io overlaps compute".

    One token is written per firing, `consume` are read. Double buffering: one set of tokens is
    written while the other is read. More where latency demands it: a slot is taken for
    producer_ns + latency_ns + consumer_ns and tokens pass once per period, that of the slower side,
    so ceil(time / period) of them are under way. A power of two where tokens are read one by one,
    so that slots of several edges come round together.

    Args:
        consume: tokens per firing of the consumer; with fewer slots it would never fire.
        producer_ns: duration of a firing of the producer.
        consumer_ns: duration of a firing of the consumer.
        size_bytes: bytes of one slot.
        budget_bytes: the most bytes that all slots may take, but for the first `consume`.
        most: slots at most, where they are for latency.
        latency_ns: from the end of a producer's firing until the consumer can read (a wire, a
            jitter).
        names: of the two ends, for the reason.
    """
    double = 2 * consume
    period_ns = max(producer_ns, consumer_ns / consume)
    under_way = ceil((producer_ns + latency_ns + consumer_ns) / period_ns) if period_ns > 0 else 0
    wanted = max(double, min(under_way, most))
    affordable = max(consume, budget_bytes // size_bytes) if size_bytes else wanted
    if consume == 1:
        wanted = _power_of_two(wanted)
        affordable = _power_of_two(affordable)
    count = min(wanted, affordable)
    if count < wanted:
        effect = "no overlap" if count == consume else "less overlap"
        budget = format_bytes(budget_bytes)
        return count, f"{count}: {effect}, the budget of {budget} holds no more than {count}"
    why = ", latency keeps that many under way" if wanted > double else ""
    return count, f"{count}: {names[0]} overlaps {names[1]}{why}"


def _power_of_two(count: int) -> int:
    """Round down to a power of two."""
    return 1 << count.bit_length() - 1
