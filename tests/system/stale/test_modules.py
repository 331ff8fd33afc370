"""Settings in other modules, however the code gets at them."""

import importlib
import sys

import numpy as np
import pytest

X = np.array([1.0, 2.0], np.float32)

MODEL = """
{above}
class Model(nn.Module):
    def __init__(self):
        self.w = ones()
    def __call__(self, x):
        {inside}
        return x * self.w * {by}
"""

OTHER = "BY = 2.0\nLIST = [2.0]\ndef by():\n    return BY\n"


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """Modules of the user's beside the program; returns the two with settings."""
    (tmp_path / "settings_of_demo.py").write_text(OTHER)
    (tmp_path / "package_of_demo").mkdir()
    (tmp_path / "package_of_demo" / "__init__.py").write_text("")
    (tmp_path / "package_of_demo" / "part.py").write_text(OTHER)
    monkeypatch.syspath_prepend(str(tmp_path))
    names = ("settings_of_demo", "package_of_demo", "package_of_demo.part")
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield [importlib.import_module(name) for name in names[::2]]
    for name in names:
        sys.modules.pop(name, None)


def change(modules):
    for module in modules:
        module.BY = module.LIST[0] = 3.0


@pytest.mark.parametrize(
    ("above", "inside", "by"),
    [
        ("import settings_of_demo", "pass", "settings_of_demo.BY"),
        ("import settings_of_demo as s", "pass", "s.BY"),
        ("import settings_of_demo", "pass", "settings_of_demo.by()"),
        ("import settings_of_demo", "pass", "settings_of_demo.LIST[0]"),
        ("from settings_of_demo import LIST", "pass", "LIST[0]"),
        ("from settings_of_demo import by", "pass", "by()"),
        ("import package_of_demo.part", "pass", "package_of_demo.part.BY"),
        ("from package_of_demo import part", "pass", "part.BY"),
        ("import settings_of_demo", "pass", "(lambda s: lambda: s.BY)(settings_of_demo)()"),
        ("import settings_of_demo", "self.s = settings_of_demo", "self.s.BY"),
        ("", "import settings_of_demo as s", "s.BY"),
        ("", "from settings_of_demo import BY", "BY"),
        ("", "from package_of_demo.part import BY", "BY"),
        ("", "from package_of_demo import part", "part.BY"),
    ],
)
def test_a_setting_in_another_module_is_traced_again(
    program, modules, outputs, said, above, inside, by
):
    demo = program(MODEL.format(above=above, inside=inside, by=by))
    before = demo.run.step(demo.model, {"x": X})["output"].tolist()
    change(modules)
    assert outputs(demo.run, demo.model) == [1.5 * value for value in before]
    (line,) = said()
    assert "changed from 2.0 to 3.0" in line
