"""Globals, helpers and closed-over variables that change between two steps."""

import pytest

PLAIN = """
class Model(nn.Module):
    def __init__(self):
        self.w = ones()
    def __call__(self, x):
        return x * self.w * {factor}
"""

CHANGES = {
    "a global": (
        "BY = 2.0\n" + PLAIN.format(factor="BY"),
        "BY = 3.0",
        "global 'BY' of demo changed from 2.0 to 3.0",
    ),
    "a global that hides a builtin": (
        PLAIN.format(factor="float(abs(-2))"),
        "abs = lambda x: 3",
        "global 'abs' of demo (function <lambda>",
    ),
    "an item of a global list": (
        "BY = [1.0, 2.0]\n" + PLAIN.format(factor="BY[1]"),
        "BY[1] = 3.0",
        "global 'BY' of demo[1] changed from 2.0 to 3.0",
    ),
    "an element of a global array": (
        "BY = np.array([1.0, 2.0])\n" + PLAIN.format(factor="float(BY[1])"),
        "BY[1] = 3.0",
        "global 'BY' of demo changed from float64[2]",
    ),
    "a setting of a global object": (
        "@dataclasses.dataclass\n"
        "class Config:\n"
        "    by: float = 2.0\n"
        "CONFIG = Config()\n" + PLAIN.format(factor="CONFIG.by"),
        "CONFIG.by = 3.0",
        "global 'CONFIG' of demo.by changed from 2.0 to 3.0",
    ),
    "a helper": (
        "def helper(x):\n    return x * 2.0\n"
        "class Model(nn.Module):\n"
        "    def __init__(self):\n"
        "        self.w = ones()\n"
        "    def __call__(self, x):\n"
        "        return helper(x * self.w)\n",
        "def helper(x):\n    return x * 3.0",
        "global 'helper' of demo changed from function helper",
    ),
    "a helper of a helper": (
        "def inner(x):\n    return x * 2.0\n"
        "def helper(x):\n    return inner(x)\n"
        "class Model(nn.Module):\n"
        "    def __init__(self):\n"
        "        self.w = ones()\n"
        "    def __call__(self, x):\n"
        "        return [helper(y) for y in [x * self.w]][0]\n",
        "def inner(x):\n    return x * 3.0",
        "global 'inner' of demo changed",
    ),
    "the code of a helper": (
        "def helper(x):\n    return x * 2.0\n"
        "class Model(nn.Module):\n"
        "    def __init__(self):\n"
        "        self.w = ones()\n"
        "    def __call__(self, x):\n"
        "        return helper(x * self.w)\n",
        "helper.__code__ = (lambda x: x * 3.0).__code__",
        "global 'helper' of demo changed",
    ),
    "a default of a helper": (
        "def helper(x, by=2.0):\n    return x * by\n"
        "class Model(nn.Module):\n"
        "    def __init__(self):\n"
        "        self.w = ones()\n"
        "    def __call__(self, x):\n"
        "        return helper(x * self.w)\n",
        "helper.__defaults__ = (3.0,)",
        "default 0 of helper changed from 2.0 to 3.0",
    ),
    "a keyword default of a helper": (
        "def helper(x, *, by=2.0):\n    return x * by\n"
        "class Model(nn.Module):\n"
        "    def __init__(self):\n"
        "        self.w = ones()\n"
        "    def __call__(self, x):\n"
        "        return helper(x * self.w)\n",
        "helper.__kwdefaults__['by'] = 3.0",
        "default 'by' of helper changed from 2.0 to 3.0",
    ),
    "an attribute of a helper": (
        "def helper(x):\n    return x * helper.by\n"
        "helper.by = 2.0\n"
        "class Model(nn.Module):\n"
        "    def __init__(self):\n"
        "        self.w = ones()\n"
        "    def __call__(self, x):\n"
        "        return helper(x * self.w)\n",
        "helper.by = 3.0",
        "helper.by changed from 2.0 to 3.0",
    ),
    "a closed-over variable": (
        "def make():\n"
        "    by = 2.0\n"
        "    def helper(x):\n"
        "        return x * by\n"
        "    def set_by(value):\n"
        "        nonlocal by\n"
        "        by = value\n"
        "    return helper, set_by\n"
        "helper, set_by = make()\n"
        "class Model(nn.Module):\n"
        "    def __init__(self):\n"
        "        self.w = ones()\n"
        "    def __call__(self, x):\n"
        "        return helper(x * self.w)\n",
        "set_by(3.0)",
        "variable 'by' of helper changed from 2.0 to 3.0",
    ),
    "what a decorated helper wraps": (
        "def twice(function):\n"
        "    @functools.wraps(function)\n"
        "    def wrapper(*args):\n"
        "        return function(function(*args))\n"
        "    return wrapper\n"
        "BY = 2.0\n"
        "@twice\n"
        "def helper(x):\n    return x * BY\n"
        "class Model(nn.Module):\n"
        "    def __init__(self):\n"
        "        self.w = ones()\n"
        "    def __call__(self, x):\n"
        "        return helper(x * self.w)\n",
        "BY = 3.0",
        "global 'BY' of demo changed",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_changed_is_traced_again_and_named_in_one_line(changed, name):
    changed(*CHANGES[name])
