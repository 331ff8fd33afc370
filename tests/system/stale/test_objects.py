"""Attributes, classes and modules that change between two steps."""

import pytest

PLAIN = """
class Model(nn.Module):
    def __init__(self):
        self.w = ones()
    def __call__(self, x):
        return x * self.w * {factor}
"""

ENUM = (
    "import enum\n"
    "class Kind(enum.Enum):\n"
    "    A = [2.0]\n"
    "    def __init__(self, value):\n"
    "        self.by = 2.0\n"
    "class Model(nn.Module):\n"
    "    def __init__(self):\n"
    "        self.w, self.kind = ones(), Kind.A\n"
    "    def __call__(self, x):\n"
    "        return x * self.w * {factor}\n"
)

RECORD = (
    "class Model(nn.Module):\n"
    "    def __init__(self):\n"
    "        self.w = ones()\n"
    "        self.table = np.array([(2.0,)], [('by', 'f4')])\n"
    "        self.row = self.table[0]\n"
    "    def __call__(self, x):\n"
    "        return x * self.w * float(self.row['by'])\n"
)

KIND = (
    "class Model(nn.Module):\n"
    "    def __init__(self):\n"
    "        self.w, self.a = ones(), np.zeros(2, np.float32)\n"
    "    def __call__(self, x):\n"
    "        return x * self.w * (2.0 if {test} else 3.0)\n"
)

CHANGES = {
    "the attribute of a member of an enumeration": (
        ENUM.format(factor="self.kind.by"),
        "Kind.A.by = 3.0",
        "kind.by changed from 2.0 to 3.0",
    ),
    "the list that is the value of a member": (
        ENUM.format(factor="self.kind.value[0]"),
        "Kind.A.value[0] = 3.0",
        "kind changed from Kind <Kind.A: [2.0]>",
    ),
    "a method of an enumeration": (
        ENUM.format(factor="self.kind.by * self.kind.more()") + "Kind.more = lambda self: 1.0\n",
        "Kind.more = lambda self: 1.5",
        "Kind.more changed from function <lambda>",
    ),
    "a record that is a view of an array": (
        RECORD,
        "model.table['by'] = 3.0",
        "table changed from",
    ),
    "the shape of an array, set in place": (
        KIND.format(test="self.a.ndim == 1"),
        "model.a.resize((2, 1), refcheck=False)",
        "a changed from float32[2]",
    ),
    "the dtype of an array, set in place": (
        KIND.format(test="self.a.dtype == np.float32"),
        "model.a.dtype = np.int32",
        "a changed from float32[2]",
    ),
    "a lambda in an attribute": (
        "class Model(nn.Module):\n"
        "    def __init__(self):\n"
        "        self.w, self.act = ones(), lambda x: x * 2.0\n"
        "    def __call__(self, x):\n"
        "        return self.act(x * self.w)\n",
        "model.act = lambda x: x * 3.0",
        "act changed from function <lambda>",
    ),
    "a lambda that takes the place of one that is gone": (
        "class Model(nn.Module):\n"
        "    def __init__(self):\n"
        "        self.w, self.act = ones(), eval('lambda x: x * 2.0')\n"
        "    def __call__(self, x):\n"
        "        return self.act(x * self.w)\n",
        "del model.act\nmodel.act = eval('lambda x: x * 3.0')",
        "act changed",
    ),
    "a setting inside a callable object": (
        "class Scale:\n"
        "    def __init__(self, by):\n"
        "        self.by = by\n"
        "    def __call__(self, x):\n"
        "        return x * self.by\n"
        "class Model(nn.Module):\n"
        "    def __init__(self):\n"
        "        self.w, self.act = ones(), Scale(2.0)\n"
        "    def __call__(self, x):\n"
        "        return self.act(x * self.w)\n",
        "model.act.by = 3.0",
        "act.by changed from 2.0 to 3.0",
    ),
    "a slot": (
        "class Config:\n"
        "    __slots__ = ('by',)\n"
        "class Model(nn.Module):\n"
        "    def __init__(self):\n"
        "        self.w, self.config = ones(), Config()\n"
        "        self.config.by = 2.0\n"
        "    def __call__(self, x):\n"
        "        return x * self.w * self.config.by\n",
        "model.config.by = 3.0",
        "config.by changed from 2.0 to 3.0",
    ),
    "a slot of a module": (
        "class Model(nn.Module):\n"
        "    __slots__ = ('by',)\n"
        "    def __init__(self):\n"
        "        self.w, self.by = ones(), 2.0\n"
        "    def __call__(self, x):\n"
        "        return x * self.w * self.by\n",
        "model.by = 3.0",
        "by changed from 2.0 to 3.0",
    ),
    "a class attribute": (
        "class Model(nn.Module):\n"
        "    by = 2.0\n"
        "    def __init__(self):\n"
        "        self.w = ones()\n"
        "    def __call__(self, x):\n"
        "        return x * self.w * self.by\n",
        "Model.by = 3.0",
        "Model.by changed from 2.0 to 3.0",
    ),
    "an attribute of a base class that is no module": (
        "class Base:\n"
        "    by = 2.0\n"
        "class Model(nn.Module, Base):\n"
        "    def __init__(self):\n"
        "        self.w = ones()\n"
        "    def __call__(self, x):\n"
        "        return x * self.w * self.by\n",
        "Base.by = 3.0",
        "Base.by changed from 2.0 to 3.0",
    ),
    "a method": (
        PLAIN.format(factor="2.0"),
        "Model.__call__ = lambda self, x: x * self.w * 3.0",
        "Model.__call__ changed",
    ),
    "a method of a layer of the library": (
        "class Model(nn.Module):\n"
        "    def __init__(self):\n"
        "        self.w, self.drop = ones(), nn.Dropout(0.0)\n"
        "        self.drop.by = 1.0\n"
        "    def __call__(self, x):\n"
        "        return self.drop(x * self.w)\n",
        "old = nn.Dropout.__call__\nnn.Dropout.__call__ = lambda self, x: x * 3.0\n"
        "def undo():\n    nn.Dropout.__call__ = old",
        "Dropout.__call__ changed",
    ),
    "a property": (
        "class Model(nn.Module):\n"
        "    def __init__(self):\n"
        "        self.w = ones()\n"
        "    by = property(lambda self: 2.0)\n"
        "    def __call__(self, x):\n"
        "        return x * self.w * self.by\n",
        "Model.by = property(lambda self: 3.0)",
        "Model.by.fget changed",
    ),
    "another class with equal settings": (
        "class Twice:\n"
        "    def __init__(self):\n"
        "        self.by = 2.0\n"
        "    def __call__(self, x):\n"
        "        return x * self.by\n"
        "class Squared(Twice):\n"
        "    def __call__(self, x):\n"
        "        return x * self.by * self.by\n"
        "class Model(nn.Module):\n"
        "    def __init__(self):\n"
        "        self.w, self.act = ones(), Twice()\n"
        "    def __call__(self, x):\n"
        "        return self.act(x * self.w)\n",
        "model.act = Squared()",
        "class of act changed from class Twice to class Squared",
    ),
    "the class of a module": (
        "class Model(nn.Module):\n"
        "    def __init__(self):\n"
        "        self.w = ones()\n"
        "    def __call__(self, x):\n"
        "        return x * self.w\n"
        "class Other(Model):\n"
        "    def __call__(self, x):\n"
        "        return x * self.w * 3.0\n",
        "model.__class__ = Other",
        "class of the model changed from class Model to class Other",
    ),
    "one of very many items": (
        "class Model(nn.Module):\n"
        "    def __init__(self):\n"
        "        self.w, self.table = ones(), [2.0] * 500\n"
        "    def __call__(self, x):\n"
        "        return x * self.w * self.table[400]\n",
        "model.table[400] = 3.0",
        "the items of table changed from 500 with hash",
    ),
    "one of very many entries": (
        "class Model(nn.Module):\n"
        "    def __init__(self):\n"
        "        self.w, self.table = ones(), {str(i): 1 for i in range(500)}\n"
        "    def __call__(self, x):\n"
        "        return x * self.w * (3.0 if self.table['400'] is True else 2.0)\n",
        "model.table['400'] = True",
        "the items of table changed from 500 with hash",
    ),
    "the whole __dict__ of a module": (
        "class Model(nn.Module):\n"
        "    def __init__(self):\n"
        "        self.w, self.by = ones(), 2.0\n"
        "    def __call__(self, x):\n"
        "        return x * self.w * self.by\n",
        "model.__dict__ = {'w': model.w, 'by': 3.0}",
        "by changed from 2.0 to 3.0",
    ),
    "an attribute set past setattr": (
        "class Model(nn.Module):\n"
        "    def __init__(self):\n"
        "        self.w, self.by = ones(), 2.0\n"
        "    def __call__(self, x):\n"
        "        return x * self.w * self.by\n",
        "vars(model)['by'] = 3.0",
        "by changed from 2.0 to 3.0",
    ),
    "an equal number of another type": (
        "class Model(nn.Module):\n"
        "    def __init__(self):\n"
        "        self.w, self.by = ones(), 1\n"
        "    def __call__(self, x):\n"
        "        return x * self.w * (3.0 if self.by is True else self.by)\n",
        "model.by = True",
        "by changed from 1 to True",
    ),
    "the sign of a zero": (
        "class Model(nn.Module):\n"
        "    def __init__(self):\n"
        "        self.w, self.by = ones(), 0.0\n"
        "    def __call__(self, x):\n"
        "        return x * self.w * float(np.copysign(3.0, self.by))\n",
        "model.by = -0.0",
        "by changed from 0.0 to -0.0",
    ),
    "an attribute under another name": (
        "class Model(nn.Module):\n"
        "    def __init__(self):\n"
        "        self.w, self.a = ones(), 3.0\n"
        "    def __call__(self, x):\n"
        "        return x * self.w * getattr(self, 'b', 2.0)\n",
        "model.b = vars(model).pop('a')",
        "b (3.0) is new",
    ),
    "a keyword of a partial": (
        "def scale(x, by):\n    return x * by\n"
        "class Model(nn.Module):\n"
        "    def __init__(self):\n"
        "        self.w, self.act = ones(), functools.partial(scale, by=2.0)\n"
        "    def __call__(self, x):\n"
        "        return self.act(x * self.w)\n",
        "model.act.keywords['by'] = 3.0",
        "act.keywords['by'] changed from 2.0 to 3.0",
    ),
    "the object of a bound method": (
        "class Scale:\n"
        "    by = 2.0\n"
        "    def apply(self, x):\n        return x * self.by\n"
        "class Model(nn.Module):\n"
        "    def __init__(self):\n"
        "        self.w, self.act = ones(), Scale().apply\n"
        "    def __call__(self, x):\n"
        "        return self.act(x * self.w)\n",
        "model.act.__self__.by = 3.0",
        "act.__self__.by (3.0) is new",
    ),
    "a dict of functions": (
        "TABLE = {'act': lambda x: x * 2.0}\n"
        "class Model(nn.Module):\n"
        "    def __init__(self):\n"
        "        self.w, self.act = ones(), 'act'\n"
        "    def __call__(self, x):\n"
        "        return TABLE[self.act](x * self.w)\n",
        "TABLE['act'] = lambda x: x * 3.0",
        "global 'TABLE' of demo['act'] changed",
    ),
    "a key that is no text": (
        "class Model(nn.Module):\n"
        "    def __init__(self):\n"
        "        self.w, self.table = ones(), {1: 2.0}\n"
        "    def __call__(self, x):\n"
        "        return x * self.w * (2.0 if type(list(self.table)[0]) is int else 3.0)\n",
        "model.table[True] = model.table.pop(1)",
        "table[True] (2.0) is new",
    ),
    "the content of a set": (
        "class Model(nn.Module):\n"
        "    def __init__(self):\n"
        "        self.w, self.on = ones(), {'a', 'b'}\n"
        "    def __call__(self, x):\n"
        "        return x * self.w * (2.0 if 'a' in self.on else 3.0)\n",
        "model.on.remove('a'); model.on.add('c')",
        "on changed from set ['a', 'b'] to set ['b', 'c']".replace(
            "['a', 'b']", "[\"'a'\", \"'b'\"]"
        ).replace("['b', 'c']", "[\"'b'\", \"'c'\"]"),
    ),
    "a thing of the standard library without attributes": (
        "import collections\n"
        "class Model(nn.Module):\n"
        "    def __init__(self):\n"
        "        self.w, self.queue = ones(), collections.deque([2.0])\n"
        "    def __call__(self, x):\n"
        "        return x * self.w * self.queue[0]\n",
        "model.queue[0] = 3.0",
        "queue changed from deque",
    ),
    "a member of an enum": (
        "import enum\n"
        "class By(enum.Enum):\n"
        "    TWO, THREE = 2.0, 3.0\n"
        "class Model(nn.Module):\n"
        "    def __init__(self):\n"
        "        self.w, self.by = ones(), By.TWO\n"
        "    def __call__(self, x):\n"
        "        return x * self.w * self.by.value\n",
        "model.by = By.THREE",
        "by changed from",
    ),
    "a module in a list": (
        "class Scale(nn.Module):\n"
        "    def __init__(self, by):\n"
        "        self.by = by\n"
        "    def __call__(self, x):\n"
        "        return x * self.by\n"
        "class Model(nn.Module):\n"
        "    def __init__(self):\n"
        "        self.w, self.parts = ones(), [Scale(1.0), Scale(2.0)]\n"
        "    def __call__(self, x):\n"
        "        return self.parts[1](self.parts[0](x) * self.w)\n",
        "model.parts[1] = Scale(3.0)",
        "parts.1.by changed from 2.0 to 3.0",
    ),
    "the order of modules": (
        "class Model(nn.Module):\n"
        "    def __init__(self):\n"
        "        self.w, self.steps = ones(), [lambda x: x * 2.0, lambda x: x + 1.0]\n"
        "    def __call__(self, x):\n"
        "        for step in self.steps:\n"
        "            x = step(x * self.w)\n"
        "        return x\n",
        "model.steps.reverse()",
        "steps[0] changed",
    ),
    "a tied parameter": (
        "class Model(nn.Module):\n"
        "    def __init__(self):\n"
        "        self.a, self.b = ones(), nn.Parameter((2,), ZEROS)\n"
        "    def __call__(self, x):\n"
        "        return x * self.a + self.b\n",
        "model.b = model.a",
        "parameter 'b' changed from float32[2] to the same as a",
    ),
    "an untied parameter": (
        "class Model(nn.Module):\n"
        "    def __init__(self):\n"
        "        self.a = ones()\n"
        "        self.b = self.a\n"
        "    def __call__(self, x):\n"
        "        return x * self.a + self.b\n",
        "model.b = nn.Parameter((2,), ZEROS)",
        "parameter 'b' changed from the same as a to float32[2]",
    ),
    "a parameter of another initialiser": (
        "class Model(nn.Module):\n"
        "    def __init__(self):\n"
        "        self.w = ones()\n"
        "    def __call__(self, x):\n"
        "        return x * self.w\n",
        "model.w = nn.Parameter((2,), ZEROS)",
        "the initialiser of parameter 'w' changed",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_changed_is_traced_again_and_named_in_one_line(changed, name):
    changed(*CHANGES[name])
