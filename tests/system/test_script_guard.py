"""A script whose workers import it again is told so: at the line, in the worker and in the run."""

import pytest

SCRIPT = """
import concurrent.futures
import multiprocessing
import os
import numpy as np
import actorflow as af
from actorflow import nn

CONTEXT = multiprocessing.get_context("{method}")


def make_batch(number):
    if number == {last}:
        os._exit(3)
    return {{"x": np.ones((4, 8), np.float32), "y": np.zeros(4, np.int64)}}


def serve(pipe):
    pipe.send(make_batch(0))


def by_executor():
    pool = concurrent.futures.ProcessPoolExecutor(1, CONTEXT)
    return lambda number: pool.submit(make_batch, number).result()


def by_pool():
    pool = CONTEXT.Pool(1)
    return lambda number: pool.apply(make_batch, (number,))


def by_pipe():
    ours, other = CONTEXT.Pipe()
    CONTEXT.Process(target=serve, args=(other,), daemon=True).start()
    other.close()
    return lambda number: ours.recv()


def alone():
    def read(number):
        raise EOFError("a file is cut")

    return read


class Source:
    ask, number = None, 0

    def spec(self):
        return {{
            "x": af.TensorType(af.DType.FLOAT32, (4, 8)),
            "y": af.TensorType(af.DType.INT64, (4,)),
        }}

    def __next__(self):
        self.ask = self.ask or {workers}()
        self.number += 1
        return self.ask(self.number)

    def state(self):
        return {{"number": self.number}}

    def restore(self, state):
        self.number = state["number"]

    def fingerprint(self):
        return "guard"


@af.job(optimizer=af.optim.SGD(0.1))
def train(model, batch):
    return af.cross_entropy(model(batch.x), batch.y)


def main():
    train.fit(nn.Linear(8, 2), Source(), steps=3, progress=False)


{call}
"""

FIT = "train.fit(nn.Linear(8, 2), Source(), steps=3, progress=False{more})"
GUARD = 'if __name__ == "__main__":\n    '


def script(call, workers="by_executor", method="spawn", last=-1):
    """Return the script, and its line of the call."""
    text = SCRIPT.format(call=call, workers=workers, method=method, last=last)
    return text, f"program.py:{text.splitlines().index(call.splitlines()[0]) + 1}"


UNGUARDED = {
    "an executor": (FIT.format(more=""), {}),
    "a server of forks": (FIT.format(more=""), {"method": "forkserver"}),
    "a pipe": (FIT.format(more=""), {"workers": "by_pipe"}),
    "a stream": ("for _ in train.stream(nn.Linear(8, 2), Source()): pass", {}),
    "a function": ("main()", {}),
    "a run directory": (FIT.format(more=', checkpoint="runs/a"'), {}),
    "another test": ("if len(CONTEXT.get_start_method()) > 1: main()", {}),
}


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", UNGUARDED)
def test_a_run_whose_workers_begin_it_again_names_the_line_and_the_guard(run_python, name):
    call, options = UNGUARDED[name]
    text, line = script(call, **options)
    done = run_python(text, check=False)
    assert done.returncode == 1
    first, again = f"{line} is run by whoever imports the script", f"{line} ran in a worker process"
    for note in (first, again):
        (words,) = [x for x in done.stderr.splitlines() if x.startswith(note)]
        assert words.endswith('call that under if __name__ == "__main__":')


def test_workers_that_a_pool_starts_for_ever_name_it_each_time(start_python):
    text, _ = script(FIT.format(more=""), "by_pool")
    program = start_python(text, start_new_session=True)
    for _ in range(2):
        line = next(x for x in program.process.stderr if "ran in a worker process" in x)
        assert 'call that under if __name__ == "__main__":' in line


@pytest.mark.parametrize(
    ("call", "options"),
    [
        (GUARD + FIT.format(more=""), {"last": 2}),
        (GUARD + "main()", {"last": 2, "method": "forkserver"}),
        (FIT.format(more=""), {"workers": "alone"}),
        (FIT.format(more=""), {"last": 2, "method": "fork"}),
    ],
    ids=["a guard", "a guard around a function", "no worker", "workers that import nothing"],
)
@pytest.mark.thinned(2)
def test_an_error_that_has_another_cause_says_nothing_of_a_guard(run_python, call, options):
    done = run_python(script(call, **options)[0], check=False, PYTHONWARNINGS="ignore")
    assert done.returncode == 1
    assert "EOFError" in done.stderr or "BrokenProcessPool" in done.stderr
    assert "the script" not in done.stderr
