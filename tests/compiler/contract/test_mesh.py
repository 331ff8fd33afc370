from error_texts import raises

from compiler.contract.errors import CompileError
from compiler.contract.placement import Mesh

MESH = Mesh(("data", "model"), (2, 3))


def test_ranks_are_numbered_row_by_row():
    assert [MESH.coordinates(rank) for rank in range(6)] == [
        (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2),
    ]  # fmt: skip
    assert [MESH.rank(MESH.coordinates(rank)) for rank in range(6)] == list(range(6))


def test_who_meets_along_an_axis_differs_in_nothing_else():
    assert MESH.group(4, 0) == (1, 4)
    assert MESH.group(4, 1) == (3, 4, 5)


def test_a_rank_beyond_the_mesh_is_refused():
    with raises(ValueError):
        MESH.coordinates(6)


def test_an_axis_that_is_none_is_named_with_those_that_are():
    assert MESH.axis("model") == 1
    with raises(CompileError):
        MESH.axis("stage")


def test_a_mesh_is_told_by_its_axes():
    assert str(MESH) == "data=2 x model=3"
