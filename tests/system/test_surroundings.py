"""A run goes on when what is around it fails: its output, its log, its files."""

import os

import pytest

import actorflow as af
from actorflow import nn
from actorflow.checkpoint.manager import CheckpointManager
from actorflow.run.report import read_metrics
from compiler.contract.plan import Plan

TRAINING = """
    import logging, os, sys
    import numpy as np
    import actorflow as af
    from actorflow import nn

    class Größe(nn.Module):
        '''Its variables have a letter that ASCII lacks.'''
        def __init__(self):
            self.größe = nn.Linear(2, 2)

        def __call__(self, x):
            return self.größe(x)

    train = af.job(lambda model, batch: model(batch.x).mean(), optimizer=af.optim.SGD(0.1))
    data = af.data.ArraySource({"x": np.ones((8, 2), np.float32)}, batch=4)

    def fit(steps=50, **options):
        return train.fit(Größe(), data, steps=steps, checkpoint="run", every=10, **options)
"""

SCALED = """
import actorflow as af

@af.job(optimizer=af.optim.SGD(0.1))
def scaled(model, batch):
    return model(batch.x).mean()
"""

needs_full = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")


def is_saved(tmp_path, step=50):
    return CheckpointManager(tmp_path / "run").latest().manifest.step == step


@needs_full
def test_a_full_disk_behind_stdout_does_not_end_a_run(start_python, tmp_path):
    with open("/dev/full", "w") as full:
        program = start_python(TRAINING + "    fit()\n", stdout=full)
        code, _, err = program.finish()
    assert (code, err.count("\n")) == (0, 1), err
    assert "progress cannot be written ([Errno 28] No space left on device)" in err
    assert is_saved(tmp_path)


def test_a_reader_that_goes_away_does_not_end_a_run(start_python, tmp_path):
    program = start_python(TRAINING + "    sys.stdin.readline()\n    fit()\n")
    program.process.stdout.close()
    program.process.stdin.write("go on\n")
    program.process.stdin.close()
    err = program.process.stderr.read()
    assert program.process.wait(60) == 0
    assert err.count("progress cannot be written ([Errno 32] Broken pipe)") == 1
    assert is_saved(tmp_path)


def test_a_reader_that_sleeps_does_not_hold_a_run_up(start_python, tmp_path):
    program = start_python(
        TRAINING
        + """
    os.set_blocking(1, False)
    try:
        while True:
            os.write(1, bytes(4096))
    except BlockingIOError:
        os.set_blocking(1, True)
    fit()
    print("done", file=sys.stderr, flush=True)
    """
    )
    assert program.process.stderr.readline() == "done\n"
    assert is_saved(tmp_path)


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    "trouble",
    [
        "os.close(1)", "sys.stdout = None", "sys.stdout.close()",
        "sys.stdout.reconfigure(encoding='ascii')", "sys.stdout = sys.stderr = None",
    ],
)  # fmt: skip
@pytest.mark.parametrize("when", ["before", "in the middle"])
def test_no_state_of_stdout_ends_a_run(start_python, tmp_path, trouble, when):
    trouble = f"exec({trouble!r})"
    call = f"{trouble}\n    fit()" if when == "before" else (
        f"fit(on_step=lambda step, metrics: step == 20 and {trouble})"
    )  # fmt: skip
    program = start_python(TRAINING + f"    {call}\n    os._exit(7)\n")
    code, _, err = program.finish()
    assert code == 7, err
    assert is_saved(tmp_path)


def test_a_program_that_is_started_without_stdout_trains(start_python, tmp_path):
    script = TRAINING + "    assert sys.stdout is None\n    fit()\n"
    program = start_python(script, stdout=None, preexec_fn=lambda: os.close(1))
    assert program.process.wait(60) == 0
    assert is_saved(tmp_path)


def test_letters_that_a_terminal_lacks_are_written_as_numbers(start_python, tmp_path):
    program = start_python(
        TRAINING + "    fit(on_step=lambda *_: None)\n    raise SystemExit\n",
        env={"PYTHONIOENCODING": "ascii", "LC_ALL": "C", "PYTHONUTF8": "0"},
    )
    code, out, err = program.finish()
    assert (code, err) == (0, "")
    assert "step 50/50" in out
    assert is_saved(tmp_path)


def test_the_output_follows_a_stdout_that_is_replaced_in_the_middle(start_python):
    program = start_python(
        TRAINING
        + """
    before = sys.stdout
    def swap(step, metrics):
        if step == 20:
            sys.stdout = open("other.txt", "w")
    fit(on_step=swap)
    sys.stdout.close()
    assert "step 50/50" in open("other.txt").read()
    sys.stdout = before
    print("followed")
    """
    )
    program.until(" parameters on host:0")
    program.until("followed")
    assert program.finish()[0] == 0


def test_a_log_handler_that_raises_does_not_end_a_run(start_python, tmp_path):
    program = start_python(
        TRAINING
        + """
    class Broken(logging.Handler):
        def emit(self, record):
            raise OSError("no room for logs")

    logging.getLogger().addHandler(Broken())
    sys.stdout = None
    fit()
    sys.stdout = open(os.devnull)  # it cannot be written: a warning that no handler takes
    fit(steps=60)
    """
    )
    code, _, err = program.finish()
    assert code == 0, err
    assert "OSError: no room for logs" in err
    assert is_saved(tmp_path, 60)


@needs_full
def test_files_for_people_that_cannot_be_written_do_not_end_a_run(start_python, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").symlink_to("/dev/full")
    (tmp_path / "run" / "status.json.partial").mkdir()
    (tmp_path / "file").write_text("no folder")
    program = start_python(
        TRAINING + "    fit()\n",
        env={"ACTORFLOW_TRACE": "/dev/full", "ACTORFLOW_DUMP": str(tmp_path / "file" / "dump")},
    )
    code, out, err = program.finish()
    assert code == 0, err
    assert (
        "metrics.jsonl cannot be written ([Errno 40] a symbolic link, which is not followed" in out
    )
    assert "rows of metrics are not in" in out
    assert "status.json cannot be written (Is a directory)" in out
    assert "ACTORFLOW_TRACE: cannot write /dev/full: No space left on device" in out
    assert "ACTORFLOW_DUMP: cannot write" in err
    assert is_saved(tmp_path)


def test_a_metrics_file_that_is_writable_again_loses_no_row(start_python, tmp_path):
    (tmp_path / "run").mkdir()
    path = tmp_path / "run" / "metrics.jsonl"
    path.mkdir()  # nothing can be appended to a folder
    program = start_python(
        TRAINING
        + """
    def mend(step, metrics):
        if step == 20:
            os.rmdir("run/metrics.jsonl")
    fit(on_step=mend)
    """
    )
    code, out, err = program.finish()
    assert (code, err) == (0, "")
    assert out.count("metrics.jsonl cannot be written") == 1
    assert [row["step"] for row in read_metrics(path)] == [1, 50]


def test_progress_off_still_warns_in_the_log_of_a_metrics_file(start_python, tmp_path):
    (tmp_path / "run" / "metrics.jsonl").mkdir(parents=True)
    program = start_python(TRAINING + "    fit(progress=False)\n")
    code, out, err = program.finish()
    assert (code, out) == (0, "")
    assert "metrics.jsonl cannot be written" in err


def test_a_script_in_a_folder_whose_name_is_no_text_compiles_and_is_named(tmp_path, monkeypatch):
    """Python has such bytes as surrogates, which no UTF-8 holds: a plan names its lines."""
    monkeypatch.chdir(tmp_path)
    code = compile(SCALED, os.fsdecode(b"caf\xe9/scaled.py"), "exec")
    found = {}
    exec(code, found)
    plan = found["scaled"].compile(nn.Linear(2, 2), {"x": af.TensorType(af.DType.FLOAT32, (4, 2))})
    assert Plan.from_bytes(plan.to_bytes()).fingerprint == plan.fingerprint
    assert "caf?/scaled.py" in {source.file for source in plan.sources}
