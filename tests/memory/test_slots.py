from hypothesis import given
from hypothesis import strategies as st

from memory.registers import RateEdge, choose_slots, play_period, repetition_vector


def choose(consume=1, producer_ns=10.0, consumer_ns=10.0, **options):
    given_options = {"size_bytes": 1, "budget_bytes": 1 << 30, "most": 16}
    return choose_slots(consume, producer_ns, consumer_ns, **(given_options | options))


def test_slots_are_doubled_so_that_both_ends_overlap():
    assert choose(names=("io", "compute")) == (2, "2: io overlaps compute")
    assert choose(4)[0] == 8


def test_latency_keeps_more_slots_under_way_in_powers_of_two_up_to_a_limit():
    reason = "4: producer overlaps consumer, latency keeps that many under way"
    assert choose(latency_ns=25.0) == (4, reason)  # (10 + 25 + 10) / 10, rounded up, and down
    assert choose(4, latency_ns=100.0)[0] == 12  # no power of two where several are read
    assert choose(latency_ns=1e6)[0] == 16
    assert choose(12, latency_ns=1e6)[0] == 24


def test_a_free_pair_of_actors_still_gets_two_slots():
    assert choose(producer_ns=0.0, consumer_ns=0.0, size_bytes=0)[0] == 2


def test_a_tight_budget_gives_up_the_overlap_and_says_so():
    count, reason = choose(size_bytes=800 << 20, budget_bytes=1 << 30)
    assert count == 1
    assert reason == "1: no overlap, the budget of 1.0 GiB holds no more than 1"
    reason = "7: less overlap, the budget of 7 B holds no more than 7"
    assert choose(4, budget_bytes=7) == (7, reason)


@given(
    st.integers(1, 6),
    st.floats(0, 1e9),
    st.floats(0, 1e9),
    st.integers(0, 50),
    st.integers(0, 2000),
)
def test_slots_stay_within_the_budget_and_always_complete_a_period(
    consume, producer_ns, consumer_ns, size_bytes, budget_bytes
):
    count, reason = choose(
        consume, producer_ns, consumer_ns, size_bytes=size_bytes, budget_bytes=budget_bytes
    )
    assert count * size_bytes <= max(budget_bytes, consume * size_bytes)
    assert reason.startswith(f"{count}: ")
    edges = [RateEdge(0, 1, 1, consume, count)]
    assert play_period(2, edges, repetition_vector(2, edges)) is None
