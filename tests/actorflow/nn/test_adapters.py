"""Low-rank adapters: trained alone, saved as peft does, loaded, merged and removed."""

import json

import numpy as np
import pytest
from error_texts import raises
from safetensors.numpy import load_file, save_file

import actorflow as af
from actorflow import nn
from compiler.contract.errors import CompileError


class Net(nn.Module):
    def __init__(self):
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 3, bias=False)

    def __call__(self, x):
        return self.down(af.tanh(self.up(x)))


X = np.random.default_rng(0).standard_normal((8, 4)).astype(np.float32)
see = af.job(lambda model, batch: {"y": model(batch.x)}, train=False)
train = af.job(
    lambda model, batch: (model(batch.x) ** 2.0).mean(), optimizer=af.optim.SGD(0.5), seed=3
)


def test_adapters_show_what_they_are_of():
    adapters = nn.lora(Net(), rank=2, alpha=3.0)
    assert repr(adapters) == "LoRA of Net(rank=2, alpha=3, layers: up, down)"
    adapters.remove()
    assert repr(adapters).endswith("layers: none, they are merged or removed)")


def outputs(model):
    return see.step(model, {"x": X})["y"]


def by_hand(state, scale):
    """The outputs in float64, from the values of a model with adapters on both layers."""

    def weight(path):
        a, b = [state[f"{path}.{n}.weight"].astype(float) for n in ("lora_A", "lora_B")]
        return state[f"{path}.weight"] + scale * (b @ a)

    return np.tanh(X @ weight("up").T + state["up.bias"]) @ weight("down").T


def adapted(steps=3, **options):
    model = Net().init(1)
    adapters = nn.lora(model, **{"rank": 2, "alpha": 4, **options})
    for _ in range(steps):
        train.step(model, {"x": X})
    return model, adapters


def test_a_model_computes_the_same_until_its_adapters_are_trained_and_only_they_are():
    model = Net().init(1)
    before, base = outputs(model), model.state()
    adapters = nn.lora(model, rank=2, alpha=4)
    np.testing.assert_array_equal(outputs(model), before)
    names = [name for name, p in model.named_parameters() if not p.is_frozen]
    assert sorted(names) == sorted(adapters.parameters())
    assert names[0] == "up.lora_A.weight"
    for _ in range(3):
        train.step(model, {"x": X})
    state = model.state()
    assert {name: state[name].tobytes() for name in base} == {
        n: a.tobytes() for n, a in base.items()
    }
    np.testing.assert_allclose(outputs(model), by_hand(state, 2.0), rtol=1e-5, atol=1e-6)
    assert np.abs(outputs(model) - before).max() > 0.01


def test_merged_weights_give_the_outputs_of_the_adapters_to_rounding():
    model, adapters = adapted()
    expected, names = outputs(model), [name for name, _ in Net().named_parameters()]
    adapters.merge()
    assert type(model.up) is nn.Linear
    assert list(model.state()) == names
    assert not any(p.is_frozen for _, p in model.named_parameters())
    np.testing.assert_allclose(outputs(model), expected, rtol=1e-5, atol=1e-6)
    assert adapters.layers == {}


def test_removed_adapters_leave_the_model_as_it_was():
    model, adapters = adapted()
    model.down.weight.freeze()
    adapters.remove()
    np.testing.assert_array_equal(outputs(model), outputs(Net().init(1)))
    frozen = Net().init(1)
    frozen.up.freeze()
    nn.lora(frozen, rank=1).remove()
    assert [n for n, p in frozen.named_parameters() if p.is_frozen] == ["up.weight", "up.bias"]


def test_adapters_are_saved_as_peft_does_and_loaded_alone(tmp_path):
    model, adapters = adapted()
    folder = adapters.save(tmp_path / "adapter")
    saved = load_file(folder / "adapter_model.safetensors")
    assert sorted(saved) == [
        f"base_model.model.{layer}.lora_{part}.weight"
        for layer in ("down", "up")
        for part in ("A", "B")
    ]
    assert {n: a.shape for n, a in saved.items() if ".up." in n} == {
        "base_model.model.up.lora_A.weight": (2, 4),
        "base_model.model.up.lora_B.weight": (6, 2),
    }
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 2, 4)
    assert config["target_modules"] == ["up", "down"]
    for source in (folder, folder / "adapter_model.safetensors", saved, adapters.state()):
        other = Net().init(1)
        report = nn.lora(other, rank=2, alpha=4).load(source)
        assert len(report.loaded) == 4
        np.testing.assert_array_equal(outputs(other), outputs(model))


def test_adapters_of_another_rank_alpha_or_layer_do_not_load(tmp_path):
    _, adapters = adapted()
    folder = adapters.save(tmp_path)
    for options in ({"rank": 3, "alpha": 4}, {"rank": 2}, {"rank": 2, "alpha": 4, "targets": "up"}):
        with raises(CompileError):
            nn.lora(Net(), **options).load(folder)
    with raises(CompileError):
        nn.lora(Net(), rank=3).load(folder / "adapter_model.safetensors")
    for content in ("[]", "{", '{"r": 2}', '{"r": 2, "lora_alpha": "x"}'):
        (folder / "adapter_config.json").write_text(content)
        with pytest.raises(CompileError, match="no configuration of adapters"):
            nn.lora(Net(), rank=2, alpha=4).load(folder)
    (folder / "adapter_config.json").unlink()
    nn.lora(Net(), rank=2, alpha=4).load(folder)


def test_targets_choose_linear_layers_by_path():
    class Deep(nn.Module):
        def __init__(self):
            self.blocks = [nn.TransformerBlock(8, heads=2) for _ in range(2)]
            self.head = nn.Linear(8, 3)

    assert len(nn.lora(Deep(), rank=1).layers) == 9
    chosen = nn.lora(Deep(), rank=1, targets=["*.attn.*", "!blocks.0.*"]).layers
    assert list(chosen) == ["blocks.1.attn.qkv", "blocks.1.attn.proj"]
    model = Deep()
    nn.lora(model, rank=1, targets="head")
    for wrong in ("head", "body", "blocks.0", 3, []):
        with raises(CompileError):
            nn.lora(model, rank=1, targets=wrong)
    for rank in (0, 1.5):
        with raises(CompileError):
            nn.lora(model, rank=rank)
    with raises(CompileError):
        nn.lora(nn.Embedding(2, 3), rank=1)
    with raises(CompileError):
        nn.lora(3, rank=1)


def test_a_weight_of_two_layers_is_not_merged():
    class Tied(nn.Module):
        def __init__(self):
            self.embed, self.head = nn.Embedding(5, 4), nn.Linear(4, 5)
            self.head.weight = self.embed.weight

    adapters = nn.lora(Tied(), rank=1)
    with raises(CompileError):
        adapters.merge()


def test_adapters_are_not_merged_while_a_run_trains_them():
    model, adapters = adapted(steps=0)
    data = af.data.ArraySource({"x": X}, batch=4)
    for _ in train.stream(model, data, steps=1):
        for change in (adapters.merge, adapters.remove):
            with raises(CompileError):
                change()
    adapters.merge()


def test_adapters_of_a_model_in_doubles_are_doubles():
    model = Net().init(1)
    model.load(model.state(), dtype="float64")
    adapters = nn.lora(model, rank=2)
    assert {p.dtype for p in adapters.parameters().values()} == {af.DType.FLOAT64}
    y = see.step(model, {"x": X.astype(np.float64)})["y"]
    np.testing.assert_allclose(y, by_hand(model.state(), 1.0), rtol=1e-12)


def test_a_run_with_adapters_is_continued_from_its_checkpoint(tmp_path):
    def fit(steps):
        model = Net().init(1)
        nn.lora(model, rank=2)
        data = af.data.ArraySource({"x": X}, batch=4, seed=1)
        train.fit(model, data, steps=steps, checkpoint=tmp_path / str(steps > 9), progress=False)
        return model.state()

    fit(5)
    (tmp_path / "False").rename(tmp_path / "True")
    resumed = fit(10)
    (tmp_path / "True").rename(tmp_path / "old")
    assert {n: a.tobytes() for n, a in fit(10).items()} == {
        n: a.tobytes() for n, a in resumed.items()
    }


def test_adapters_of_published_names_with_a_wrapper_load(tmp_path):
    model, adapters = adapted()
    named = {f"base_model.model.{n}": np.ascontiguousarray(a) for n, a in adapters.state().items()}
    save_file(named, tmp_path / "adapter_model.safetensors")
    other = nn.lora(Net().init(1), rank=2, alpha=4)
    other.load(str(tmp_path))
    np.testing.assert_array_equal(outputs(other.model), outputs(model))
