"""The files for schedulers: each is read as its scheduler reads it, and its command is run."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from actorflow.cli.main import main

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "cluster"
SBATCH = FOLDER / "slurm.sbatch"
SCRIPT = """
import os
from actorflow.distributed.member import current_rank
print(os.environ["RANK"], current_rank().all_gather_object("say", os.environ["LOCAL_RANK"]))
"""
SRUN = """#!/bin/bash
for node in 1 0; do SLURM_NODEID=$node "$@" & done
wait %1 && wait %2
"""
"""What `srun` does on two nodes, here on one machine."""
RECORDED = f"""#!{sys.executable}
import json, os, sys
names = ("SLURM_NODEID", "MASTER_ADDR", "MASTER_PORT", "ACTORFLOW_KEY_FILE")
row = [sys.argv[1:], {{name: os.environ.get(name, "") for name in names}}]
with open(os.environ["CALLS"], "a") as file:
    file.write(json.dumps(row) + "\\n")
"""


@pytest.fixture
def sbatch(tmp_path):
    """Return a function that runs the sbatch script with a given `actorflow` in its path."""

    def run(actorflow, *arguments):
        tools = {"srun": SRUN, "scontrol": "#!/bin/bash\necho 127.0.0.1\n", "actorflow": actorflow}
        for name, text in tools.items():
            (tmp_path / name).write_text(text)
            (tmp_path / name).chmod(0o755)
        surroundings = {
            "PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path),
            "CALLS": str(tmp_path / "calls"), "RANKS_PER_HOST": "2", "SLURM_NNODES": "2",
            "SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NODELIST": "node[0-1]",
        }  # fmt: skip
        return subprocess.run(
            ["bash", str(SBATCH), *arguments], env={**os.environ, **surroundings},
            capture_output=True, text=True, check=False, cwd=tmp_path,
        )  # fmt: skip

    return run


def test_sbatch_makes_a_key_checks_the_hosts_and_runs_one_launcher_on_each(sbatch, tmp_path):
    done = sbatch(RECORDED, "train.py", "--steps", "3")
    assert (done.returncode, done.stderr) == (0, "")
    calls = [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]
    key = str(tmp_path / f".actorflow-{os.getpid()}.key")
    assert calls[0][0] == ["launch", "--make-key", key]
    launch = ["launch", "--hosts", "2", "-n", "4"]
    by_node = sorted(calls[1:], key=lambda call: (call[0][5] != "--check", call[1]["SLURM_NODEID"]))
    assert [call[0] for call in by_node] == [
        *[[*launch, "--check", "train.py"]] * 2,
        *[[*launch, "train.py", "--steps", "3"]] * 2,
    ]
    port = str(20000 + os.getpid() % 20000)
    for node, (_, variables) in zip([0, 1, 0, 1], by_node, strict=True):
        assert variables == {
            "SLURM_NODEID": str(node), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
            "ACTORFLOW_KEY_FILE": key,
        }  # fmt: skip


@pytest.mark.slow
def test_sbatch_runs_a_script_on_two_hosts(sbatch, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    actorflow = f"{shlex.quote(sys.executable)} -m actorflow"
    # The check would ask for packages of an extra.
    skip = 'for word in "$@"; do [ "$word" = --check ] && exit 0; done'
    link = "export ACTORFLOW_LINK=1:20"  # else it is measured, and told
    done = sbatch(f'#!/bin/bash\n{skip}\n{link}\nexec {actorflow} "$@"\n', "train.py")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "0 ['0', '1', '0', '1']"
    assert not list(tmp_path.glob("*.key"))


def documents(name):
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def test_the_indexed_job_has_as_many_pods_as_the_command_has_hosts():
    service, job = documents("kubernetes-indexed-job.yaml")
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["command"][:4] == ["actorflow", "launch", "--hosts", str(spec["completions"])]
    assert spec["completionMode"] == "Indexed"
    assert spec["parallelism"] == spec["completions"]
    variables = {one["name"]: one["value"] for one in container["env"]}
    name = job["metadata"]["name"]
    assert variables["MASTER_ADDR"] == f"{name}-0.{pod['subdomain']}"
    assert service["metadata"]["name"] == pod["subdomain"]
    assert service["spec"]["selector"] == {"job-name": name}
    install = pod["initContainers"][0]["command"]
    assert install[-1] == variables["ACTORFLOW_KEY_FILE"]


def test_the_ray_job_has_as_many_workers_as_the_command_has_hosts():
    (job,) = documents("rayjob.yaml")
    cluster = job["spec"]["rayClusterSpec"]
    command = shlex.split(job["spec"]["entrypoint"])
    (workers,) = cluster["workerGroupSpecs"]
    assert command[:4] == ["actorflow", "launch", "--ray", "auto"]
    assert command[command.index("--hosts") + 1] == str(workers["replicas"])
    assert cluster["authOptions"] == {"mode": "token"}
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"


def commands():
    (job,) = documents("rayjob.yaml")
    yield shlex.split(job["spec"]["entrypoint"])
    pod = documents("kubernetes-indexed-job.yaml")[1]["spec"]["template"]["spec"]
    yield pod["containers"][0]["command"]


@pytest.mark.parametrize("command", list(commands()), ids=["ray", "kubernetes"])
def test_the_command_of_a_file_is_one_that_launch_takes(command, capsys):
    # The script lies in the image, so what is found missing is that, and no option.
    assert main(command[1:]) == 1
    assert capsys.readouterr().err == "actorflow: /app/ranks.py: no such script\n"


def test_the_image_has_what_the_files_run():
    text = (FOLDER / "Dockerfile").read_text()
    assert "COPY examples /app" in text
    assert "[mpi,ray]" in text
    assert (FOLDER.parent / "ranks.py").is_file()
