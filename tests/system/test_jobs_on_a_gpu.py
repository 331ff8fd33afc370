"""Jobs on GPUs that the host acts: split over devices, asked for this and that, and refused."""

import numpy as np
import pytest
from error_texts import raises

import actorflow as af
from actorflow import nn
from actorflow.cli.main import main
from actors.kernels.common.kernel import KernelNeeds
from actors.kernels.host import catalogue


class Halves(nn.Module):
    def __init__(self):
        self.lower, self.upper = nn.Linear(8, 32), nn.Linear(32, 3)


@pytest.fixture(autouse=True)
def emulated(native_toolchain, monkeypatch):
    monkeypatch.setenv("ACTORFLOW_CUDA", "emulated")


def body(second=None):
    """Return a loss whose second half runs on a device of its own, where one is named."""

    def train(model, batch):
        h = af.gelu(model.lower(batch.x), approximate="tanh")
        if second is None:
            return af.cross_entropy(model.upper(h), batch.y)
        with af.device(second):
            h = model.upper(h)
        return af.cross_entropy(h, batch.y)

    return train


def data():
    x = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)
    return af.data.ArraySource({"x": x, "y": x[:, :3].argmax(1)}, batch=16, seed=1)


def losses(loss=None, **options):
    found = []
    options = options if "devices" in options else {"device": "host"} | options
    job = af.job(loss or body(), optimizer=af.optim.AdamW(3e-3), seed=3, **options)
    job.fit(Halves(), data(), steps=6, progress=False, on_step=lambda _, m: found.append(m["loss"]))
    return found


@pytest.mark.parametrize(
    ("devices", "second"),
    [
        (["host", "cuda"], "cuda:0"),
        (["cuda", "host"], "host:0"),
        (["cuda:0", "cuda:1"], "cuda:1"),
    ],
)
def test_a_job_on_a_gpu_and_another_device_has_the_losses_of_the_host(devices, second):
    assert losses(body(second), devices=devices) == pytest.approx(losses(), rel=1e-5)


def test_what_a_job_is_asked_for_changes_no_bit_on_a_gpu():
    plain = losses(device="cuda")
    assert plain == pytest.approx(losses(), rel=1e-5)
    for asked in (
        {"offload": "optimizer"},
        {"memory_budget": "22KiB"},
        {"recompute": "blocks"},
        {"streams": 2},
    ):
        assert losses(device="cuda", **asked) == plain, asked


def test_a_deterministic_job_takes_ways_of_its_own_that_differ_by_rounding_alone():
    found = losses(device="cuda", deterministic=True)
    assert found == pytest.approx(losses(device="cuda"), rel=1e-5)
    assert found == losses(device="cuda", deterministic=True, recompute="blocks")


def test_products_in_bfloat16_are_as_near_on_a_gpu_as_on_the_host():
    low = losses(device="cuda", precision="bf16")
    assert low == pytest.approx(losses(precision="bf16"), rel=2e-2)
    assert low != losses(device="cuda")


@af.op("x -> y", name="swish_on_a_gpu")
def swish(x):
    return x / (1 + (-x).exp())


@af.numpy_op(lambda x: x, gradient=lambda dy: dy, name="turned_on_a_gpu")
def turned(x, y):
    np.copyto(y, x[::-1])


def test_an_op_by_its_program_runs_on_a_gpu():
    def loss(model, batch):
        return af.cross_entropy(model.upper(swish(model.lower(batch.x))), batch.y)

    assert losses(loss, device="cuda") == pytest.approx(losses(loss), rel=1e-5)


def test_an_op_of_a_numpy_function_is_refused_on_a_gpu_at_its_line_and_runs_beside_it():
    def loss(model, batch):
        return af.cross_entropy(model.upper(turned(model.lower(batch.x))), batch.y)

    with raises(af.CompileError):
        losses(loss, device="cuda")

    def beside(model, batch):
        h = model.lower(batch.x)
        with af.device("host"):
            h = turned(h)
        return af.cross_entropy(model.upper(h.to("cuda")), batch.y)

    found = losses(beside, devices=["cuda:0", "host:0"])
    assert found == pytest.approx(losses(loss), rel=1e-5)


def test_a_kernel_of_the_users_for_the_host_is_not_used_on_a_gpu_and_that_is_said(caplog):
    @af.kernel
    class Wrong:
        name, op = "mine.gelu_beside_a_gpu", "gelu"

        def query(self, attrs, inputs, outputs):
            return KernelNeeds()

        def bind(self, attrs, inputs, outputs, workspace):
            return lambda: outputs[0].fill(7)

    try:
        found = losses(device="cuda")
    finally:
        catalogue.unregister(Wrong.name)
    assert found == losses(device="cuda")
    said = "kernel 'mine.gelu_beside_a_gpu' runs on the host only: on CUDA devices op 'gelu'"
    assert said in caplog.text


SCRIPT = """
import numpy as np
import actorflow as af

@af.job(optimizer=af.optim.SGD(0.1))
def train(model, batch):
    return model(batch.x).mean()

rows = af.data.ArraySource({"x": np.ones((4, 3), np.float32)}, batch=2)
train.fit(af.nn.Linear(3, 2), rows, steps=2)
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    for name in ("DEVICE", "GPU"):
        monkeypatch.setenv(f"ACTORFLOW_{name}", "")  # given back after the test
    file = tmp_path / "job.py"
    file.write_text(SCRIPT)
    return str(file)


def test_a_plan_and_a_run_say_first_that_the_gpu_is_emulated(script, capsys):
    assert main(["plan", "--device", "cuda", script]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert "emulated" in printed[0]
    assert " on cuda:0 (h200): " in printed[1]
    assert main(["run", "--device", "cuda", script]) == 0
    said = "".join(capsys.readouterr()).splitlines()
    assert "emulated" in said[0]
    assert " on cuda:0 (h200), " in said[1]


def test_a_plan_is_made_and_simulated_without_a_gpu(script, monkeypatch, capsys):
    monkeypatch.setenv("ACTORFLOW_CUDA", "")
    given = ["--device", "cuda", "--gpu", "h200", script]
    assert main(["plan", *given]) == 0
    assert " on cuda:0 (h200): " in capsys.readouterr().out.splitlines()[0]
    assert main(["simulate", *given]) == 0
    assert "(rates: the description of h200)" in capsys.readouterr().out


class Wide(nn.Module):
    def __init__(self):
        self.up, self.down = nn.Linear(128, 512), nn.Linear(512, 128)


def compiled_wide(**options):
    @af.job(optimizer=af.optim.AdamW(0.1), device="cuda", gpu="h200", **options)
    def train(model, batch):
        h = model.down(af.gelu(model.up(batch.x), approximate="tanh"))
        return (h * h).mean()

    return train.compile(Wide(), {"x": af.TensorType("float32", (512, 128))})


def test_a_small_model_is_no_larger_for_what_the_library_may_have_for_large_products():
    memory = compiled_wide().memory[0]
    assert memory.peak_workspace_bytes > 0
    assert memory.peak_bytes < 16 << 20


@pytest.mark.parametrize("options", [{"offload": "none"}, {}])
def test_a_budget_below_a_workspace_is_told_whose_it_is(options):
    with pytest.raises(
        af.BudgetError, match=r"matmul' .*\d MiB \([\d,]+ bytes\) of (that|it) as its kernel's work"
    ) as caught:
        compiled_wide(memory_budget="1MiB", **options)
    assert "test_jobs_on_a_gpu.py:" in str(caught.value)
