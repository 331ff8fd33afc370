"""Programs of tests end with the run, also where that is killed; ^C works wherever it began."""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import guard
import pytest

RUN = """
import os, subprocess, sys
os.environ.pop("TESTS_OF_RUN", None)
sys.path.insert(0, sys.argv[1])
import guard
held = guard.start()
program = subprocess.Popen(["sleep", "600"], start_new_session=True)
print(program.pid, flush=True)
sys.stdin.read()
"""

pytestmark = pytest.mark.skipif(
    not hasattr(os, "pidfd_open") or not Path("/proc/self/environ").exists(),
    reason="programs are found in Linux' /proc",
)


@pytest.mark.parametrize("end", ["killed", "finished"])
def test_a_program_that_a_run_leaves_is_killed(end):
    run = subprocess.Popen(
        [sys.executable, "-c", RUN, str(Path(guard.__file__).parent)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    program = os.pidfd_open(int(run.stdout.readline()))
    if end == "killed":
        run.kill()
    run.communicate()
    ready, _, _ = select.select([program], [], [], 60)
    os.close(program)
    assert ready == [program]


SUITE = """
import os, subprocess, sys
os.environ.pop("TESTS_OF_RUN", None)
sys.path.insert(0, sys.argv[1])
import suite

def run(*_):
    program = subprocess.Popen(["sleep", "600"], start_new_session=True)
    print(program.pid, flush=True)
    program.wait()

suite.run = run
suite.run_all("merge", [(suite.MERGE[0], [])], "", "1", [])
"""


def test_a_run_of_tests_ends_with_the_command_that_started_it():
    command = [sys.executable, "-c", SUITE, str(Path(__file__).parent)]
    suite = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    suite.stdout.readline()
    program = os.pidfd_open(int(suite.stdout.readline()))
    suite.kill()
    suite.communicate()
    ready, _, _ = select.select([program], [], [], 60)
    os.close(program)
    assert ready == [program]


def test_only_what_is_marked_is_found():
    mark = "of-this-test-alone"
    commands = [{**os.environ, guard.MARK: mark}, {**os.environ, guard.MARK: mark + "-not"}]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    programs = [subprocess.Popen(["cat"], env=env, **pipes) for env in commands]
    try:
        for program in programs:  # until it says something its environment may not be there yet
            program.stdin.write(b"there\n")
            program.stdin.flush()
            program.stdout.readline()
        assert guard.marked(mark) == [programs[0].pid]
        guard.kill_marked(mark)
        assert programs[0].wait(60) == -signal.SIGKILL
        assert programs[1].poll() is None
    finally:
        for program in programs:
            program.kill()
            program.communicate()


def test_a_run_has_one_guard():
    assert guard.MARK in os.environ
    assert guard.start() is None


PROGRAM = """
import signal
ints, hups = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGHUP)
print(ints is signal.default_int_handler, hups == signal.SIG_DFL)
"""


def test_programs_of_tests_have_ctrl_c_and_hangup_however_the_run_was_started():
    program = [sys.executable, "-c", PROGRAM]
    told = subprocess.run(program, capture_output=True, text=True, check=True).stdout
    assert told == "True True\n"
