"""The text of stages: blocks, words of operands, and functions that C and CUDA have in common."""

from __future__ import annotations

import re

import pytest
from fused_programs import Builder, known
from program_texts import texts_of

from actors.kernels.native.emit import emit
from actors.kernels.program import values as words
from actors.kernels.program.stages import block
from compiler.contract.program import Kind

STAGE = re.compile(
    r"^(?:static void|static inline void|AF_FUNCTION void) NAME_(get_scalars|row\d+|end)"
    r"\(([^)]*)\) \{\n(.*?)^\}",
    re.MULTILINE | re.DOTALL,
)


def test_a_block_moves_all_but_directives_to_the_right():
    loop = ["#pragma omp simd", *block("for (;;)", ["f();"], ["g();"])]
    assert block("void f(\n        int x)", loop) == [
        "void f(",
        "        int x) {",
        "#pragma omp simd",
        "    for (;;) {",
        "        f();",
        "    } else {",
        "        g();",
        "    }",
        "}",
    ]
    assert block("", []) == ["{", "}"]


def test_operands_have_their_words_where_texts_read_them():
    b = Builder()
    x, y = b.input(), b.input(Kind.ROW, every=3, count=5)
    program = b.program(b.op("add", x, y))
    block_words = [0] * words.operand(0) + words.operand_words(program, (8, 16, 24), (7, 1, 9), 40)
    for position, expected in enumerate([(8, 7, 1, 40), (16, 1, 3, 5), (24, 9, 1, 40)]):
        places = (words.POINTER, words.STRIDE, words.EVERY, words.COUNT)
        assert tuple([block_words[words.operand(position, w)] for w in places]) == expected


def stages_of(text, own_name):
    """Return parameters and body of each stage, without the thread that reports an index."""
    stages = STAGE.findall(text.replace(own_name, "NAME"))
    reporter = r",? *(?:_Bool |\(void\))is_first"
    return {name: re.sub(reporter, "", parameters + body) for name, parameters, body in stages}


@pytest.mark.parametrize("name", sorted(known(4, 8)))
def test_stages_are_the_same_in_c_and_in_cuda(name):
    program = known(4, 8)[name]
    function = emit(program, numbers=())  # a text of CUDA has all numbers in it
    in_c = stages_of(function.text, function.name)
    assert {"get_scalars", "row0", "row1", "end"} <= set(in_c)
    for text in texts_of(program, is_cut=False):
        in_cuda = stages_of(text.text, text.kernels[0].rpartition("_")[0])
        if "check_index" not in [i.op for i in program.instructions]:
            assert in_cuda == in_c
        assert set(in_cuda) == set(in_c)
