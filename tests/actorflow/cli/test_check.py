"""`actorflow launch --check`: what it prints, and its exit status."""

import os
import subprocess
import sys

import pytest
from launching import free_port

from actorflow.cli.main import main
from actorflow.distributed.rendezvous import write_key_file


@pytest.fixture
def check(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit('the script itself is not run')\n")

    def run(*options):
        command = [sys.executable, "-m", "actorflow", "launch", "--check", *options]
        done = subprocess.run(
            [*command, "-n", "2", str(script)], capture_output=True, text=True, check=False
        )
        return done.returncode, done.stdout.splitlines(), done.stderr.splitlines()

    return run


def test_a_host_that_is_ready_is_listed_and_the_script_is_not_run(check, tmp_path):
    status, out, err = check("--run-dir", str(tmp_path / "runs"))
    assert (status, err) == (0, [])
    assert out[0].split()[:4] == ["host", "name", "address", "cores"]
    assert out[1].startswith("0 ")
    assert out[-1] == "1 host checked: ready"


def test_what_is_wrong_is_the_error_of_the_job(check, tmp_path):
    (tmp_path / "runs").write_text("a file")
    status, out, err = check("--run-dir", str(tmp_path / "runs"))
    assert status == 1
    assert len(out) == 2
    assert err[1] == "actorflow: the check of 1 host found what is wrong:"
    assert err[2].endswith(f"cannot write the run directory {tmp_path / 'runs'}: File exists")


def test_a_run_directory_is_for_a_check_alone(tmp_path, capsys):
    script = tmp_path / "script.py"
    script.write_text("")
    assert main(["launch", "-n", "2", "--run-dir", "runs", str(script)]) == 1
    assert capsys.readouterr().err == (
        "actorflow: --run-dir runs is for --check; a script names its run directory itself, in"
        " fit(checkpoint=...)\n"
    )


def test_ray_finds_the_hosts_itself(tmp_path, capsys):
    script = tmp_path / "script.py"
    script.write_text("")
    options = ["--ray", "auto", "--hosts", "2", "--host-index", "1"]
    assert main(["launch", "-n", "2", *options, str(script)]) == 1
    text = "--host-index is for hosts without Ray: --ray finds them itself"
    assert capsys.readouterr().err == f"actorflow: {text}\n"


@pytest.mark.parametrize("option", ["--host-index", "--coordinator", "--key-file"])
def test_the_word_after_an_option_of_ours_is_its_value_and_no_script(tmp_path, capsys, option):
    script = tmp_path / "script.py"
    script.write_text("")
    value = "1" if option == "--host-index" else "value.py"
    assert main(["launch", "-n", "2", option, value, str(script), "--hosts", "2"]) == 1
    text = f"{option} is for several hosts: give their number by --hosts, too"
    assert capsys.readouterr().err == f"actorflow: {text}\n"


def test_a_launch_leaves_the_environment_of_its_process_as_it_is(tmp_path, monkeypatch):
    monkeypatch.delenv("ACTORFLOW_LOG_DIR", raising=False)
    script = tmp_path / "script.py"
    script.write_text("")
    assert main(["launch", "-n", "1", "--log-dir", str(tmp_path / "logs"), str(script)]) == 0
    assert "ACTORFLOW_LOG_DIR" not in os.environ


def test_a_check_waits_for_hosts_as_long_as_the_variable_says_that_its_error_names(
    tmp_path, monkeypatch, capsys
):
    script, key = tmp_path / "script.py", tmp_path / "key"
    script.write_text("")
    write_key_file(key)
    monkeypatch.setenv("ACTORFLOW_RANK_SECONDS", "0.2")
    port = free_port()
    hosts = ["--hosts", "2", "--host-index", "0", "--coordinator", f"127.0.0.1:{port}"]
    options = ["--check", "-n", "2", *hosts, "--key-file", str(key)]
    assert main(["launch", *options, str(script)]) == 1
    assert capsys.readouterr().err == (
        "actorflow: host 1 of 2 did not connect to the launcher at"
        f" tcp://127.0.0.1:{port} within 0.2 s (ACTORFLOW_RANK_SECONDS)\n"
    )
