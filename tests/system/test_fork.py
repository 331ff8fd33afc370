"""Children of a run: they have no part in it, and are ended like any process."""

import contextlib
import os
import signal

import pytest

from actorflow.checkpoint.manager import CheckpointManager

TRAINING = """
    import multiprocessing, os, signal, sys
    import numpy as np
    import actorflow as af
    from actorflow import nn

    @af.job(optimizer=af.optim.SGD(0.1))
    def train(model, batch):
        return model(batch.x).mean()

    SPEC = {"x": af.TensorType(af.DType.FLOAT32, (4, 2))}
    BATCH = {"x": np.ones((4, 2), np.float32)}

    def endless():
        while True:
            yield BATCH

    def in_child(body):
        '''Run `body` in a forked child, and print what it says.'''
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            try:
                print("child:", body(), flush=True)
            except BaseException as error:
                print(f"child: {type(error).__name__}: {error}", flush=True)
            finally:
                os._exit(0)
        os.waitpid(child, 0)

    def main():
"""


def test_a_run_starts_again_while_orphans_of_the_one_that_was_killed_live(start_python, tmp_path):
    program = start_python(
        TRAINING
        + """
        def forking():
            child = os.fork()
            if child == 0:
                while True:
                    signal.pause()
            yield BATCH
            print("orphan", child, flush=True)
            yield from endless()

        train.fit(nn.Linear(2, 2), af.data.from_iterable(forking, SPEC), steps=10**9,
                  checkpoint="run", progress=False)
    main()
    """
    )
    child = int(program.until("orphan").split()[1])
    program.process.kill()
    program.process.wait(60)
    with CheckpointManager(tmp_path / "run"):
        os.kill(child, 0)  # it lives
    os.kill(child, signal.SIGTERM)
    assert program.process.stdout.read() == "", "the pipe ends with the last process that has it"


def test_workers_of_a_source_can_be_terminated(start_python):
    program = start_python(
        TRAINING
        + """
        def workers():
            with multiprocessing.get_context("fork").Pool(2) as pool:
                for x in pool.imap(np.negative, [BATCH["x"]] * 5):
                    yield {"x": x}
            pool.join()
            print("terminated", flush=True)

        data = af.data.from_iterable(workers, SPEC)
        print(train.fit(nn.Linear(2, 2), data, steps=9, progress=False).last_step, flush=True)
    main()
    """
    )
    program.until("terminated")
    program.until("5")
    assert program.finish() == (0, "", "")


def test_what_an_interrupt_does_to_workers_does_not_hide_that_the_run_was_stopped(
    start_python, tmp_path
):
    program = start_python(
        TRAINING
        + """
        from concurrent.futures import ProcessPoolExecutor

        def workers():
            context = multiprocessing.get_context("fork")
            with ProcessPoolExecutor(2, mp_context=context) as pool:
                for number in range(10**9):
                    yield {"x": pool.submit(np.negative, BATCH["x"]).result()}
                    if number == 20:
                        print("running", flush=True)

        try:
            train.fit(nn.Linear(2, 2), af.data.from_iterable(workers, SPEC), steps=10**9,
                      checkpoint="run", progress=False)
        except af.Stopped as stopped:
            print("stopped", stopped.code, flush=True)
            os._exit(stopped.code)  # an executor whose workers were interrupted may join for ever
    main()
    """,
        start_new_session=True,
    )
    program.until("running")
    os.killpg(program.process.pid, signal.SIGINT)  # as a terminal sends ^C
    assert program.until("stopped") == "stopped 130"
    assert program.process.wait(60) == 130
    with contextlib.suppress(ProcessLookupError):
        os.killpg(program.process.pid, signal.SIGKILL)  # whatever is left of its workers
    assert CheckpointManager(tmp_path / "run").latest().manifest.step >= 20


@pytest.mark.parametrize("native", ["0", "1"])
def test_a_run_that_is_open_is_refused_in_a_forked_child(start_python, native):
    program = start_python(
        TRAINING
        + """
        model = nn.Linear(2, 2)
        first = train.step(model, BATCH)
        in_child(lambda: train.step(model, BATCH))
        in_child(lambda: model.state())
        in_child(lambda: train.fit(model, af.data.from_iterable(endless, SPEC), steps=1))
        assert train.step(model, BATCH)["loss"] < first["loss"], "the parent's goes on"

        stream = train.stream(nn.Linear(2, 2), af.data.from_iterable(endless, SPEC))
        next(stream)
        in_child(lambda: next(stream))
        in_child(lambda: stream.close() or "closed")
        next(stream)
        stream.close()
        train.close(model)
    main()
    """,
        env={"ACTORFLOW_NATIVE": native},
    )
    expected = (
        f"child: ForkedRun: plan 'train' is open in process {program.process.pid}, from which"
    )
    for _ in range(3):
        assert program.until("child:").startswith(expected)
    assert program.until("child:").startswith(expected)
    assert program.until("child:") == "child: closed"
    assert program.finish() == (0, "", "")


@pytest.mark.parametrize("way", ["step", "stream", "fit"])
def test_a_child_with_a_run_that_it_inherited_can_end(start_python, way):
    program = start_python(
        TRAINING
        + f"""
        way = {way!r}
        model = nn.Linear(2, 2)
        data = af.data.from_iterable(endless, SPEC)
        """
        + """
        def fork(*_):
            sys.stdout.flush()
            child = os.fork()
            if child == 0:
                print("child", flush=True)
                sys.exit(3)  # with all that Python does at exit
            print("its code", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)

        if way == "step":
            train.step(model, BATCH)
            fork()
            train.step(model, BATCH)
        elif way == "stream":
            stream = train.stream(model, data)
            next(stream)
            fork()
            next(stream)
        else:
            def fork_at(step, metrics):
                if step == 2:
                    child = multiprocessing.get_context("fork").Process(
                        target=print, args=("child",))
                    child.start()
                    child.join()
            train.fit(model, data, steps=4, on_step=fork_at, progress=False)
            print("its code 3")
    main()
    """
    )
    program.until("child")
    program.until("its code 3")
    assert program.finish() == (0, "", "")


@pytest.mark.no_gpu("a forked child of who used one cannot")
@pytest.mark.parametrize("native", ["0", "1"])
def test_a_forked_child_trains_a_model_of_its_own_to_the_same_numbers(start_python, native):
    program = start_python(
        TRAINING
        + """
        def fit():
            rng = np.random.default_rng(0)
            model = nn.Linear(64, 64)
            model.load({n: rng.normal(size=p.shape).astype(np.float32)
                        for n, p in model.named_parameters()})
            x = rng.normal(size=(256, 64)).astype(np.float32)
            data = af.data.ArraySource({"x": x}, batch=64)
            return train.fit(model, data, steps=20, progress=False).metrics["loss"].hex()

        print("parent:", fit(), flush=True)
        in_child(fit)
        print("parent:", fit(), flush=True)
    main()
    """,
        env={"ACTORFLOW_NATIVE": native, "ACTORFLOW_THREADS": "2"},
    )
    (first, second, third) = [program.until(":").split(": ")[1] for _ in range(3)]
    assert first == second == third
    assert program.finish() == (0, "", "")
