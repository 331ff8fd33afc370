"""What of a data source's positions is kept, and what is not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actorflow.run.ports import Positions


@given(
    first=st.integers(0, 20),
    stride=st.integers(1, 7),
    in_flight=st.integers(1, 5),
    steps=st.integers(1, 80),
    data=st.data(),
)
def test_every_position_that_may_be_saved_is_there(first, stride, in_flight, steps, data):
    kept = Positions(first, {"at": first}, stride=stride, in_flight=in_flight)
    done = saved = first
    for batch in range(first + 1, first + steps + 1):
        kept.note(batch, {"at": batch})
        done = max(done, batch - in_flight)
        multiples = [m for m in range(saved + 1, done + 1) if m % stride == 0]
        if multiples and data.draw(st.booleans()):
            saved = data.draw(st.sampled_from(multiples))
            assert kept.after(saved) == {"at": saved}
    last = data.draw(st.integers(max(done, saved), first + steps))
    assert kept.after(last) == {"at": last}


@given(stride=st.integers(2, 50), in_flight=st.integers(1, 5))
def test_positions_of_steps_without_a_snapshot_do_not_pile_up(stride, in_flight):
    kept = Positions(0, {}, stride=stride, in_flight=in_flight)
    for batch in range(1, 2001):
        kept.note(batch, {})
        if batch % stride == 0:
            kept.forget_before(batch - stride)
        assert len(kept) <= in_flight + 4


def test_a_position_before_the_last_one_asked_for_is_gone():
    kept = Positions(0, {}, stride=1, in_flight=2)
    for batch in range(1, 6):
        kept.note(batch, {"at": batch})
    kept.after(4)
    with pytest.raises(KeyError):
        kept.after(3)
