"""Random changes of a program: the graph that is used is always that of a fresh trace."""

import os

import hypothesis.strategies as st
import tiers
from hypothesis import HealthCheck, given, settings

import actorflow as af
from compiler.ops.primitives.body import hash_graph

EXAMPLES = int(os.environ.get("STALE_EXAMPLES", tiers.examples(60)))
"""Programs that are tried; STALE_EXAMPLES=2000 for a long run."""

SPEC = {"x": af.TensorType(af.DType.FLOAT32, (2,))}

ZOO = """
import collections, types

FACTOR, TABLE, ARRAY = 1.0, {"a": [1.0, 2.0]}, np.ones(3)

class Slotted:
    __slots__ = ("by", "more")
    def __init__(self, by):
        self.by = by

@dataclasses.dataclass
class Config:
    width: float = 1.0
    inner: object = None
    def scale(self, x):
        return x * self.width

def helper(x, by=1.0, *, more=1.0):
    return x * by * more * FACTOR * float(ARRAY.sum())

helper.note = 1.0

def closing(by):
    box = [by]
    def scaled(x):
        return x * by * box[0]
    def change(value):
        nonlocal by
        by = value
    scaled.change, scaled.box = change, box
    return scaled

class Leaf(nn.Module):
    by = 1.0
    def __init__(self, size=2):
        self.w, self.act = nn.Parameter((size,), ONES), None
    def __call__(self, x):
        y = x * self.w * self.by
        return self.act(y) if self.act else y

class Other(Leaf):
    def __call__(self, x):
        return super().__call__(x) + 1.0

class Node(nn.Module):
    def __init__(self, *parts):
        self.parts, self.named = list(parts), {}
        self.config, self.slotted = Config(inner=Config()), Slotted(1.0)
        self.flags, self.queue = set(), collections.deque([1.0])
        self.closed = closing(1.0)
        self.partial = functools.partial(helper, by=1.0)
        self.method = self.config.scale
        self.names, self.mode = types.SimpleNamespace(by=1.0), "plain"
        self.cache = None
    def plain(self, x):
        return x
    def other(self, x):
        if self.cache is None:
            self.cache = self.fill()
        return x * OTHER * self.cache
    def fill(self):
        return FILL
    def __call__(self, x):
        for part in [*self.parts, *self.named.values()]:
            x = part(x)
        x = self.config.scale(x) * self.config.inner.width * self.slotted.by
        x = self.closed(self.method(self.partial(x))) * self.queue[0] * self.names.by
        for flag in sorted(self.flags):
            x = x + float(flag)
        x = getattr(self, self.mode)(x)
        return helper(x) * TABLE["a"][0] * helper.note

def fresh():
    global FACTOR, OTHER, FILL
    Leaf.by, FACTOR, OTHER, FILL, TABLE["a"] = 1.0, 1.0, 1.0, 1.0, [1.0, 2.0]
    ARRAY[:] = 1.0
    helper.__defaults__, helper.__kwdefaults__, helper.note = (1.0,), {"more": 1.0}, 1.0
    leaf = Leaf()
    return Node(leaf, Node(Leaf(), leaf), Leaf())

@af.job(train=False, max_plans=1000)
def run(model, batch):
    return model(batch.x)
"""

CHANGES = {
    "a parameter": lambda m, r, v: setattr(r.parts[0], "w", m.nn.Parameter((2,), m.ONES)),
    "a frozen parameter": lambda m, r, v: setattr(r.parts[0].w, "is_frozen", v > 1),
    "a tie": lambda m, r, v: setattr(r.parts[-1], "w", r.parts[0].w),
    "an extent": lambda m, r, v: setattr(r.parts[-1], "w", m.nn.Parameter((1,), m.ONES)),
    "one part more": lambda m, r, v: r.parts.append(m.Leaf()),
    "one part less": lambda m, r, v: r.parts.pop() if len(r.parts) > 2 else None,
    "another order": lambda m, r, v: r.parts.reverse(),
    "a shared part": lambda m, r, v: r.parts.append(r.parts[0]) if len(r.parts) < 6 else None,
    "a named part": lambda m, r, v: r.named.update({f"p{v}": m.Leaf()}),
    "another class": lambda m, r, v: (
        setattr(r.parts[-1], "__class__", (m.Leaf, m.Other)[v % 2])
        if isinstance(r.parts[-1], m.Leaf)
        else None
    ),
    "a lambda": lambda m, r, v: setattr(
        r.parts[0], "act", (eval("lambda x: x * 2.0"), eval("lambda x: x * 3.0"), None)[v % 3]
    ),
    "a class attribute": lambda m, r, v: setattr(m.Leaf, "by", float(v)),
    "an attribute over that of the class": lambda m, r, v: setattr(r.parts[0], "by", float(v)),
    "that attribute away": lambda m, r, v: vars(r.parts[0]).pop("by", None),
    "a setting": lambda m, r, v: setattr(r.config, "width", float(v)),
    "an inner setting": lambda m, r, v: setattr(r.config.inner, "width", (1, True, 1.0, 2)[v]),
    "another object of settings": lambda m, r, v: setattr(r, "config", m.Config(v, m.Config(v))),
    "a slot": lambda m, r, v: setattr(r.slotted, "by", float(v)),
    "a flag": lambda m, r, v: r.flags.symmetric_difference_update({v}),
    "an item of a queue": lambda m, r, v: r.queue.__setitem__(0, float(v)),
    "a namespace": lambda m, r, v: setattr(r.names, "by", float(v)),
    "a closed-over variable": lambda m, r, v: r.closed.change(float(v)),
    "a closed-over list": lambda m, r, v: r.closed.box.__setitem__(0, float(v)),
    "a keyword of a partial": lambda m, r, v: r.partial.keywords.update(by=float(v)),
    "the object of a method": lambda m, r, v: setattr(r.method.__self__, "width", float(v)),
    "a global": lambda m, r, v: setattr(m, "FACTOR", float(v)),
    "an item of a global": lambda m, r, v: m.TABLE["a"].__setitem__(v % 2, float(v)),
    "an element of a global": lambda m, r, v: m.ARRAY.__setitem__(v % 3, float(v)),
    "a default": lambda m, r, v: setattr(m.helper, "__defaults__", (float(v),)),
    "a keyword default": lambda m, r, v: m.helper.__kwdefaults__.update(more=float(v)),
    "an attribute of a function": lambda m, r, v: setattr(m.helper, "note", float(v)),
    "which method is called": lambda m, r, v: setattr(r, "mode", ("plain", "other")[v % 2]),
    "a global of the other method": lambda m, r, v: setattr(m, "OTHER", float(v)),
    "a global of what fills a cache": lambda m, r, v: setattr(m, "FILL", float(v)),
    "an empty cache": lambda m, r, v: setattr(r, "cache", None),
    "an attribute that nobody reads": lambda m, r, v: setattr(r, f"other{v}", v),
}


def nodes(module, model):
    return [m for _, m in model.named_modules() if isinstance(m, module.Node)]


def digest(job, model):
    return hash_graph(job.graph(model, SPEC))


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.lists(st.tuples(st.sampled_from(list(CHANGES)), st.integers(0, 3), st.integers(0, 1))))
def test_after_any_changes_the_graph_is_that_of_a_fresh_trace(program, changes):
    module = program(ZOO)
    job, model = af.Job(module.run.function, module.run.options), module.fresh()
    digest(job, model)
    for name, value, at in changes:
        there = nodes(module, model)
        CHANGES[name](module, there[at % len(there)], value)
        held = job._traces(model).newest(SPEC)
        expected = digest(af.Job(job.function, job.options), model)
        assert held is None or held.digest == expected, f"the guard missed {name}"
        assert digest(job, model) == expected, f"the identity misses {name}"
        assert job._traces(model).newest(SPEC) is not None
