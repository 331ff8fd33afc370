import numpy as np
import pytest
from emulated_run import execute

from actors.kernels.cuda.embedding import KEY, ONLY_TILE, TILE, sort_calls, sort_pieces
from actors.testing.emulated import kernels

SEEDS = (0, 1)


@pytest.fixture(scope="module")
def sort(native_toolchain):
    """Return a function that sorts keys on the emulated device: keys, and where each was."""

    def run(keys, largest, seed):
        pieces = [
            np.full(max(piece.size_bytes, 4), 0xFF, np.uint8) for piece in sort_pieces(keys.size)
        ]
        memory = [piece.view(KEY) for piece in pieces]
        memory[0][: keys.size] = keys
        addresses = tuple([piece.ctypes.data for piece in memory])
        calls, at, places = sort_calls(addresses, keys.size, largest)
        kernels.load([call.text for call in calls], native_toolchain)
        execute(calls, seed, np.zeros(7, np.int64))
        found = [memory[addresses.index(address)][: keys.size] for address in (at, places)]
        return found[0].copy(), found[1].copy()

    return run


@pytest.mark.parametrize("largest", [0, 1, 255, 256, 70_000, (1 << 32) - 1])
@pytest.mark.parametrize("num", [1, 31, TILE - 1, TILE, ONLY_TILE, ONLY_TILE + 1, 3 * TILE + 5])
def test_keys_come_out_in_order_and_equal_ones_as_they_came(num, largest, sort):
    rng = np.random.default_rng(num)
    keys = rng.integers(0, largest + 1, num).astype(KEY)
    keys[rng.random(num) < 0.5] = largest
    want = np.argsort(keys, kind="stable")
    for seed in SEEDS:
        ordered, places = sort(keys, largest, seed)
        np.testing.assert_array_equal(places, want)
        np.testing.assert_array_equal(ordered, keys[want])


@pytest.mark.parametrize("kind", ["equal", "sorted", "reversed"])
def test_keys_of_one_kind_are_sorted_over_many_segments_of_tiles(kind, sort):
    num = 33 * TILE + 7
    keys = {"equal": np.full(num, 9), "sorted": np.arange(num), "reversed": np.arange(num)[::-1]}
    ordered, places = sort(keys[kind].astype(KEY), num, 0)
    np.testing.assert_array_equal(places, np.argsort(keys[kind], kind="stable"))
    np.testing.assert_array_equal(ordered, np.sort(keys[kind]))
