"""Attributes, classes and modules that change between two steps."""

import pytest

# fmt: off
CHANGES = {
    "the attribute of a member of an enumeration": (
        "x * self.w * self.kind.by", "Kind.A.by = 3.0", "kind.by changed from 2.0 to 3.0",
        {"above": "import enum\nclass Kind(enum.Enum):\n    A = [2.0]\n"
        "    def __init__(self, value):\n        self.by = 2.0", "init": "self.kind = Kind.A"}),
    "the list that is the value of a member": (
        "x * self.w * self.kind.value[0]", "Kind.A.value[0] = 3.0",
        "kind changed from Kind <Kind.A: [2.0]>",
        {"above": "import enum\nclass Kind(enum.Enum):\n    A = [2.0]\n"
        "    def __init__(self, value):\n        self.by = 2.0", "init": "self.kind = Kind.A"}),
    "a method of an enumeration": (
        "x * self.w * self.kind.by * self.kind.more()", "Kind.more = lambda self: 1.5",
        "Kind.more changed from function <lambda>",
        {"above": "import enum\nclass Kind(enum.Enum):\n    A = [2.0]\n"
        "    def __init__(self, value):\n        self.by = 2.0", "init": "self.kind = Kind.A",
        "below": "Kind.more = lambda self: 1.0"}),
    "a record that is a view of an array": (
        "x * self.w * float(self.row['by'])", "model.table['by'] = 3.0", "table changed from",
        {"init": "self.table = np.array([(2.0,)], [('by', 'f4')])\nself.row = self.table[0]"}),
    "the shape of an array, set in place": (
        "x * self.w * (2.0 if self.a.ndim == 1 else 3.0)",
        "model.a.resize((2, 1), refcheck=False)", "a changed from float32[2]",
        {"init": "self.a = np.zeros(2, np.float32)"}),
    "the dtype of an array, set in place": (
        "x * self.w * (2.0 if self.a.dtype == np.float32 else 3.0)", "model.a.dtype = np.int32",
        "a changed from float32[2]", {"init": "self.a = np.zeros(2, np.float32)"}),
    "a lambda in an attribute": (
        "self.act(x * self.w)", "model.act = lambda x: x * 3.0",
        "act changed from function <lambda>", {"init": "self.act = lambda x: x * 2.0"}),
    "a lambda that takes the place of one that is gone": (
        "self.act(x * self.w)", "del model.act\nmodel.act = eval('lambda x: x * 3.0')",
        "act changed", {"init": "self.act = eval('lambda x: x * 2.0')"}),
    "a setting inside a callable object": (
        "self.act(x * self.w)", "model.act.by = 3.0", "act.by changed from 2.0 to 3.0",
        {"above": "class Scale:\n    def __init__(self, by):\n        self.by = by\n"
        "    def __call__(self, x):\n        return x * self.by",
        "init": "self.act = Scale(2.0)"}),
    "a slot": (
        "x * self.w * self.config.by", "model.config.by = 3.0",
        "config.by changed from 2.0 to 3.0", {"above": "class Config:\n    __slots__ = ('by',)",
        "init": "self.config = Config()\nself.config.by = 2.0"}),
    "a slot of a module": (
        "x * self.w * self.by", "model.by = 3.0", "by changed from 2.0 to 3.0",
        {"body": "__slots__ = ('by',)", "init": "self.by = 2.0"}),
    "a class attribute": (
        "x * self.w * self.by", "Model.by = 3.0", "Model.by changed from 2.0 to 3.0",
        {"body": "by = 2.0"}),
    "an attribute of a base class that is no module": (
        "x * self.w * self.by", "Base.by = 3.0", "Base.by changed from 2.0 to 3.0",
        {"above": "class Base:\n    by = 2.0", "bases": "nn.Module, Base"}),
    "a method": (
        "x * self.w * 2.0", "Model.__call__ = lambda self, x: x * self.w * 3.0",
        "Model.__call__ changed"),
    "a method of a layer of the library": (
        "self.drop(x * self.w)",
        "old = nn.Dropout.__call__\nnn.Dropout.__call__ = lambda self, x: x * 3.0\n"
        "def undo():\n    nn.Dropout.__call__ = old", "Dropout.__call__ changed",
        {"init": "self.drop = nn.Dropout(0.0)\nself.drop.by = 1.0"}),
    "a property": (
        "x * self.w * self.by", "Model.by = property(lambda self: 3.0)", "Model.by.fget changed",
        {"body": "by = property(lambda self: 2.0)"}),
    "another class with equal settings": (
        "self.act(x * self.w)", "model.act = Squared()",
        "class of act changed from class Twice to class Squared",
        {"above": "class Twice:\n    def __init__(self):\n        self.by = 2.0\n"
        "    def __call__(self, x):\n        return x * self.by\n"
        "class Squared(Twice):\n    def __call__(self, x):\n"
        "        return x * self.by * self.by", "init": "self.act = Twice()"}),
    "the class of a module": (
        "x * self.w", "model.__class__ = Other",
        "class of the model changed from class Model to class Other",
        {"below": "class Other(Model):\n    def __call__(self, x):\n"
        "        return x * self.w * 3.0"}),
    "one of very many items": (
        "x * self.w * self.table[400]", "model.table[400] = 3.0",
        "the items of table changed from 500 with hash", {"init": "self.table = [2.0] * 500"}),
    "one of very many entries": (
        "x * self.w * (3.0 if self.table['400'] is True else 2.0)", "model.table['400'] = True",
        "the items of table changed from 500 with hash",
        {"init": "self.table = {str(i): 1 for i in range(500)}"}),
    "the whole __dict__ of a module": (
        "x * self.w * self.by", "model.__dict__ = {'w': model.w, 'by': 3.0}",
        "by changed from 2.0 to 3.0", {"init": "self.by = 2.0"}),
    "an attribute set past setattr": (
        "x * self.w * self.by", "vars(model)['by'] = 3.0", "by changed from 2.0 to 3.0",
        {"init": "self.by = 2.0"}),
    "an equal number of another type": (
        "x * self.w * (3.0 if self.by is True else self.by)", "model.by = True",
        "by changed from 1 to True", {"init": "self.by = 1"}),
    "the sign of a zero": (
        "x * self.w * float(np.copysign(3.0, self.by))", "model.by = -0.0",
        "by changed from 0.0 to -0.0", {"init": "self.by = 0.0"}),
    "an attribute under another name": (
        "x * self.w * getattr(self, 'b', 2.0)", "model.b = vars(model).pop('a')",
        "b (3.0) is new", {"init": "self.a = 3.0"}),
    "a keyword of a partial": (
        "self.act(x * self.w)", "model.act.keywords['by'] = 3.0",
        "act.keywords['by'] changed from 2.0 to 3.0",
        {"above": "def scale(x, by):\n    return x * by",
        "init": "self.act = functools.partial(scale, by=2.0)"}),
    "the object of a bound method": (
        "self.act(x * self.w)", "model.act.__self__.by = 3.0", "act.__self__.by (3.0) is new",
        {"above": "class Scale:\n    by = 2.0\n    def apply(self, x):\n"
        "        return x * self.by", "init": "self.act = Scale().apply"}),
    "a dict of functions": (
        "TABLE[self.act](x * self.w)", "TABLE['act'] = lambda x: x * 3.0",
        "global 'TABLE' of demo['act'] changed", {"above": "TABLE = {'act': lambda x: x * 2.0}",
        "init": "self.act = 'act'"}),
    "a key that is no text": (
        "x * self.w * (2.0 if type(list(self.table)[0]) is int else 3.0)",
        "model.table[True] = model.table.pop(1)", "table[True] (2.0) is new",
        {"init": "self.table = {1: 2.0}"}),
    "the content of a set": (
        "x * self.w * (2.0 if 'a' in self.on else 3.0)",
        "model.on.remove('a'); model.on.add('c')",
        "on changed from set [\"'a'\", \"'b'\"] to set [\"'b'\", \"'c'\"]",
        {"init": "self.on = {'a', 'b'}"}),
    "a thing of the standard library without attributes": (
        "x * self.w * self.queue[0]", "model.queue[0] = 3.0", "queue changed from deque",
        {"above": "import collections", "init": "self.queue = collections.deque([2.0])"}),
    "a member of an enum": (
        "x * self.w * self.by.value", "model.by = By.THREE", "by changed from",
        {"above": "import enum\nclass By(enum.Enum):\n    TWO, THREE = 2.0, 3.0",
        "init": "self.by = By.TWO"}),
    "a module in a list": (
        "self.parts[1](self.parts[0](x) * self.w)", "model.parts[1] = Scale(3.0)",
        "parts.1.by changed from 2.0 to 3.0",
        {"above": "class Scale(nn.Module):\n    def __init__(self, by):\n"
        "        self.by = by\n    def __call__(self, x):\n        return x * self.by",
        "init": "self.parts = [Scale(1.0), Scale(2.0)]"}),
    "the order of modules": (
        "", "model.steps.reverse()", "steps[0] changed",
        {"text": "class Model(nn.Module):\n    def __init__(self):\n"
        "        self.w, self.steps = ones(), [lambda x: x * 2.0, lambda x: x + 1.0]\n"
        "    def __call__(self, x):\n        for step in self.steps:\n"
        "            x = step(x * self.w)\n        return x"}),
    "a tied parameter": (
        "", "model.b = model.a", "parameter 'b' changed from float32[2] to the same as a",
        {"text": "class Model(nn.Module):\n    def __init__(self):\n"
        "        self.a, self.b = ones(), nn.Parameter((2,), ZEROS)\n"
        "    def __call__(self, x):\n        return x * self.a + self.b"}),
    "an untied parameter": (
        "", "model.b = nn.Parameter((2,), ZEROS)",
        "parameter 'b' changed from the same as a to float32[2]",
        {"text": "class Model(nn.Module):\n    def __init__(self):\n"
        "        self.a = ones()\n        self.b = self.a\n"
        "    def __call__(self, x):\n        return x * self.a + self.b"}),
    "a parameter of another initialiser": (
        "x * self.w", "model.w = nn.Parameter((2,), ZEROS)",
        "the initialiser of parameter 'w' changed"),
}
# fmt: on


@pytest.mark.parametrize("name", CHANGES)
def test_what_changed_is_traced_again_and_named_in_one_line(changed, name):
    changed(*CHANGES[name])
