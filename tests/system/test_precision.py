"""Jobs with precision="bf16": losses beside float32's and torch's, state, outputs, plans."""

import numpy as np
import pytest
from error_texts import raises
from jobs import GPT, losses_of_fit

import actorflow as af
from actorflow import nn
from actorflow.compile.hardware import hardware_for
from actorflow.data.source import checked_spec
from compiler.contract.errors import CompileError
from compiler.contract.placement import HOST
from compiler.contract.types import DType, TensorType
from compiler.graph.target import CompileOptions
from compiler.pipeline import pipeline
from compiler.pipeline.printer import print_plan, summarise
from compiler.pipeline.rewrites import PassContext

VOCAB, WIDTH, SEQ, BATCH = 29, 32, 16, 4


def make_model(dropout=0.0):
    """Return a model whose weights are the same in every call."""
    model = GPT(VOCAB, SEQ, WIDTH, layers=2, heads=4, dropout=dropout)
    rng = np.random.default_rng(1)
    for name, parameter in model.named_parameters():
        shape = parameter.type.shape
        is_scale = "norm" in name and name.endswith("weight")
        array = np.ones(shape) if is_scale else rng.normal(0, 0.1, shape)
        parameter.load(array.astype(np.float32))
    return model


def tokens():
    text = np.cumsum(np.random.default_rng(0).integers(0, 5, 5_000)) % VOCAB
    return af.data.Tokens(text.astype(np.uint8), seq=SEQ, batch=BATCH, seed=0)


def make_job(precision, **options):
    settings = {"optimizer": af.optim.AdamW(3e-3, weight_decay=0.01), **options}

    @af.job(precision=precision, **settings)
    def train(model, batch):
        return af.cross_entropy(model(batch.x).flatten(0, -2), batch.y.flatten())

    return train


def losses_of(job, model, steps=10, **options):
    return losses_of_fit(job, model, tokens(), steps, **options)


def launches_of(plan):
    return [launch for actor in plan.actors for launch in actor.launches]


def types_of(plan):
    return {str(view.type.dtype) for view in plan.views}


@pytest.mark.parametrize("native", ["0", "1"])
def test_losses_of_ten_steps_stay_beside_those_of_float32(native, monkeypatch):
    monkeypatch.setenv("ACTORFLOW_NATIVE", native)
    exact, low = (losses_of(make_job(p), make_model()) for p in ("fp32", "bf16"))
    np.testing.assert_allclose(low, exact, atol=2e-2)
    assert low != exact
    assert low[-1] < low[0]


def test_losses_of_ten_steps_stay_beside_those_of_torch_autocast(numpys_kernels):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    f = torch.nn.functional
    own = {n: torch.from_numpy(p.data.copy()) for n, p in make_model().named_parameters()}
    for tensor in own.values():
        tensor.requires_grad_(True)

    def logits(x):
        h = own["emb.weight"][x] + own["pos.weight"]
        for i in range(2):
            p = {n.removeprefix(f"blocks.{i}."): t for n, t in own.items()}
            z = f.layer_norm(h, (WIDTH,), p["norm1.weight"], p["norm1.bias"])
            q, k, v = f.linear(z, p["attn.qkv.weight"], p["attn.qkv.bias"]).split(WIDTH, 2)
            q, k, v = (a.view(BATCH, SEQ, 4, WIDTH // 4).transpose(1, 2) for a in (q, k, v))
            y = f.scaled_dot_product_attention(q, k, v, is_causal=True)
            y = y.transpose(1, 2).reshape(BATCH, SEQ, WIDTH)
            h = h + f.linear(y, p["attn.proj.weight"], p["attn.proj.bias"])
            z = f.layer_norm(h, (WIDTH,), p["norm2.weight"], p["norm2.bias"])
            z = f.gelu(f.linear(z, p["mlp.up.weight"], p["mlp.up.bias"]), approximate="tanh")
            h = h + f.linear(z, p["mlp.down.weight"], p["mlp.down.bias"])
        h = f.layer_norm(h, (WIDTH,), own["norm.weight"], own["norm.bias"])
        return f.linear(h, own["head.weight"], own["head.bias"])

    optimizer = torch.optim.AdamW(list(own.values()), lr=3e-3, weight_decay=0.01)
    data, theirs = tokens(), []
    for _ in range(10):
        batch = next(data)
        x, y = (torch.from_numpy(np.asarray(batch[k])).long() for k in ("x", "y"))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = f.cross_entropy(logits(x).view(-1, VOCAB).float(), y.view(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        theirs.append(loss.item())
    np.testing.assert_allclose(losses_of(make_job("bf16"), make_model()), theirs, atol=2e-2)


def test_parameters_and_optimizer_state_are_float32_and_products_read_bfloat16(numpys_kernels):
    plan = make_job("bf16").compile(make_model(), tokens())
    assert {str(plan.views[v.view].type.dtype) for v in plan.state} == {"float32", "int64"}
    products = [launch for launch in launches_of(plan) if "matmul" in launch.made_of]
    assert len(products) == 3 * 9
    for launch in products:  # a fused kernel's first two operands are those of its product
        assert {plan.views[v].type.dtype for v in launch.inputs[:2]} == {DType.BFLOAT16}
    for launch in launches_of(plan):
        if launch.op in ("adamw_update", "sum"):
            views = [plan.views[v] for v in (*launch.inputs, *launch.outputs)]
            assert DType.BFLOAT16 not in {view.type.dtype for view in views}
    assert "bfloat16" not in types_of(make_job("fp32").compile(make_model(), tokens()))


def test_weights_are_cast_once_a_step_and_few_other_values_are():
    graph = make_job("bf16").graph(make_model(), tokens().spec())
    options, hardware = CompileOptions("train", precision="bf16"), hardware_for((HOST,), "")
    for step in pipeline.PASSES[: [p.name for p in pipeline.PASSES].index("hold_weights")]:
        if step.is_wanted(options):
            graph = step.run(graph, PassContext(hardware, options))
    casts = [node for node in graph.nodes if node.op.name == "cast"]
    variables = {v for node in graph.nodes if node.op.name == "variable" for v in node.outputs}
    weights = [node for node in casts if node.inputs[0] in variables]
    # Per block four weights and the biases in front of attention and gelu; the head's weight.
    assert len(weights) == len({node.inputs for node in weights}) == 2 * 6 + 1
    # Down: results of norms, gradients of the residual stream, of the logits. Up: those of biases.
    assert len(casts) - len(weights) == 2 * (2 + 2 + 2) + 2


def test_outputs_are_float32_and_an_evaluation_job_takes_a_precision_too(numpys_kernels):
    def answer(precision):
        @af.job(train=False, precision=precision)
        def predict(model, batch):
            logits = model(batch.x)
            return {"logits": logits, "best": logits.amax(-1)}

        with_types = predict.step(make_model(), {"x": next(tokens())["x"]})
        return with_types["logits"], with_types["best"]

    (exact, _), (low, best) = answer("fp32"), answer("bf16")
    assert low.dtype == best.dtype == np.float32
    assert 0 < np.abs(low - exact).max() < 0.1
    np.testing.assert_array_equal(best, low.max(axis=-1))


def test_weights_that_no_step_changes_are_rounded_once_and_follow_the_model(numpys_kernels):
    def logits(model, batch):
        return model(batch.x)

    predict, batch = af.job(train=False, precision="bf16")(logits), {"x": next(tokens())["x"]}
    model = make_model()
    plan = predict.compile(model, {"x": TensorType(DType.INT32, batch["x"].shape)})
    rounded = [dict(v.init)["of"] for v in plan.variables if v.role == "rounded"]
    # Per block four weights and two biases; the head's weight.
    assert len(rounded) == len(set(rounded)) == 2 * 6 + 1
    read = {view for launch in launches_of(plan) for view in launch.inputs}
    weights = {v.view for v in plan.state if v.name in rounded}
    assert not weights & read

    def step(of):
        (answer,) = predict.step(of, batch).values()
        return answer

    def anew():
        other = make_model(1.0)
        other.load(model.state())
        return step(other)

    first = step(model)
    losses_of(make_job("bf16"), model, 2)
    trained = step(model)
    np.testing.assert_array_equal(trained, anew())
    model.load({n: a + np.float32(0.125) for n, a in model.state().items()})
    loaded = step(model)
    np.testing.assert_array_equal(loaded, anew())
    assert all([np.abs(a - b).max() > 1e-3 for a, b in ((first, trained), (trained, loaded))])


def test_a_run_resumes_bit_exactly_and_in_the_other_precision(tmp_path, numpys_kernels):
    whole, model = make_model(0.1), make_model(0.1)
    losses = losses_of(make_job("bf16"), whole, 8)
    first = losses_of(make_job("bf16"), model, 5, checkpoint=tmp_path / "run", every=1)
    second = losses_of(make_job("bf16"), make_model(0.1), 8, checkpoint=tmp_path / "run", every=1)
    assert first + second == losses
    there = losses_of(make_job("fp32"), make_model(0.1), 10, checkpoint=tmp_path / "run", every=1)
    back = losses_of(make_job("bf16"), make_model(0.1), 12, checkpoint=tmp_path / "run", every=1)
    assert len(there) == len(back) == 2
    assert back[-1] < losses[0]


def test_two_runs_give_the_same_bits(numpys_kernels):
    first, second = (losses_of(make_job("bf16"), make_model(0.1), 4) for _ in range(2))
    assert first == second


def test_accumulated_batches_add_up_in_float32(numpys_kernels):
    job = make_job("bf16", accumulate=3)
    plan = job.compile(make_model(), tokens())
    for launch in launches_of(plan):
        if launch.op in ("accumulate", "adamw_update"):
            assert {plan.views[v].type.dtype for v in launch.inputs} <= {DType.FLOAT32, DType.INT64}
    exact = losses_of(make_job("fp32", accumulate=3), make_model(), 4)
    np.testing.assert_allclose(losses_of(job, make_model(), 4), exact, atol=2e-2)


@pytest.mark.one_device("sets a budget in bytes of one arena")
def test_a_memory_budget_changes_no_bit(numpys_kernels):
    plan = make_job("bf16").compile(make_model(), tokens())
    budget = plan.arenas[0].size_bytes * 9 // 10
    job = make_job("bf16", memory_budget=budget)
    small = job.compile(make_model(), tokens())
    assert small.arenas[0].size_bytes <= budget
    assert small.recomputation[0].num_launches > 0
    assert losses_of(job, make_model(), 4) == losses_of(make_job("bf16"), make_model(), 4)


@pytest.mark.parametrize(("training", "evaluating"), [("bf16", "fp32"), ("fp32", "bf16")])
def test_an_evaluation_computes_in_the_precision_of_its_own_job(
    training, evaluating, numpys_kernels
):
    @af.job(train=False, precision=evaluating)
    def evaluate(model, batch):
        return {"loss": af.cross_entropy(model(batch.x).flatten(0, -2), batch.y.flatten())}

    found = []
    evaluation = af.Evaluation(
        evaluate, tokens(), every=2, batches=2, on_result=lambda s, r: found.append(r["loss"])
    )
    plan = make_job(training).compile(make_model(), tokens(), evaluation=evaluation)
    products = [launch for launch in launches_of(plan) if "matmul" in launch.made_of]
    low = [x for x in products if plan.views[x.inputs[0]].type.dtype is DType.BFLOAT16]
    assert len(low) == (27 if training == "bf16" else 9)
    assert len(products) == 36
    losses_of(make_job(training), make_model(), 4, evaluation=evaluation)
    assert len(found) == 2
    assert found[1] < found[0]


@pytest.mark.parametrize("word", ["float16", "BF16", "bfloat16", None, 16])
def test_other_words_are_refused_with_the_choices_and_the_line(word):
    with raises(CompileError):
        make_job(word)


def test_a_user_is_told_that_bfloat16_is_chosen_for_a_job():
    @af.job(train=False)
    def cast(model, batch):
        return batch.x.to("bfloat16")

    with raises(CompileError):
        cast.compile(make_model(), tokens())
    with raises(CompileError):
        nn.Parameter((3,), (("kind", "zeros"),), DType.BFLOAT16)
    with raises(af.data.DataError):
        checked_spec({"x": (DType.BFLOAT16, (3,))})


@pytest.mark.host("the device is in the text")
def test_a_plan_says_its_precision_and_the_types_of_its_operands(numpys_kernels):
    low, exact = (make_job(p).compile(make_model(), tokens()) for p in ("bf16", "fp32"))
    assert " on host:0 in bf16: " in summarise(low)[0]
    assert "in bf16" not in summarise(exact)[0]
    assert any(["bfloat16[64, 96]" in line for line in print_plan(low)])
    assert dict(low.options)["precision"] == "bf16"
    assert type(low).from_bytes(low.to_bytes()) == low


def test_a_deep_model_takes_four_fifths_of_the_bytes_of_a_step(numpys_kernels):
    spec = {name: TensorType(DType.INT32, (128, SEQ)) for name in ("x", "y")}
    exact, low = (
        make_job(p).compile(GPT(VOCAB, SEQ, WIDTH, layers=8, heads=4), spec).memory[0].step_bytes
        for p in ("fp32", "bf16")
    )
    assert low < 0.8 * exact
