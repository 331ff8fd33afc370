"""Eager tensors: their values, gradients, control flow, state, and what is refused."""

import gc
import tracemalloc
from functools import partial

import numpy as np
import pytest
from error_texts import raises

import actorflow as af
from actorflow import nn
from actorflow.eager_mode.blocks import Pool
from actors.kernels.common.host_memory import allocate
from compiler.contract.placement import Memory

pytestmark = pytest.mark.host("eager mode computes on the host")

X = np.arange(6, dtype=np.float32).reshape(2, 3)


class Counting(nn.Module):
    """A model with a buffer that each call changes."""

    def __init__(self):
        self.linear = nn.Linear(3, 2)
        self.mean = nn.Buffer((3,))
        self.calls = nn.Buffer((), dtype="int64")

    def __call__(self, x):
        self.mean.assign(self.mean * 0.5 + x.mean(0))
        self.calls.assign(self.calls + 1)
        return self.linear(x - self.mean)


def test_a_tensor_has_values():
    with af.eager():
        x = af.ones((2, 3)) * X
        total = x.sum()
        assert (float(total), int(total), total.item(), bool(total > 1.0)) == (15.0, 15, 15.0, True)
        assert x[1].tolist() == [3.0, 4.0, 5.0]
        assert [float(row.sum()) for row in x] == [3.0, 12.0]
        assert len(x) == 2
        assert [10, 20, 30][x.argmax(1)[0]] == 30
        np.testing.assert_array_equal(np.asarray(x.T), X.T)
        assert f"{total:.2f}" == "15.00"
        assert repr(x[0]) == "Tensor([0., 1., 2.], float32[3])"
        array = x.numpy()
        array[:] = 7.0
        np.testing.assert_array_equal(x.numpy(), X)


def test_values_decide_what_runs():
    with af.eager():
        x, steps = af.ones((3,)), 0
        while x.sum() < 20.0:
            x, steps = x * 2.0, steps + 1
        assert steps == 3
        # A list of Python, chosen by a tensor of one integer.
        assert ["a", "b"][af.ones((), dtype="int64")] == "b"


def test_gradients_of_gradients_are_those_of_the_formula():
    with af.eager():
        x = af.ones((2, 3)) * X
        (slope,) = af.grad((x**3.0).sum(), [x])
        (curve,) = af.grad((slope * slope).sum(), [x])
    np.testing.assert_allclose(slope.numpy(), 3.0 * X**2, rtol=1e-6)
    np.testing.assert_allclose(curve.numpy(), 36.0 * X**3, rtol=1e-6)


def test_a_detached_tensor_has_no_gradient():
    with af.eager():
        x = af.ones((3,))
        (slope,) = af.grad((x * (x * 2.0).detach()).sum(), [x])
        assert slope.tolist() == [2.0, 2.0, 2.0]


def test_a_loop_runs_by_its_kernel_and_has_a_gradient():
    with af.eager():
        x = af.ones((4, 2))
        last, sums = af.scan(lambda carry, row: (carry + row * row,) * 2, af.zeros((2,)), x)
        (slope,) = af.grad(last.sum(), [x])
        assert (last.tolist(), sums[1].tolist()) == ([4.0, 4.0], [2.0, 2.0])
        np.testing.assert_array_equal(slope.numpy(), np.full((4, 2), 2.0))
        chosen = af.cond(last.sum() > 1.0, lambda v: v * 2.0, lambda v: v, last)
        assert chosen.tolist() == [8.0, 8.0]
        doubled = af.while_loop(lambda v: v.sum() < 100.0, lambda v: v * 2.0, last)
        assert doubled.tolist() == [64.0, 64.0]


def test_an_assignment_to_a_buffer_takes_effect_at_once():
    model = Counting()
    with af.eager():
        model(af.ones((2, 3)) * X)
        assert model.calls.data == 1
        np.testing.assert_array_equal(model.mean.data, X.mean(0))
        model(af.ones((2, 3)) * X)
        assert int(model.calls) == 2
        np.testing.assert_array_equal(model.mean.data, X.mean(0) * 1.5)


def test_gradients_flow_through_an_assignment_within_a_call():
    def compute(model, batch):
        return {"slope": af.grad(model(batch.x).sum(), [batch.x])[0]}

    model, other = Counting(), Counting()
    planned = af.job(compute, train=False).step(model, {"x": X})
    eager = af.eager(compute, train=False)(other, {"x": X})
    np.testing.assert_allclose(eager["slope"].numpy(), planned["slope"], rtol=1e-6)


def test_parameters_are_read_as_they_are_now():
    model = nn.Linear(3, 1)
    with af.eager():
        x = af.ones((1, 3))
        model(x)
        model.weight.data = np.full((1, 3), 2.0, np.float32)
        model.bias.data = np.zeros(1, np.float32)
        assert model(x).item() == 6.0
        assert float(model.bias) == 0.0


def test_each_call_is_a_step_of_random_numbers_as_in_a_job():
    def drawn(model, batch):
        return {"numbers": af.rand(4) + af.dropout(batch.x, 0.5)}

    batch = {"x": np.ones(4, np.float32)}
    job = af.job(drawn, train=False, seed=3)
    eager = af.eager(drawn, train=False, seed=3)
    model = nn.Linear(1, 1)
    for _ in range(2):
        planned = job.step(model, batch)["numbers"]
        np.testing.assert_array_equal(eager(model, batch)["numbers"].numpy(), planned)
    with af.eager(seed=3):
        first, second = af.rand(4).numpy(), af.rand(4).numpy()
    assert not np.array_equal(first, second)


def trained(model, steps):
    """Run steps of gradient descent in a block, by hand."""
    with af.eager():
        for _ in range(steps):
            loss = (model(af.ones((2, 3)) * X) ** 2.0).mean()
            slopes = af.grad(loss, model)
            for path, parameter in model.named_parameters():
                parameter.data = (parameter - slopes[path] * 0.01).numpy()
        return float(loss)


def num_objects():
    gc.collect()
    return len(gc.get_objects())


@pytest.mark.timeout(600)
@pytest.mark.parametrize("steps", [60, pytest.param(10_000, marks=pytest.mark.slow)])
def test_a_loop_of_steps_grows_no_memory(steps):
    model = Counting()
    trained(model, 60)
    before = num_objects()
    tracemalloc.start()
    trained(model, steps)
    # Read before objects are counted: the list of all of them is memory, too.
    left_bytes, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    num_grown = num_objects() - before
    # Launches of a block, bound to addresses of its first steps, are all that is new.
    assert num_grown < 3_000
    assert peak_bytes - left_bytes < 1 << 20


def test_a_pool_lets_go_of_sizes_that_are_not_asked_for_again():
    pool = Pool(partial(allocate, memory=Memory.HOST))
    for size in range(1, 200):
        block = pool.allocate(size << 20)
        assert block.memory.size == size << 20
        del block
    assert pool.generation > 0
    first = pool.allocate(100)
    address = first.address
    del first
    assert pool.allocate(100).address == address


def test_a_tensor_of_a_block_lives_on_and_can_be_read_in_the_next():
    with af.eager():
        kept = af.ones((2,)) * 3.0
    assert kept.tolist() == [3.0, 3.0]
    with af.eager():
        assert (kept + 1.0).tolist() == [4.0, 4.0]
    with raises(af.CompileError):
        _ = kept + 1.0


def test_wrong_operands_are_refused_with_the_users_line():
    with af.eager(), raises(af.CompileError):
        _ = af.ones((2,)) + af.ones((3,))


def test_a_bad_index_is_refused_with_the_users_line():
    with af.eager(), raises(af.CompileError):
        af.embedding(af.ones((2,), dtype="int64") * 5, af.ones((3, 2)))


def test_eager_inside_of_a_trace_is_refused():
    def compute(model, batch):
        with af.eager():
            return batch.x * 2.0

    with raises(af.CompileError):
        af.job(compute, train=False).step(nn.Linear(1, 1), {"x": X})


def test_a_job_inside_of_an_eager_block_is_refused():
    job = af.job(lambda model, batch: batch.x * 2.0, train=False)
    model = nn.Linear(1, 1)
    with af.eager(), raises(af.CompileError):
        job.step(model, {"x": X})
    job.step(model, {"x": X})
    with af.eager(), pytest.raises(af.CompileError, match="was called in an eager block"):
        job.step(model, {"x": X})  # though its trace is there


def test_an_eager_tensor_in_a_trace_is_refused():
    with af.eager():
        kept = af.ones((2, 3))
    with raises(af.CompileError):
        af.job(lambda model, batch: batch.x * kept, train=False).step(nn.Linear(1, 1), {"x": X})


def test_a_traced_tensor_in_an_eager_block_is_refused():
    kept = []

    def compute(model, batch):
        kept.append(batch.x)
        return batch.x * 2.0

    af.job(compute, train=False).step(nn.Linear(1, 1), {"x": X})
    with af.eager(), raises(af.CompileError):
        _ = kept[0] + 1.0


@pytest.fixture
def emulated(monkeypatch, cached_toolchain):
    """A GPU that the host acts."""
    monkeypatch.setenv("ACTORFLOW_CUDA", "emulated")


@pytest.mark.usefixtures("emulated")
def test_values_on_a_gpu_stay_there_and_cross_to_the_host_where_they_are_read():
    with af.eager(device="cuda:0"):
        x = af.ones((2, 3)) * X
        (slope,) = af.grad((x**3.0).sum(), [x])
        total, steps = x.sum(), 0
        while total < 100.0:
            total, steps = total * 2.0, steps + 1
        with af.eager(device="host"):
            there = x + 1.0
        back = there * 2.0
        scaled = nn.BatchNorm1d(3)
        scaled(x)
        last, _ = af.scan(lambda carry, row: (carry + row * row,) * 2, af.zeros((3,)), x)
        row = x[1]
    np.testing.assert_allclose(slope.numpy(), 3.0 * X**2, rtol=1e-6)
    np.testing.assert_array_equal(back.numpy(), 2.0 * X + 2.0)
    assert (row.tolist(), f"{total:.0f}", steps) == ([3.0, 4.0, 5.0], "120", 3)
    np.testing.assert_allclose(scaled.running_mean.data, 0.1 * X.mean(0), rtol=1e-6)
    assert last.tolist() == [9.0, 17.0, 29.0]


@pytest.mark.usefixtures("emulated")
def test_a_function_goes_from_the_host_to_a_gpu_with_its_model(monkeypatch):
    model, calls = nn.Linear(3, 2), af.eager(lambda model, batch: model(batch.x), train=False)
    on_host = calls(model, {"x": X})
    monkeypatch.setenv("ACTORFLOW_DEVICE", "cuda:0")
    on_gpu = calls(model, {"x": X})
    np.testing.assert_allclose(on_gpu.numpy(), on_host.numpy(), rtol=1e-6)


@pytest.mark.usefixtures("emulated")
def test_a_gpu_that_failed_names_the_first_line_and_is_opened_anew():
    rows = nn.Embedding(4, 2)
    with af.eager(device="cuda:0"):
        for ids in (9, 1):
            with raises(af.CompileError):
                rows(af.ones((1,), dtype="int32") * ids)
    with af.eager(device="cuda:0"):
        assert rows(af.ones((1,), dtype="int32")).shape == (1, 2)


def test_a_device_that_is_not_here_is_refused(monkeypatch):
    for device in ("sim:0", "gpu"):
        with raises(af.CompileError):
            af.eager(device=device)
    with pytest.raises(af.CompileError, match=r"test_eager\.py:.* af\.eager: .*GPU"):
        af.eager(device="cuda:99").__enter__()
    monkeypatch.setenv("ACTORFLOW_DEVICE", "cuda:0,cuda:1")
    with raises(af.CompileError), af.eager():
        pass


def test_a_parameter_alone_has_no_first_values():
    with af.eager(), raises(af.CompileError):
        _ = nn.Linear(3, 2).weight + 1.0


@pytest.mark.parametrize(
    "options",
    [{"precision": "bf16"}, {"accumulate": 2}, {"device": "sim"}, {"mesh": af.Mesh(data=2)}],
    ids=lambda options: next(iter(options)),
)
def test_a_step_that_cannot_be_eager_is_refused(options):
    job = af.job(lambda m, b: m(b.x).mean(), optimizer=af.optim.SGD(0.1), **options)
    with raises(af.CompileError):
        job.eager_step(nn.Linear(3, 1), {"x": X})


def test_a_step_on_a_model_that_another_run_trains_is_refused():
    model = nn.Linear(3, 1)
    job = af.job(lambda m, b: m(b.x).mean(), optimizer=af.optim.SGD(0.1))
    stream = job.stream(model, af.data.ArraySource({"x": X}, batch=1), steps=2)
    next(stream)
    with raises(af.CompileError):
        job.eager_step(model, {"x": X})
    stream.close()


def test_probes_show_and_check_values_at_once(capsys):
    with af.eager():
        x = af.ones(2) * 1.5
        af.debug.print("x {}", x)
        assert capsys.readouterr().out == "x [1.5 1.5]\n"
        af.debug.check(x)
        with raises(af.ActorflowError):
            af.debug.check(x, lambda array: array.max() < 1)
        with raises(af.ActorflowError):
            af.debug.check(af.log(-x))
