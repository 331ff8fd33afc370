import pytest

from compiler.contract.plan_tables import launch_label


@pytest.mark.parametrize(
    ("op", "members", "scope", "label"),
    [
        ("matmul", None, "head", "head: matmul"),
        ("matmul", None, "", "matmul"),
        ("fused", ("gelu",), "blocks.0", "blocks.0: gelu"),
        ("fused", ("add", "sum"), "", "add + sum"),
        (
            "region",
            ("matmul", "add", "gelu"),
            "blocks.0.mlp.up",
            "blocks.0.mlp.up + add + gelu",
        ),
        ("region", ("matmul", "gelu"), "", "matmul + gelu"),
    ],
)
def test_a_launch_is_called_by_its_place_and_what_it_is_made_of(op, members, scope, label):
    attrs = {} if members is None else {"members": members}
    assert launch_label(op, attrs, scope) == label
