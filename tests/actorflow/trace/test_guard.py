import types

import numpy as np
import pytest

from actorflow.trace.guard import Guard, array_digest


class Thing:
    def __init__(self):
        self.a, self.b = 1, 2.5


class Slotted:
    __slots__ = ("a",)


def held(**notes):
    guard = Guard()
    for name, arguments in notes.items():
        getattr(guard, name)(*arguments)
    return guard.close()


@pytest.mark.parametrize(
    "change",
    [
        lambda t: setattr(t, "a", True),
        lambda t: setattr(t, "c", 1),
        lambda t: delattr(t, "b"),
        lambda t: setattr(t, "__class__", types.new_class("Other")),
        lambda t: setattr(t, "__dict__", dict(vars(t))),
        lambda t: vars(t).update(b=vars(t).pop("a"), a=2.5),
        lambda t: vars(t).update({"c": vars(t).pop("b")}),
    ],
)
def test_a_changed_instance_is_noticed(change):
    thing = Thing()
    guard = held(instance=(thing, vars(thing)))
    assert guard.holds()
    change(thing)
    assert not guard.holds()


def test_an_attribute_that_moves_from_one_object_to_the_next_is_noticed():
    one, two = Thing(), Thing()
    vars(two).clear()
    guard = Guard()
    for thing in (one, two):
        guard.instance(thing, vars(thing))
    guard.close()
    two.b = vars(one).pop("b")
    assert not guard.holds()


def test_names_that_come_and_go_are_noticed():
    space = {"there": 1}
    guard = Guard()
    for name in ("there", "missing"):
        guard.lookup(space, name)
    assert guard.close().holds()
    space["other"] = 2
    assert guard.holds()
    space["missing"] = 3
    assert not guard.holds()
    del space["missing"], space["there"]
    assert not guard.holds()


def test_a_slot_that_is_emptied_and_a_cell_that_is_emptied_are_noticed():
    thing = Slotted()
    thing.a = 1
    guard = held(slot=(thing, "a"))
    del thing.a
    assert not guard.holds()
    cell = types.CellType(1)
    guard = held(cell=(cell,))
    assert guard.holds()
    del cell.cell_contents
    assert not guard.holds()


def test_what_raises_while_it_is_asked_does_not_hold():
    def raises():
        raise RuntimeError

    assert not held(content=(raises, "text")).holds()


@pytest.mark.parametrize(
    "array",
    [
        np.zeros(()),
        np.zeros((0, 3)),
        np.ones((4, 4))[:, ::2],
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.array([True, False]),
        np.array(["a", "b"]),
        np.zeros(2, dtype=[("a", "f4"), ("b", "i4")]),
    ],
)
def test_every_array_has_a_digest_of_its_content(array):
    assert array_digest(array) == array_digest(array.copy())
    if array.size:
        other = array.copy()
        other.reshape(-1).view(np.uint8)[0] ^= 1
        assert array_digest(other) != array_digest(array)
