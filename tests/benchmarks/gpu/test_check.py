"""The check on a GPU does what it promises where there is none: tried on the emulated driver."""

import importlib.metadata
import json
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock
from zipfile import ZipFile

import pytest
from error_texts import raises
from gpu import check, jobs, launched, opened, planned, replan, section
from gpu.launched import bind_probe
from gpu.predictions import PREDICTIONS
from gpu.results import (
    CheckResult,
    SectionResult,
    Status,
    as_json,
    markdown,
    rows_table,
    table,
)
from gpu.section import SECTIONS, Section
from gpu.sections import rates, rivals, training

from actorflow.environment import host
from actors.device.cuda.cupy_driver import CupyDriver
from actors.device.cuda.nvml import NvmlDevice, NvmlDevices
from actors.kernels.cuda import kernel
from actors.testing.emulated.driver import EmulatedDriver

CHECK = Path(check.__file__)


@pytest.fixture
def sections(tmp_path):
    """Return a function that makes a check of sections with bodies of a test; it returns `main`."""
    package = tmp_path / "bodies" / "gpu" / "sections"
    real = CHECK.parent

    def put(change=tuple, compiling=check.COMPILING, **bodies):
        package.mkdir(parents=True)
        for file in real.glob("*.py"):
            (package.parent / file.name).write_text(file.read_text())
        found = []
        for name, (seconds, is_proof, body) in bodies.items():
            lines = "".join(f"    {line}\n" for line in body.splitlines())
            text = "import os, sys, time\nfrom gpu.section import Skipped\n"
            (package / f"{name}.py").write_text(f"{text}def run(found, place):\n{lines}")
            found.append(Section(name, seconds, name, "of a test", False, is_proof))
        lines = ", ".join(repr(s) for s in found)
        text = (package.parent / "section.py").read_text()
        # Before the function whose default it is.
        text = text.replace(
            "\n\ndef find_section(", f"\n\nSECTIONS = ({lines},)\n\n\ndef find_section("
        )
        (package.parent / "section.py").write_text(text)
        program = check.Program(change(found), package.parents[1], compiling)
        return partial(check.main, program=program)

    return put


def statuses(out):
    found = json.loads((out / "check.json").read_text())
    return {s["name"]: s["status"] for s in found["sections"]}


def test_a_section_that_hangs_or_dies_does_not_stop_the_others(sections, tmp_path, capsys):
    main = sections(
        hangs=(0.4, True, "found.metric('seen', 3)\ntime.sleep(60)"),
        dies=(5, False, "os._exit(7)"),
        fails=(5, False, "found.check('two is one', 2 == 1, 2, 1)"),
        skips=(5, True, "raise Skipped('of no reason')"),
        holds=(5, True, "found.within('small', 0.5, 1)"),
    )
    began = time.monotonic()
    assert main([str(tmp_path / "out")]) == 1
    assert time.monotonic() - began < 20
    assert statuses(tmp_path / "out") == {
        "hangs": "timeout",
        "dies": "error",
        "fails": "fail",
        "skips": "skipped",
        "holds": "ok",
    }
    found = json.loads((tmp_path / "out" / "check.json").read_text())
    assert found["sections"][0]["metrics"] == {"seen": 3.0}
    printed = capsys.readouterr().out
    assert "FAIL hangs: timeout" in printed
    assert "FAIL fails: two is one: 2, allowed 1" in printed
    assert "dies" not in "".join(line for line in printed.splitlines() if "FAIL" in line)


def test_a_run_in_which_all_holds_ends_with_0_and_few_files(sections, tmp_path):
    main = sections(
        holds=(5, True, "found.check('it', True)"), skips=(5, True, "raise Skipped('so')")
    )
    assert main([str(tmp_path / "out")]) == 0
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["check.json", "check.log", "check.md"]


def test_a_part_that_fails_is_a_failed_check_and_the_next_one_runs(sections, tmp_path):
    first = "with found.part('first'):\n    [][0]\n"
    main = sections(
        parts=(5, True, f"{first}with found.part('next'):\n    found.metric('seen', 1)")
    )
    assert main([str(tmp_path / "out")]) == 1
    (found,) = json.loads((tmp_path / "out" / "check.json").read_text())["sections"]
    assert found["metrics"] == {"seen": 1.0}
    assert [(c["name"], c["ok"], c["value"]) for c in found["checks"]] == [
        ("first", False, "IndexError: list index out of range")
    ]


@pytest.mark.parametrize("told", ["", "place.tell('cudnn_holds', True)", "os._exit(1)"])
def test_plans_use_cudnn_where_it_was_found_to_be_right(sections, tmp_path, told):
    main = sections(
        kernels=(5, False, "place.tell('cudnn_holds', False)\n" * bool(told) + told),
        later=(5, False, "found.fact('cudnn', os.environ.get('ACTORFLOW_CUDNN'))"),
    )
    main([str(tmp_path / "out")])
    later = json.loads((tmp_path / "out" / "check.json").read_text())["sections"][1]
    assert later["facts"] == {"cudnn": "0" if told == "os._exit(1)" else "None"}


@pytest.mark.parametrize("chosen", [[], ["proves"], ["measures", "rivals"]])
def test_rivals_are_compiled_beside_proofs_and_not_beside_what_is_measured(
    sections, tmp_path, chosen
):
    pid = tmp_path / "pid"
    body = f"""
try:
    with open({str(pid)!r}) as file:
        os.kill(int(file.read()), 0)
    found.fact("compiles", True)
except (FileNotFoundError, ProcessLookupError):
    found.fact("compiles", False)"""
    wait = f"while not os.path.exists({str(pid)!r}):\n    time.sleep(0.01)"
    compiles = not chosen
    main = sections(
        lambda found: (replace(found[0], shares_card=True), *found[1:]),
        tmp_path / "compiling.py",
        proves=(60, True, wait * compiles + body),
        measures=(60, False, body),
        rivals=(60, False, body),
    )
    script = tmp_path / "compiling.py"
    script.write_text(
        "import os, time\n"
        f"with open({str(pid)!r} + '.new', 'w') as file:\n    file.write(str(os.getpid()))\n"
        f"os.rename({str(pid)!r} + '.new', {str(pid)!r})\n"
        "time.sleep(600)\n"
    )
    main([str(tmp_path / "out"), *chosen])
    found = json.loads((tmp_path / "out" / "check.json").read_text())["sections"]
    seen = {s["name"]: s["facts"]["compiles"] for s in found}
    assert seen == {name: str(compiles and name == "proves") for name in seen}


def test_sections_are_chosen_by_name_and_an_unknown_one_is_refused(sections, tmp_path, capsys):
    main = sections(one=(5, True, "pass"), other=(5, True, "pass"))
    assert main([str(tmp_path / "out"), "other"]) == 0
    assert [*statuses(tmp_path / "out")] == ["other"]
    assert main([str(tmp_path / "out"), "third"]) == 2
    assert "there is no section 'third': one, other" in capsys.readouterr().err


def test_what_comes_later_keeps_its_time():
    run = check.Run(Path(), Path(), time.monotonic() + 100, False, NvmlDevices())
    first, second, third = (
        Section(n, s, n, "")
        for n, s in (
            (
                "a",
                10,
            ),
            ("b", 40),
            ("c", 60),
        )
    )
    assert run.limit_s(first, []) == pytest.approx(
        run.ends - check.REPORT_S - time.monotonic(), abs=1
    )
    assert run.limit_s(first, [second]) == pytest.approx(20, abs=1)
    assert run.limit_s(second, [first]) == pytest.approx(80, abs=1)
    assert run.limit_s(second, [third]) == pytest.approx(30, abs=1)
    assert run.limit_s(third, [second, third]) == 1.0


def test_all_sections_fit_into_five_minutes_and_halves_into_a_half_with_time_to_report():
    assert sum(s.seconds for s in SECTIONS) + check.REPORT_S <= check.TOTAL_S < 300
    for half in (1, 2):
        seconds = [s.seconds for s in SECTIONS if s.half == half]
        assert sum(seconds) + check.REPORT_S <= check.HALF_S <= 150
    assert all(s.half == 1 for s in SECTIONS if s.is_proof)


def test_a_half_has_its_sections(sections, tmp_path):
    main = sections(
        lambda found: tuple([replace(s, half=n) for n, s in enumerate(found, 1)]),
        one=(5, True, "pass"), other=(5, True, "found.metric('left', place.left_s)"),
    )  # fmt: skip
    assert main([str(tmp_path / "out"), "--half", "2"]) == 0
    assert [*statuses(tmp_path / "out")] == ["other"]
    (found,) = json.loads((tmp_path / "out" / "check.json").read_text())["sections"]
    assert 100 < found["metrics"]["left"] < check.HALF_S


def test_without_a_gpu_sections_of_one_are_skipped_and_say_why():
    without = check.Run(Path(), Path(), 0, False, NvmlDevices(problem="no driver is here"))
    here = NvmlDevices((NvmlDevice("NVIDIA H200", "GPU-1", (9, 0), 1 << 37),))
    beside = check.Run(Path(), Path(), 0, False, here)
    skipped = [s.name for s in SECTIONS if without.why_skipped(s)]
    assert skipped == [s.name for s in SECTIONS if s.name not in ("versions", "texts")]
    assert without.why_skipped(SECTIONS[-1]) == "no device: no driver is here"
    assert not any(beside.why_skipped(s) for s in SECTIONS)


@pytest.mark.parametrize(
    ("name", "planned"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 PCIe", "h200"),
        (None, "h200"),
    ],
)
def test_plans_are_for_the_card_that_is_here(monkeypatch, name, planned):
    gpus = () if name is None else (NvmlDevice(name, "GPU-1", (9, 0), 80 << 30),)
    monkeypatch.delenv("ACTORFLOW_CUDA", raising=False)
    monkeypatch.setattr(host, "listed_gpus", lambda environ: NvmlDevices(gpus))
    assert opened.planned_gpu() == planned


def test_calls_that_are_counted_are_calls_of_every_driver():
    for kind in (CupyDriver, EmulatedDriver):
        assert [name for name in opened.COUNTED if not hasattr(kind, name)] == []


def a_result(measured, checks=(), **more):
    metrics = {
        p.name.partition("/")[2]: measured for p in PREDICTIONS if p.name.startswith("ours/")
    }
    ours = SectionResult("ours", Status.OK, 1.0, False, metrics, {}, checks)
    return CheckResult({"gpu": "a GPU"}, (ours,), **more)


def test_each_prediction_has_its_verdict():
    words = {v.prediction.name: v.word for v in a_result(1.0).verdicts}
    assert words["ours/loader"] == "hit"
    assert words["ours/gpt2-b64_tokens_s"] == "miss"
    assert words["texts/compile_s"] == "not measured"
    assert {v.word for v in a_result(1.0, is_emulated=True).verdicts} == {"not measured"}


@pytest.mark.parametrize(
    ("counting", "count"), [("print(2)", 2), ("print(0)", 0), ("raise OSError", 0), ("", 0)]
)
def test_a_gpu_that_nothing_lists_is_found_by_cuda_itself(counting, count):
    here = check.gpus_here(counting, lambda environ: NvmlDevices(problem="no list is here"))
    assert len(here.gpus) == count
    assert here.problem == ("" if count else "no list is here")


@pytest.mark.parametrize(
    ("last", "apart"), [(0.02, 0.0), (0.0202, 1e-4), (float("nan"), float("nan"))]
)
def test_losses_lie_apart_by_the_largest_of_them(last, apart):
    here, there = [training.Trained((2.0, 0.5, end), "") for end in (0.02, last)]
    assert training.losses_apart(here, there) == pytest.approx(apart, nan_ok=True)


def test_predictions_are_of_sections_that_there_are_and_of_ranges():
    names = [p.name for p in PREDICTIONS]
    assert len({*names}) == len(names)
    assert {name.partition("/")[0] for name in names} <= {s.name for s in SECTIONS}
    assert all(p.low <= p.high and p.why for p in PREDICTIONS)


def test_the_last_table_has_forty_lines_at_most_and_ends_with_what_failed():
    checks = [
        {"name": f"check {i}", "ok": False, "value": "x" * 200, "limit": ""} for i in range(30)
    ]
    sections = [
        SectionResult(f"number {i}", Status.OK, 1.0, False, {"metric": 1.0}) for i in range(20)
    ]
    result = a_result(1e9, checks)
    lines = table(replace(result, sections=(*sections, *result.sections))).splitlines()
    assert len(lines) == 40
    assert max(map(len, lines)) <= 110
    assert lines[-1].startswith("FAIL ours: check 19")
    assert any("more in check.md" in line for line in lines)


def test_the_page_holds_what_the_json_holds():
    checks = [{"name": "a|b", "ok": False, "value": "3", "limit": "2"}]
    result = a_result(2.0, checks)
    assert "| a/b | **NO** | 3 | 2 |" in markdown(result)
    assert as_json(result)["failures"] == ["ours: a|b: 3, allowed 2"]
    assert len(as_json(result)["predictions"]) == len(PREDICTIONS)


def test_the_table_of_rows_comes_last_and_names_the_best_rival():
    def row(name, ms):
        numbers = {"": ms, "limit_": 5.0, "simulated_": 9.0}
        times = {f"{name}_{kind}ms": value for kind, value in numbers.items()}
        return times | {f"{name}_real_gib": 2.0, f"{name}_items": 640}

    ours = row("gpt2-b6", 10.0) | row("gpt2-b64", 20.0)
    times = {"gpt2-b6_ms": 30.0, "gpt2-b6_reduce-overhead_ms": 8.0, "gpt2-b6_default_first_steps_s":
             1.0, "gpt2-b6_reduce-overhead_peak_gib": 4.0}  # fmt: skip
    found = {"ours": ours, "rivals": times}
    sections = [SectionResult(n, Status.OK, 1.0, False, m) for n, m in found.items()]
    result = CheckResult({}, tuple(sections))
    assert rows_table(result)[2:] == [
        "| gpt2-b6 | 64,000 | 10.000 | 0.90 | 5.000 | 0.50 | 8.000 | reduce-overhead | 0.80 |"
        " 2.00 | 4.00 |",
        "| gpt2-b64 | 32,000 | 20.000 | 0.45 | 5.000 | 0.25 |  | none timed |  | 2.00 |  |",
    ]
    assert markdown(result).endswith("\n".join(rows_table(result)) + "\n")
    assert rows_table(CheckResult({})) == []


RIVAL = """
import json, sys, time
name, variant = sys.argv[1:]
if name == "lstm":
    sys.exit("lstm fell")
if variant == "default":
    time.sleep({late})
print("noise")
print("rival:", json.dumps({{"losses": [1.0] * 5, "first_steps_s": 1, "settings": variant}}))
sys.stdout.flush()
sys.stdin.readline()
print("rival:", json.dumps({{"step_s": 0.5, "peak_bytes": 1 << 30}}), flush=True)
time.sleep(60)
"""


def test_rivals_are_timed_when_they_are_ready_late_ones_last(monkeypatch, tmp_path):
    script = tmp_path / "rival.py"
    script.write_text(RIVAL.format(late=1.5))
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "9")
    wave = ("gpt2-b64", "default"), ("tiny", "eager"), ("lstm", "eager"), ("gpt2-b8", "eager")
    waves = (wave, (("bert-base", "eager"),) * 40)
    place = section.Place("rivals", tmp_path, False, time.monotonic() + 20)
    place.tell("losses-gpt2-b8", [2.0] * 5)
    found = section.Findings(tmp_path / "found.json")
    rivals.run(found, place, rivals.Timing(waves, script, wave_s=1.0, timed_s=0.5))
    timed = [name for name in found.metrics if name.endswith("_ms")]
    assert timed == ["tiny_ms", "gpt2-b64_default_ms"]
    assert found.metrics["gpt2-b64_default_peak_gib"] == 1
    assert found.facts["lstm eager"] == "not ready in time: lstm fell"
    assert [(c["name"], c["ok"]) for c in found.checks] == [
        ("gpt2-b8: losses of 5 steps by ours", False)
    ]
    assert found.facts["no time was left for"].startswith("bert-base eager, ")


def test_what_torch_is_timed_at_is_measured_of_ours_too():
    timed = {name for wave in rivals.WAVES for name, _ in wave}
    assert timed == {*jobs.MEASURED}
    assert [name for name, _ in rivals.WAVES[0]] == [*jobs.MEASURED]


def test_the_limit_of_a_step_is_its_products_at_the_ceiling_or_more(tmp_path):
    place = section.Place("ours", tmp_path, True)
    row, precision = jobs.measured_rows(is_tiny=True)[1]
    plan = planned.plan_of(row, precision)
    place.tell(section.CEILINGS, {"product": 1e9, "copy": 1e18})
    work = sum(planned.work_of(bound) for bound in planned.bound_launches(plan))
    assert planned.limit_s(plan, place) == pytest.approx(work / 1e9, rel=0.01)
    place.tell(section.CEILINGS, {"product": 1e18, "copy": 1e3})
    sizes = [
        v.type.size_bytes for b in planned.bound_launches(plan) for v in (*b.inputs, *b.outputs)
    ]
    assert 0.8 < planned.limit_s(plan, place) / (sum(sizes) / 1e3) <= 1


def test_the_picture_is_drawn_of_what_was_measured(tmp_path):
    pytest.importorskip("matplotlib")
    from gpu.picture import write_png

    assert write_png(a_result(1.0), tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 5000
    assert not write_png(CheckResult({}), tmp_path / "b.png")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_on_the_emulated_driver_all_that_is_tried_holds(native_toolchain, tmp_path, capsys):
    assert check.main([str(tmp_path / "out"), "--emulated"]) == 0, capsys.readouterr().out
    found = statuses(tmp_path / "out")
    assert {name for name, status in found.items() if status == "ok"} >= {
        "kernels", "training", "faults", "rates", "ceilings", "copies", "products", "ours",
    }  # fmt: skip
    assert found["rivals"] == "skipped"
    seen = json.loads((tmp_path / "out" / "check.json").read_text())
    assert {p["verdict"] for p in seen["predictions"]} == {"not measured"}
    rates = json.loads((tmp_path / "out" / "h200.json").read_text())
    assert {*json.loads((Path(kernel.__file__).with_name("h200.json")).read_text())} < {*rates}
    assert len(rates["measured"]) > 30


@pytest.fixture
def measured():
    """Return a function that fits rates to launches that took `times` as long as was planned."""

    def fit(times):
        found, took = rates.Rates(kernel.gpu_named("h200")), {}
        for probe in (*rates.PRODUCTS, rates.GELUS):
            bound = bind_probe(mock.Mock(), probe, 1 << 40)
            work_ns = bound.planned_ns - found.gpu.call_ns
            took[probe.name] = bound, found.gpu.call_ns + times * work_ns
        rates.fit_rates(found, took)
        return found, took

    return fit


def test_rates_of_launches_that_take_twice_as_long_are_half(measured):
    found, _ = measured(2.0)
    before, after = found.gpu.product_flops_per_ns, found.changed["product_flops_per_ns"]
    assert after == pytest.approx({n: rate / (1 + (n != "float64")) for n, rate in before.items()})
    assert found.changed["flops_per_ns"] == pytest.approx(found.gpu.flops_per_ns / 2, rel=0.5)


def test_what_was_measured_is_a_description_that_plans_can_be_made_for(measured):
    found, took = measured(1.25)
    found.changed["narrow_rates"] = {1: 0.1, 2: 0.2, 4: 0.3, 8: 0.4, 16: 0.5}
    gpu = kernel.described_gpu(json.dumps(found.description(took, "a card")).encode())
    assert gpu.narrowness(2) == 5
    assert gpu.narrowness(32) == 2
    assert gpu.says == found.gpu.says
    assert gpu.product_flops_per_ns["bfloat16"] == pytest.approx(770e3 / 1.25, rel=1e-3)


def test_what_was_measured_is_held_against_the_plans_of_today(monkeypatch, tmp_path, capsys):
    ours = {"lstm_ms": 8.0, "lstm_simulated_ms": 1.0, "lstm_items": 3}
    facts = {"layer norm 65536x768": "100.0 us, planned 1.0", "of another day": "1.0 us, planned"}
    found = [("ours", ours, {}), ("rates", {}, facts)]
    sections = [{"name": n, "metrics": m, "facts": f} for n, m, f in found]
    (tmp_path / "check.json").write_text(json.dumps({"sections": sections}))
    monkeypatch.setattr("sys.argv", ["replan.py", str(tmp_path), "--gpu", "h200"])
    for name in ("GPU", "CUDNN", "CACHE"):
        monkeypatch.setenv(f"ACTORFLOW_{name}", "")  # given back after the test
    assert replan.main() == 0
    cells = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if "00 |" in line]
    assert [(row[1], row[3]) for row in cells] == [
        ("8.000", "lstm |"),
        ("100.000", "layer norm 65536x768 |"),
    ]
    assert all(float(row[2]) == pytest.approx(float(row[0][2:]) * float(row[1]), rel=0.05)
               for row in cells)  # fmt: skip


def test_launches_of_probes_lie_apart_and_inputs_as_they_say():
    bound = bind_probe(mock.Mock(), rates.PRODUCTS[3], 1 << 40)
    a, b = bound.inputs
    assert (a.address, b.address) == (1 << 40, (1 << 40) + 2 * 65_536 * 768)
    assert (a.strides_bytes, b.strides_bytes) == ((1536, 2), (2, 1536))
    both = launched.Probe("two", rates.PRODUCTS[0].inputs, lambda emit, a, b: (
        *emit("matmul", a, b), *emit("matmul", b, a)))  # fmt: skip
    with raises(ValueError):
        bind_probe(mock.Mock(), both, 0)


def test_the_command_takes_wheels_from_a_folder_and_goes_on_without_the_rest(tmp_path):
    info = "nvidia_cudnn_frontend-9.9.dist-info"
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with ZipFile(wheels / "nvidia_cudnn_frontend-9.9-py3-none-any.whl", "w") as wheel:
        wheel.writestr("cudnn_of_a_test.py", "")
        wheel.writestr(f"{info}/METADATA", "Name: nvidia-cudnn-frontend\nVersion: 9.9\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    done = subprocess.run(
        ["bash", str(CHECK.with_name("check.sh")), str(tmp_path / "out"), "versions", "faults"],
        env={"PATH": "/usr/bin:/bin", "PYTHON": sys.executable, "WHEELS": str(wheels)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert statuses(tmp_path / "out") == {"versions": "skipped", "faults": "skipped"}
    assert "faults     skipped     0.0           no device" in done.stdout
    found = json.loads((tmp_path / "out" / "check.json").read_text())
    assert found["sections"][0]["facts"]["nvidia-cudnn-frontend"] == "9.9"
    assert "going on without nvidia-cublas" in done.stderr
