import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from memory.packing import live_per_section, make_instance, stacks, sweep_outwards

buffers = st.lists(
    st.tuples(st.integers(0, 30), st.integers(1, 20), st.integers(1, 300)), min_size=1, max_size=40
)


def instance_of(rows):
    lower, length, size = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    return make_instance(lower, lower + length, size)


@given(buffers)
def test_a_sweep_outwards_is_a_packing_and_wastes_nothing_at_the_peak(rows):
    instance = instance_of(rows)
    peak = int(live_per_section(instance).argmax())
    for _, stack in stacks(instance):
        offsets = sweep_outwards(instance, stack, 1 << 60)
        ends = offsets + instance.size
        for i in range(ends.size):
            meets = (instance.lower < instance.upper[i]) & (instance.upper > instance.lower[i])
            meets[i] = False
            assert not (meets & (offsets < ends[i]) & (ends > offsets[i])).any()
        live = (instance.lower <= peak) & (instance.upper > peak)
        assert ends[live].max() == instance.bound


@given(buffers)
def test_a_sweep_that_reaches_the_limit_is_given_up(rows):
    instance = instance_of(rows)
    _, stack = stacks(instance)[0]
    top = int((sweep_outwards(instance, stack, 1 << 60) + instance.size).max())
    assert sweep_outwards(instance, stack, top) is None
    assert sweep_outwards(instance, stack, top + 1) is not None


def test_nested_lifetimes_of_a_training_graph_pack_without_a_gap():
    rng = np.random.default_rng(0)
    n = 200
    saved = [(i, 2 * (n - i), int(rng.integers(1, 1000))) for i in range(n)]
    gradients = [(2 * n - i - 1, 2, 1 + 7 * (i % 50)) for i in range(n)]
    instance = instance_of(saved + gradients)
    _, stack = stacks(instance)[0]
    offsets = sweep_outwards(instance, stack, 1 << 60)
    assert (offsets + instance.size).max() == instance.bound
