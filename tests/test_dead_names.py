"""What is defined is used: nothing in the product is there for tests alone.

A name counts as used where any module of the product says it: as a name, an attribute, an import, a
keyword or a whole text. That finds less than all, and is never wrong about what it finds.
"""

import ast
from collections import Counter
from pathlib import Path

import pytest

HOUSE = Path(__file__).resolve().parents[1]
WINGS = ("actorflow", "actors", "compiler", "memory")

UNUSED = {
    "actorflow/cli/serve.py:log_message": "http.server calls it",
    "actorflow/cli/serve.py:send_error": "http.server calls it",
    "compiler/contract/old_names.py:create_module": "the import system calls it",
    "actorflow/data/pipeline.py:on_error": "users call it",
    "actorflow/data/pipeline.py:worker_pids": "users call it",
    "actorflow/data/tokens.py:batches_per_epoch": "users call it",
    "actorflow/nn/adapters.py:merge": "users call it",
    "actorflow/jobs/job.py:eager_step": "users call it",
    "actorflow/jobs/job.py:predictor": "users call it",
    "actorflow/nn/module.py:named_buffers": "users call it",
    "actorflow/nn/transformer.py:generate_square_subsequent_mask": "users call it",
    "actorflow/environment/settings.py:environment_table": "the README is generated from it",
    "actors/machine/transitions.py:transition_table": "docs/actors.md is generated from it",
    "actors/machine/transitions.py:state_diagram": "docs/actors.md is generated from it",
    "actors/kernels/library/launch.py:timed": "benchmarks time launches of a chain with it",
    "compiler/ops/families/embedding.py:EMBEDDING_SGD_UPDATE": "registered where it is defined",
    "compiler/pipeline/standard_ops.py:FAMILIES": "modules are named there that register ops",
}
"""What the product does not use itself, and why it is there."""

DEVICES_TO_RUN_ON = ("actors/testing/simulated.py", "actors/testing/emulated/")
"""Files of `actors/testing` that jobs run on, where a user asks for `sim` or an emulated GPU."""


def trees(*wings):
    for wing in wings:
        for path in sorted((HOUSE / wing).rglob("*.py")):
            yield str(path.relative_to(HOUSE)), ast.parse(path.read_bytes())


def said(tree):
    """Yield every name that a module says, other than by defining it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.alias):
            yield node.name.rpartition(".")[2]
        elif isinstance(node, ast.keyword) and node.arg:
            yield node.arg
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def defined(body, *, is_class=False):
    """Yield functions, classes, methods and constants; but for what a decorator registers."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield node.name
            yield from defined(node.body, is_class=True)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if not (node.decorator_list and node.name.startswith("_")):
                yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign) and not is_class:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from [target.id for target in targets if isinstance(target, ast.Name)]


def is_pythons(name):
    """Whether Python or IPython calls it by this name: `__len__`, `_repr_html_`."""
    return name.startswith("_") and name.endswith("_")


@pytest.fixture(scope="module")
def unused():
    uses, names = Counter(), []
    for file, tree in trees(*WINGS):
        uses.update(said(tree))
        names += [(file, name) for name in defined(tree.body) if not is_pythons(name)]
    return {f"{file}:{name}" for file, name in names if not uses[name]}


def test_what_is_defined_is_used_or_there_for_a_reason(unused):
    assert sorted(unused - set(UNUSED)) == []


def test_a_reason_that_is_needed_no_more_is_taken_off_the_list(unused):
    assert sorted(set(UNUSED) - unused) == []


def test_nothing_of_devices_is_there_for_tests_or_proofs_alone():
    used = Counter()
    for file, tree in trees(*WINGS):
        if not file.startswith("actors/testing/") or file.startswith(DEVICES_TO_RUN_ON):
            used.update(said(tree))
    found = [
        f"{file}:{name}"
        for file, tree in trees("actors/device")
        for name in defined(tree.body)
        if not used[name] and not is_pythons(name)
    ]
    assert found == []
