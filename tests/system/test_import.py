"""Importing is cheap and does nothing."""


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


def test_import_reads_no_setting(run_python):
    run_python("import actorflow", ACTORFLOW_VERIFY="nonsense", ACTORFLOW_THREADS="many")
