"""The command line: `actorflow run | launch | plan | simulate | pack | bench | ckpt | ...`.

Each command is a few lines over the library; what it prints goes to stdout, errors go to stderr
with exit code 1, and a stop by signal exits with 128 + signal. `actorflow.cli.launch` decides what
is shown of an error of a script that is run here. A plan file is read by `read_plan`, which proves
it, for its hash guards against accidents only. `bench` is in benchmarks/compare of the clone
that this package lies in, and is loaded by path.
"""

from __future__ import annotations

import argparse
import importlib
import io
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from actorflow.cli import (
    completion,
    doctor,
    largest_batch,
    launch,
    memory_map,
    plan_diff,
    plan_page,
    replay,
    report_page,
    runs,
    serve,
    simulate,
    top,
)
from actorflow.cli.inspect import (
    add_ckpt_arguments,
    add_json,
    add_ops_arguments,
    add_pack_arguments,
    run_ops,
    run_pack,
    run_passes,
)
from actorflow.cli.launch import is_of_script, run_script, tell_error
from actorflow.compile.plan_facts import batch_fields
from actorflow.compile.prove import read_plan
from actorflow.data import Tokens
from actorflow.distributed.agreed_plan import classes_of_ranks
from actorflow.environment.host import check_gpu, gpu_of
from actorflow.environment.native import retune
from actorflow.environment.settings import Settings, __version__, devices_named
from actorflow.jobs.job_spec import CapturedPlan, PlanCaptured, capturing_plan
from actorflow.run.devices import device_notice
from actorflow.run.runner import Runner
from compiler.contract.errors import ActorflowError, CompileError
from compiler.contract.files import user_path
from compiler.contract.placement import SINGLE_RANK, RankContext
from compiler.pipeline.printer import facts_of, print_plan, summarise
from memory.report import format_bytes

if TYPE_CHECKING:
    from actorflow.compile.compiling import JobSpec

    _Commands = argparse._SubParsersAction[argparse.ArgumentParser]


TUNE_HELP = "measure again which library multiplies fastest, for every shape"


# `actorflow plan --rank R SCRIPT.py`.

_MOST_ONE_BY_ONE = 8
"""Ranks that are told apart each by its own graph; with an evaluation there is no shorter way."""
_OF_LAUNCH = re.compile(r"-n\d*|--ranks(=.*)?")


def add_argument(parser: argparse.ArgumentParser) -> None:
    """Add the option that says whose plan it is, of the ranks of a job's mesh."""
    text = "plan of this rank of the job's mesh (default 0), made in one process"
    parser.add_argument("--rank", type=int, metavar="R", help=text)


def asked_rank(options: argparse.Namespace, *, is_plan_file: bool) -> RankContext:
    """Return what says whose plan is asked for. Raises CompileError for that of a file."""
    if options.rank is not None and is_plan_file:
        raise CompileError(
            f"--rank {options.rank} is for scripts, and {options.file} is a plan of one rank"
            " already; save that of another from its script"
        )
    return replace(SINGLE_RANK, rank=options.rank or 0)


def check_no_launch(own: Sequence[str], parser: argparse.ArgumentParser) -> None:
    """End with a usage error where the number of ranks stands before a script, as for `launch`."""
    for word in own[1:]:
        if word.endswith(".py"):
            return
        if _OF_LAUNCH.fullmatch(word):
            parser.error(
                f"{own[0]} needs no {word}: the job's mesh sets the number of ranks. plan shows the"
                " plan of one rank, by --rank R (default 0), and simulate runs those of all ranks"
            )


def whose_plan(job_spec: JobSpec) -> str:
    """Return a line that says which rank's plan it is; "" for a job of one rank."""
    ranks = job_spec.hardware.ranks
    if ranks.count == 1:
        return ""
    line = f"rank {ranks.rank} of {ranks.count}"
    if job_spec.evaluation is not None and ranks.count > _MOST_ONE_BY_ONE:
        return line
    classes = classes_of_ranks(job_spec)
    class_size, count = classes.count(classes[ranks.rank]), len({*classes})
    if count == 1:
        return f"{line}, all of which have this plan"
    alike = f"{class_size} ranks have" if class_size > 1 else "it alone has"
    return f"{line}: {alike} this plan, one of {count} classes of ranks"


_OTHERS = (
    ("launch", launch.add_arguments, launch.run,
     "run a script as several ranks: processes of one job"),
    ("pack", add_pack_arguments, run_pack, "place the buffers of a CSV file, with a certificate"),
    ("top", top.add_arguments, top.run, "watch a run: its actors, and what each waits for"),
    ("runs", runs.add_arguments, None, "list and compare runs, or export their weights"),
    ("report", report_page.add_arguments, report_page.run,
     "draw runs as a page: curves, what differs, memory, checkpoints"),
    ("serve", serve.add_arguments, serve.run, "show the pages of runs live, on this machine alone"),
    ("resume", runs.add_resume_arguments, runs.resume,
     "start a run again, by the command that it was started by"),
    ("replay", replay.add_arguments, replay.run,
     "compute a past step of a run again, and show what it read and made"),
    ("ops", add_ops_arguments, run_ops, "print the table of ops and what is known of each"),
    ("passes", add_json, run_passes, "print the passes of the compiler in order"),
    ("doctor", add_json, doctor.run, "report what this machine offers and what slows it down"),
    ("completion", completion.add_arguments, None,
     "print what makes a shell complete commands and options"),
)  # fmt: skip
"""Commands of modules of their own: name, what adds the arguments, what runs, and in words."""

EXAMPLES = {
    "run": "actorflow run --device sim:0 train.py --epochs 3",
    "plan": "actorflow plan train.py --html plan.html",
    "simulate": "actorflow simulate train.py --steps 20 --trace timeline.json",
    "launch": "actorflow launch -n 2 train.py",
    "pack": "actorflow pack buffers.csv --capacity 64MiB",
    "runs": "actorflow runs compare runs/a runs/b",
    "runs ls": "actorflow runs ls runs --json",
    "runs compare": "actorflow runs compare runs/a runs/b --all",
    "runs export": "actorflow runs export runs/a model.safetensors",
    "report": "actorflow report runs/a runs/b --out report.html",
    "serve": "actorflow serve runs --port 0",
    "resume": "actorflow resume runs/a --print",
    "replay": "actorflow replay runs/a --step 1200 --print 'blocks.3.*'",
    "top": "actorflow top runs/a --once",
    "ops": "actorflow ops my_ops.py --full",
    "passes": "actorflow passes --json",
    "doctor": "actorflow doctor --json",
    "completion": "actorflow completion bash >> ~/.bashrc",
    "ckpt": "actorflow ckpt ls runs/a --json",
    "ckpt ls": "actorflow ckpt ls runs/a",
    "ckpt verify": "actorflow ckpt verify runs/a --step 500",
    "ckpt export": "actorflow ckpt export runs/a model.safetensors --model",
    "bench": "actorflow bench mlp gpt",
}
"""A call of each command and action, for its help."""

EXIT_CODES = (
    "exit codes: 0 done; 1 an error, which stderr names; 2 arguments that make no sense;"
    " 128 + N a stop by signal N, or what the script exits with"
)


_PATHS = (
    "file",
    "text",
    "checkpoint",
    "save",
    "memory",
    "html",
    "other",
    "without",
    "trace",
    "run",
    "run_dir",
    "log_dir",
    "directory",
)
"""Options and arguments of all commands that are files or folders."""


_ROOT = Path(__file__).resolve().parents[2]
"""The folder of this package: a clone of the repository, or site-packages."""
_BENCH = "actorflow_bench"
"""What benchmarks/compare is loaded as: `benchmarks` may be a package of somebody else."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    options = parse(list(sys.argv[1:] if arguments is None else arguments))
    runs_script = str(getattr(options, "file", "")).endswith(".py")
    if isinstance(sys.stdout, io.TextIOWrapper) and not runs_script:
        sys.stdout.reconfigure(errors="backslashreplace")  # a name may have letters it lacks
    try:
        code: int = options.command(options)
    except Exception as error:
        if is_of_script(error):
            tell_error(error)
        elif isinstance(error, (ActorflowError, OSError)):
            _report(error)
        else:
            raise
        return 1
    return code


def _report(error: ActorflowError | OSError) -> None:
    if isinstance(error, BrokenPipeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nobody reads any more
    elif isinstance(error, OSError):
        print(f"actorflow: {error.filename or ''}: {error.strerror or error}", file=sys.stderr)
    else:
        print(f"actorflow: {error}", file=sys.stderr)


def _split(
    arguments: list[str], options: Mapping[str, argparse.Action]
) -> tuple[list[str], list[str]]:
    """Return our arguments and those that are surely a script's.

    That is all after `run SCRIPT.py` and `launch SCRIPT.py`, of which a first `--` is ours, and
    else what follows `--`. `options` are those of the command.
    """
    script = _place_of_script(arguments, options)
    if arguments[:1] in (["run"], ["launch"]) and "".join(arguments[script : script + 1]).endswith(
        ".py"
    ):
        rest = arguments[script + 1 :]
        return arguments[: script + 1], rest[1:] if rest[:1] == ["--"] else rest
    if "--" in arguments:
        cut = arguments.index("--")
        return arguments[:cut], arguments[cut + 1 :]
    return arguments, []


def _place_of_script(arguments: list[str], options: Mapping[str, argparse.Action]) -> int:
    """Return where the file of `run` and `launch` stands, after options of ours."""
    place = 1
    while "".join(arguments[place : place + 1]).startswith("-") and arguments[place] != "--":
        option = options.get(arguments[place])
        # An option of one word may have its value in it: -n4, --ranks=4.
        place += 2 if option is not None and option.nargs is None else 1
    return place


def parse(arguments: list[str]) -> argparse.Namespace:
    """Return the options; what `plan` and `simulate` do not know is handed on to their script."""
    if arguments[:1] == ["bench"]:  # has a parser of its own, which is not loaded before
        return argparse.Namespace(command=_bench, rest=arguments[1:])
    parser, commands = _parser()
    command = commands.choices.get("".join(arguments[:1]))
    # argparse tells nobody which of its options take a value, but by this attribute.
    known = {} if command is None else command._option_string_actions
    own_arguments, rest = _split(arguments, known)
    if own_arguments[:1] in (["plan"], ["simulate"]):
        check_no_launch(own_arguments, parser)
    options, unknown = parser.parse_known_args(own_arguments)
    options.other = None
    if options.command is _plan and _is_plan_file(options.file) and len(unknown) == 1:
        options.other = None if unknown[0].startswith("-") else unknown.pop()
    takes_script = options.command in (_plan, _simulate) and not _is_plan_file(options.file)
    if unknown and not takes_script:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    options.rest = [*unknown, *rest]
    for name in _PATHS:
        if isinstance(path := getattr(options, name, None), str):
            setattr(options, name, user_path(path))  # a shell leaves --save=~/x as it is
    return options


def _parser() -> tuple[argparse.ArgumentParser, _Commands]:
    """Return the parser of the command line, and those of its commands."""
    parser = argparse.ArgumentParser(
        prog="actorflow",
        description="Train deep networks with static plans of actors.",
        epilog="The arguments of a script follow its name. For plan and simulate, put -- before"
        f" script arguments that have the name of an option of the command. {EXIT_CODES}.",
    )
    parser.add_argument("--version", action="version", version=f"actorflow {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    run = commands.add_parser("run", help="run a script, or train from a plan file")
    run.add_argument("file", help="a Python script, or a plan file made by 'actorflow plan --save'")
    run.add_argument("--text", help="plan file: train on the bytes of this text file")
    run.add_argument("--steps", type=int, help="plan file: total number of steps")
    run.add_argument("--checkpoint", help="plan file: directory of the run")
    run.add_argument("--seed", type=int, default=0, help="plan file: seed of the run (default 0)")
    _add_device(run, "before SCRIPT: ")
    run.add_argument("--tune", action="store_true", help=f"before SCRIPT: {TUNE_HELP}")
    run.set_defaults(command=_run)

    plan = commands.add_parser(
        "plan", help="show the plan of a script's first fit, or a plan file", allow_abbrev=False
    )
    plan.add_argument("file", help="a Python script or a plan file; two plan files: what changed")
    plan.add_argument("--save", metavar="FILE", help="write the plan to a file")
    _add_device(plan)
    add_argument(plan)
    plan.add_argument("--full", action="store_true", help="print every launch")
    add_json(plan)
    text = "also say the largest batch that fits into this memory, such as 8GiB, without a run"
    plan.add_argument("--largest-batch", metavar="MEMORY", help=text)
    plan.add_argument("--tune", action="store_true", help=TUNE_HELP)
    memory_map.add_arguments(plan)
    plan_page.add_arguments(plan)
    plan.set_defaults(command=_plan)

    simulation = commands.add_parser(
        "simulate", help="predict the timeline of a plan", allow_abbrev=False
    )
    simulation.add_argument("file", help="a Python script or a plan file")
    _add_device(simulation)
    simulate.add_arguments(simulation)
    simulation.set_defaults(command=_simulate)

    for name, add_arguments, command, text in _OTHERS:
        other = commands.add_parser(name, help=text)
        add_arguments(other)
        if command is not None:
            other.set_defaults(command=command)
    add_ckpt_arguments(commands.add_parser("ckpt", help="list, verify or export checkpoints"))
    commands.add_parser("bench", help="compare with other engines, row by row")
    commands.choices["completion"].set_defaults(command=partial(completion.run, parser))
    for name in EXAMPLES:
        command_parser = parser
        for word in name.split():
            command_parser = completion.commands_of(command_parser)[word]
        own = f"{command_parser.epilog} " if command_parser.epilog else ""
        command_parser.epilog = own + epilog_of(name)
    return parser, commands


def epilog_of(command: str) -> str:
    """Return what the help of a command ends in: a call, and what its exit codes mean."""
    return f"Example: {EXAMPLES[command]} ({EXIT_CODES})"


def _add_device(parser: argparse.ArgumentParser, when: str = "") -> None:
    text = "device of jobs that name none: host, cuda, sim, or several: sim:0,sim:1"
    parser.add_argument("--device", metavar="NAME", help=when + text)
    text = "plan jobs on cuda for this GPU, such as h200 (default: the one present)"
    parser.add_argument("--gpu", metavar="NAME", help=when + text)


def _set_device(options: argparse.Namespace) -> None:
    """Let jobs of a script run on a device. Raises CompileError for a plan, which has its own.

    Names are checked here: whoever reads them again knows the variable, and not the option.
    """
    choices = {"device": options.device, "gpu": options.gpu}
    for name, value in choices.items():
        if value is not None and _is_plan_file(options.file):
            raise CompileError(
                f"--{name} {value} is for scripts, and {options.file} is a plan, which is"
                " compiled for its devices; compile the job again with it"
            )
    devices = () if options.device is None else devices_named(options.device, "--device")
    if options.gpu is not None:
        check_gpu(options.gpu, devices, "--gpu")
    os.environ.update({f"ACTORFLOW_{n.upper()}": v for n, v in choices.items() if v is not None})
    Settings.from_env(os.environ)  # raises for another variable that means nothing


def _run(options: argparse.Namespace) -> int:
    _set_device(options)
    _tune(options)
    if not _is_plan_file(options.file):
        run_script(options.file, options.rest)
        return 0
    plan = read_plan(options.file)
    if options.text is None or options.steps is None:
        raise CompileError("a plan file needs --text FILE and --steps N to be trained")
    types, lines = batch_fields(plan)
    if set(types) != {"x", "y"} or len(types["x"].shape) != 2:
        fields = ", ".join(f"{n}: {t} ({lines[n]})" for n, t in types.items())
        raise CompileError(
            f"{options.file} wants the batch {fields}; --text gives x and y of shape [batch, seq]."
            " Use actorflow.Runner(Plan.load(...)).fit(data, ...) with a source of your own"
        )
    batch, seq = types["x"].shape
    tokens = Tokens.from_files(options.text, seq=seq, batch=batch, seed=options.seed)
    runner = Runner(plan, seed=options.seed)
    result = runner.fit(tokens, steps=options.steps, checkpoint=options.checkpoint)
    print(f"{result.last_step} steps done")
    return 0


def _tune(options: argparse.Namespace) -> None:
    """Forget what was measured, where --tune asks for it. Raises CompileError for a plan file."""
    if not options.tune:
        return
    if _is_plan_file(options.file):
        raise CompileError(
            f"--tune chooses kernels, and the kernels of plan {options.file} are already chosen;"
            " give it the script"
        )
    if not retune(Settings.from_env(os.environ)):
        print("actorflow: --tune measures nothing: native kernels are off", file=sys.stderr)


def _plan(options: argparse.Namespace) -> int:
    _set_device(options)
    _tune(options)
    plan_page.check_file(options.html)
    if options.other is not None:
        return _compare(options)
    draw = memory_map.drawing(options, read_plan)
    rank = asked_rank(options, is_plan_file=_is_plan_file(options.file))
    captured = _captured(options, rank)
    plan, job_spec = captured.plan, captured.job_spec
    settings = Settings.from_env(os.environ)
    lines: list[str] = []
    if gpu_of(plan) and (notice := device_notice(plan, settings)):
        lines.append(notice)
    whose = "" if job_spec is None else whose_plan(job_spec)
    lines += [whose] if whose else []
    lines += print_plan(plan) if options.full else summarise(plan)
    if options.save:
        plan.save(options.save)
        lines.append(f"saved to {options.save} ({format_bytes(os.path.getsize(options.save))})")
    if draw is not None:
        lines.append(draw(plan, captured.store_all))
    if options.html:
        prediction = plan_page.predict(plan, options.calibrate)
        lines.append(plan_page.write_page(options.html, plan, prediction, whose))
    if options.largest_batch:
        if captured.plan_for is None:
            raise CompileError("--largest-batch plans a script again; a plan file has its batch")
        types, _ = batch_fields(plan)
        lines += largest_batch.report(types, captured.plan_for, options.largest_batch)
    print(json.dumps(facts_of(plan)) if options.json else "\n".join(lines))
    return 0


def _compare(options: argparse.Namespace) -> int:
    """Say what changed from one plan file to another, and draw the second one where asked to."""
    others = {"--save": options.save, "--memory": options.memory, "--rank": options.rank}
    others["--largest-batch"] = options.largest_batch
    for name, value in others.items():
        if value is not None:
            raise CompileError(f"{name} is for one plan, and two came; give it one of them alone")
    if not _is_plan_file(options.other):
        raise CompileError(
            f"expected a second plan file after {options.file}, came the script {options.other};"
            " save its plan with 'actorflow plan SCRIPT.py --save FILE' first"
        )
    before, after = read_plan(options.file), read_plan(options.other)
    old, new = [plan_page.predict(plan, options.calibrate) for plan in (before, after)]
    diff = plan_diff.compare(before, after, (old.step_ns, new.step_ns))
    lines = diff.lines(is_full=options.full)
    if options.html:
        lines.append(plan_page.write_page(options.html, after, new, diff=diff))
    print(json.dumps(diff.as_json()) if options.json else "\n".join(lines))
    return 0


def _simulate(options: argparse.Namespace) -> int:
    _set_device(options)
    simulate.check_options(options)
    ranks = simulate.ranks_of(options)
    captured = _captured(options, ranks)
    return simulate.run(captured.plan, options, captured.job_spec)


def _captured(options: argparse.Namespace, ranks: RankContext) -> CapturedPlan:
    """Return the plan of a file, or of the first `fit` of a script."""
    file = options.file
    if _is_plan_file(file):
        return CapturedPlan(read_plan(file))
    # What a script prints is no part of an answer for programs.
    aside = redirect_stdout(sys.stderr) if options.json else nullcontext()
    with aside, capturing_plan(ranks):
        try:
            run_script(file, options.rest)
        except PlanCaptured as ended:
            return ended.captured
        except SystemExit as ended:
            if ended.code:
                raise
    raise CompileError(f"{file} ended without calling fit on a job, so there is no plan to show")


def _bench(options: argparse.Namespace) -> int:
    """Hand all words on to the comparison of the clone; 2 where this package is in no clone."""
    folder, project = _ROOT / "benchmarks" / "compare", _ROOT / "pyproject.toml"
    is_clone = project.is_file() and 'name = "actorflow"' in project.read_text("utf-8", "replace")
    if not is_clone or not (folder / "command.py").is_file():
        print(
            f"actorflow: bench needs a clone of the repository: {_ROOT} has no folder"
            " benchmarks/compare\nRun `pip install -e .` in a clone, then `actorflow bench`"
            " again",
            file=sys.stderr,
        )
        return 2
    package = ModuleType(_BENCH)
    package.__path__ = [str(folder)]
    sys.modules[_BENCH] = package
    code: int = importlib.import_module(f"{_BENCH}.command").main(options.rest)
    return code


def _is_plan_file(file: str) -> bool:
    return not file.endswith(".py")
