"""What did not change is not traced again, and nothing is said."""

import copy
import gc
import weakref

import numpy as np
import pytest

import actorflow as af

X = {"x": np.array([1.0, 2.0], np.float32)}

SAME = {
    "an equal object in its place": "model.by = float('2.5')",
    "an attribute taken away and put back": "by = vars(model).pop('by')\nmodel.by = by",
    "the same code from the same text again": "def helper(x):\n    return x * 2.0",
    "other values of the parameters": "model.load({n: a + 0 for n, a in model.state().items()})",
    "a global that no code names": "OTHER = 2",
    "the method that makes objects": "Model.__init__ = lambda self: None",
    "other random numbers": "np.random.rand(3)\nrandom.random()",
}


@pytest.mark.parametrize("name", SAME)
def test_what_did_not_change_is_not_traced_again(
    program, model_text, outputs, change, traces, said, name
):
    module = program(
        model_text(
            "helper(x * self.w * self.by)",
            init="self.by = float('2.5')",
            above="OTHER = 1\ndef helper(x):\n    return x * 2.0",
        )
    )
    job, model = module.run, module.model
    module.model.w.data = np.ones(2, np.float32)
    before = job.step(model, X)["output"].tolist()
    change(module, SAME[name])
    assert outputs(job, model) == before
    assert len(traces) == 1
    assert said() == []


def test_what_only_functions_read_that_no_trace_calls_may_change(program, readings, said, outputs):
    module = program(
        """
        SEEN, BY = [], 2.0
        class Model(nn.Module):
            def __init__(self):
                self.w, self.notes = ones(), []
            def note(self, loss):
                SEEN.append((loss, BY))
            def __call__(self, x):
                return x * self.w
        """
    )
    job, model = module.run, module.model
    first = job.step(model, X)["output"].tolist()
    num_readings = len(readings)
    for step in range(3):
        model.note(step)
        module.BY = float(step)
        assert job.step(model, X)["output"].tolist() == first
    assert len(readings) == num_readings
    module.Model.__call__ = lambda self, x: x * self.w * module.BY
    assert outputs(job, model) == [2.0 * value for value in first]
    module.BY = 3.0
    assert outputs(job, model) == [3.0 * value for value in first]
    assert len(said()) == 2


def test_another_model_of_the_class_gets_the_plan_of_the_first(
    program, model_text, traces, counted
):
    from compiler.pipeline import pipeline

    compiles = counted(pipeline, "compile_graph")
    module = program(model_text("x * self.w * 2.0"))
    spec = {"x": af.TensorType(af.DType.FLOAT32, (2,))}
    plans = [module.run.compile(module.Model(), spec) for _ in range(3)]
    assert plans[0] is plans[1] is plans[2]
    assert (len(traces), len(compiles)) == (3, 1)


def test_a_module_imported_again_gives_the_plan_that_there_is(
    program, model_text, outputs, counted
):
    from compiler.pipeline import pipeline

    compiles = counted(pipeline, "compile_graph")
    for _ in range(2):
        module = program(model_text("x * self.w * 2.0"))
        outputs(module.run, module.model)
    assert len(compiles) == 1


def test_a_cache_that_the_trace_fills_is_no_change(program, outputs, traces, said):
    module = program(
        """
        class Model(nn.Module):
            mask = None
            def __init__(self):
                self.w, self.calls = ones(), 0
            def __call__(self, x):
                self.calls += 1
                if self.mask is None:
                    self.mask = np.ones(2, np.float32)
                self.last = x * self.w * self.mask
                return self.last
        """,
    )
    job, model = module.run, module.model
    first = job.step(model, X)["output"].tolist()
    num_traces = len(traces)
    assert job.step(model, X)["output"].tolist() == first
    assert (len(traces), said()) == (num_traces, [])
    model.mask[:] = 3.0
    assert outputs(job, model) == [3 * v for v in first]
    (line,) = said()
    assert "mask changed from float32[2]" in line


def test_a_model_goes_with_its_plan_also_where_an_attribute_leads_back_to_it(program):
    module = program(
        """
        class Model(nn.Module):
            def __init__(self):
                self.w, self.act = ones(), self.twice
            def twice(self, x):
                return x * 2.0
            def __call__(self, x):
                return self.act(x * self.w)
        """,
    )
    module.run.step(module.model, X)
    gone = weakref.ref(module.model)
    del module.model
    gc.collect()
    assert gone() is None


def test_a_copy_of_a_model_is_another_model(program, model_text, outputs, traces):
    module = program(model_text("x * self.w * 2.0"))
    job, model = module.run, module.model
    before = outputs(job, model)
    for copied in (copy.copy(model), copy.deepcopy(model)):
        copied.w = module.nn.Parameter((2,), module.ZEROS)
        assert outputs(job, copied) == [0.0, 0.0]
    assert outputs(job, model) == before
