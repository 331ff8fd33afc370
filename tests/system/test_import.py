"""Importing is cheap and does nothing."""

import actorflow as af


def test_import_starts_no_thread_and_loads_neither_cupy_nor_zmq(run_python):
    run_python(
        """
        import sys, threading, tracemalloc
        import numpy
        tracemalloc.start()
        import actorflow
        assert threading.active_count() == 1, threading.enumerate()
        for name in ("cupy", "zmq", "torch", "onnx", "ray"):
            assert name not in sys.modules, name
        arrays = tracemalloc.take_snapshot().filter_traces(
            [tracemalloc.DomainFilter(True, numpy.lib.tracemalloc_domain)]
        )
        size = sum(s.size for s in arrays.statistics("filename"))
        assert size < 64 << 10, size
        """
    )


def test_import_loads_nothing_that_only_a_run_needs_and_a_run_from_the_cache_no_compiler(
    run_python, tmp_path
):
    program = """
        import sys
        import actorflow as af
        late = (
            "actors.kernels.host.catalogue",
            "actors.loop.loop",
            "compiler.pipeline.pipeline",
            "subprocess",
        )
        assert not [name for name in late if name in sys.modules], sys.modules.keys() & set(late)
        assert af.Runner.__name__ == "Runner" and af.NonFiniteLoss and af.Stopped and af.FitResult
        import numpy
        class Model(af.nn.Module):
            def __init__(self):
                self.layer = af.nn.Linear(4, 4)
            def __call__(self, x):
                return self.layer(x)
        @af.job(optimizer=af.optim.SGD(0.1))
        def train(model, batch):
            return model(batch["x"]).mean()
        train.step(Model(), {"x": numpy.ones((2, 4), numpy.float32)})
        compiling = ("compiler.lowering.lower", "compiler.pipeline.pipeline", "memory.offsets")
        print([name for name in compiling if name in sys.modules])
        others = ("actors.kernels.cuda.", "actors.device.cuda.cu", "actors.testing.")
        assert not [name for name in sys.modules if name.startswith(others)]
        """
    settings = {"ACTORFLOW_CACHE": str(tmp_path), "ACTORFLOW_VERIFY": "0"}
    cold = run_python(program, **settings)
    warm = run_python(program, **settings)
    assert "compiler.lowering.lower" in cold.stdout
    assert warm.stdout.strip().endswith("[]")


def test_import_reads_no_setting(run_python):
    run_python("import actorflow", ACTORFLOW_VERIFY="nonsense", ACTORFLOW_THREADS="many")


def test_every_name_handed_on_that_functional_has_is_that_function():
    import actorflow.jobs.job  # noqa: F401  # what it loads must not hide a function
    from actorflow import functional

    assert {"log", "exp", "dropout", "linear"} <= {*functional.__all__} <= {*af.__all__}
    for name in functional.__all__:
        assert getattr(af, name) is getattr(functional, name), name
