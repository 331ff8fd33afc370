"""Globals, helpers and closed-over variables that change between two steps."""

import pytest

# fmt: off
CHANGES = {
    "a global": (
        "x * self.w * BY", "BY = 3.0", "global 'BY' of demo changed from 2.0 to 3.0",
        {"above": "BY = 2.0"}),
    "a global that hides a builtin": (
        "x * self.w * float(abs(-2))", "abs = lambda x: 3",
        "global 'abs' of demo (function <lambda>"),
    "an item of a global list": (
        "x * self.w * BY[1]", "BY[1] = 3.0", "global 'BY' of demo[1] changed from 2.0 to 3.0",
        {"above": "BY = [1.0, 2.0]"}),
    "an element of a global array": (
        "x * self.w * float(BY[1])", "BY[1] = 3.0",
        "global 'BY' of demo changed from float64[2]", {"above": "BY = np.array([1.0, 2.0])"}),
    "a setting of a global object": (
        "x * self.w * CONFIG.by", "CONFIG.by = 3.0",
        "global 'CONFIG' of demo.by changed from 2.0 to 3.0",
        {"above": "@dataclasses.dataclass\nclass Config:\n    by: float = 2.0\n"
        "CONFIG = Config()"}),
    "a helper": (
        "helper(x * self.w)", "def helper(x):\n    return x * 3.0",
        "global 'helper' of demo changed from function helper",
        {"above": "def helper(x):\n    return x * 2.0"}),
    "a helper of a helper": (
        "[helper(y) for y in [x * self.w]][0]", "def inner(x):\n    return x * 3.0",
        "global 'inner' of demo changed",
        {"above": "def inner(x):\n    return x * 2.0\ndef helper(x):\n    return inner(x)"}),
    "the code of a helper": (
        "helper(x * self.w)", "helper.__code__ = (lambda x: x * 3.0).__code__",
        "global 'helper' of demo changed", {"above": "def helper(x):\n    return x * 2.0"}),
    "a default of a helper": (
        "helper(x * self.w)", "helper.__defaults__ = (3.0,)",
        "default 0 of helper changed from 2.0 to 3.0",
        {"above": "def helper(x, by=2.0):\n    return x * by"}),
    "a keyword default of a helper": (
        "helper(x * self.w)", "helper.__kwdefaults__['by'] = 3.0",
        "default 'by' of helper changed from 2.0 to 3.0",
        {"above": "def helper(x, *, by=2.0):\n    return x * by"}),
    "an attribute of a helper": (
        "helper(x * self.w)", "helper.by = 3.0", "helper.by changed from 2.0 to 3.0",
        {"above": "def helper(x):\n    return x * helper.by\nhelper.by = 2.0"}),
    "a closed-over variable": (
        "helper(x * self.w)", "set_by(3.0)", "variable 'by' of helper changed from 2.0 to 3.0",
        {"above": "def make():\n    by = 2.0\n    def helper(x):\n        return x * by\n"
        "    def set_by(value):\n        nonlocal by\n        by = value\n"
        "    return helper, set_by\nhelper, set_by = make()"}),
    "what a decorated helper wraps": (
        "helper(x * self.w)", "BY = 3.0", "global 'BY' of demo changed",
        {"above": "def twice(function):\n    @functools.wraps(function)\n"
        "    def wrapper(*args):\n        return function(function(*args))\n"
        "    return wrapper\nBY = 2.0\n@twice\ndef helper(x):\n    return x * BY"}),
}
# fmt: on


@pytest.mark.parametrize("name", CHANGES)
def test_what_changed_is_traced_again_and_named_in_one_line(changed, name):
    changed(*CHANGES[name])
