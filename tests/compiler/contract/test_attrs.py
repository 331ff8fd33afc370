import pytest
from error_texts import raises

from compiler.contract.attrs import Attrs


@pytest.mark.parametrize(("one", "other"), [(0.0, -0.0), (1, 1.0), (1, True)])
def test_attributes_whose_numbers_differ_in_bits_are_two(one, other):
    assert Attrs({"scale": one}) != Attrs({"scale": other})
    assert len({Attrs({"scale": number}) for number in (one, other, one, other)}) == 2


def test_the_order_in_which_attributes_are_given_does_not_matter():
    assert Attrs({"a": 1, "b": (2.0, "c")}) == Attrs({"b": (2.0, "c"), "a": 1})


@pytest.mark.parametrize(
    ("read", "value"), [(Attrs.texts, ("a", 1)), (Attrs.shapes, ((2, -1),)), (Attrs.shapes, (2, 3))]
)
def test_an_attribute_of_another_kind_is_refused_by_name(read, value):
    with raises(TypeError):
        read(Attrs({"x": value}), "x")
