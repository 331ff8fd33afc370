"""Models are those that were published: their sizes, the names of their weights, and the starts."""

import json
import struct

import numpy as np
import pytest
from error_texts import raises
from models.bert import BertForMaskedLM
from models.dqn import DQN
from models.gpt2 import GPT2
from models.llama import Llama

import actorflow as af


@pytest.mark.parametrize(
    ("model", "num_parameters"),
    [(GPT2, 124_439_808), (BertForMaskedLM, 109_514_298), (Llama, 6_738_415_616)],
    ids=["gpt2", "bert-base", "llama-7b"],
)
def test_a_model_has_as_many_parameters_as_the_one_that_was_published(model, num_parameters):
    assert model().num_parameters() == num_parameters


def drawn(model):
    """Return arrays of other values than those a model starts with, by its own names."""
    rng = np.random.default_rng(1)
    types = {name: parameter.shape for name, parameter in model.named_parameters()}
    return {name: rng.standard_normal(shape, np.float32) for name, shape in types.items()}


def test_a_checkpoint_of_gpt2_is_loaded_without_its_masks_and_its_second_head():
    model = GPT2(vocab=11, length=8, width=8, layers=2, heads=2)
    arrays = drawn(model)
    assert {"wte.weight", "h.1.attn.c_attn.weight", "h.1.ln_2.bias", "ln_f.bias"} <= {*arrays}
    assert arrays["h.0.attn.c_attn.weight"].shape == (8, 24)
    published = {f"transformer.{name}": array for name, array in arrays.items()}
    published["transformer.h.0.attn.bias"] = np.tri(8, dtype=np.float32)[None, None]
    published["lm_head.weight"] = arrays["wte.weight"]
    model.load_published(published)
    assert all((model.state()[name] == array).all() for name, array in arrays.items())


def in_halves(array):
    """The bits of bfloat16 numbers, of which float32 ones keep their upper half."""
    return (array.view(np.uint32) >> 16).astype("<u2")


def test_published_shards_of_gpt2_in_bfloat16_are_loaded_from_their_folder(tmp_path):
    model = GPT2(vocab=11, length=8, width=8, layers=2, heads=2)
    arrays = drawn(model)
    names = sorted(arrays)
    weight_map = {}
    for number, shard in enumerate((names[:9], names[9:]), start=1):
        file = f"model-0000{number}-of-00002.safetensors"
        header, payload = {"__metadata__": {"format": "pt"}}, b""
        for name in shard:
            begin, bits = len(payload), in_halves(arrays[name]).tobytes()
            place = {"shape": arrays[name].shape, "data_offsets": [begin, begin + len(bits)]}
            header[f"transformer.{name}"] = {"dtype": "BF16", **place}
            payload += bits
            weight_map[f"transformer.{name}"] = file
        text = json.dumps(header).encode()
        (tmp_path / file).write_bytes(struct.pack("<Q", len(text)) + text + payload)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    report = model.load_published(tmp_path)
    assert (report.missing, report.unused) == ((), ())
    for name, array in arrays.items():
        words = in_halves(array).astype(np.uint32) << 16
        assert model.state()[name].tobytes() == words.tobytes()


def test_a_checkpoint_that_lacks_a_weight_is_refused_by_name():
    model = GPT2(vocab=11, length=8, width=8, layers=2, heads=2)
    arrays = drawn(model)
    del arrays["h.1.mlp.c_fc.bias"]
    with raises(af.CompileError):
        model.load_published(arrays)


def test_a_checkpoint_of_bert_is_loaded_by_its_oldest_names_too():
    model = BertForMaskedLM(vocab=11, length=8, width=8, layers=1, heads=2)
    arrays = drawn(model)
    assert "bert.encoder.layer.0.attention.output.LayerNorm.weight" in arrays
    old = {
        name.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta"): array
        for name, array in arrays.items()
    }
    old |= {"bert.pooler.dense.weight": np.zeros((8, 8)), "cls.seq_relationship.bias": np.zeros(2)}
    model.load_published(old)
    assert all((model.state()[name] == array).all() for name, array in arrays.items())


def test_projections_that_end_in_a_sum_start_smaller_with_every_layer():
    model = GPT2(vocab=11, length=8, width=8, layers=8, heads=2)
    starts = {name: dict(parameter.init) for name, parameter in model.named_parameters()}
    assert starts["h.3.mlp.c_fc.weight"] == {"kind": "normal", "std": 0.02}
    assert starts["h.3.mlp.c_proj.weight"] == {"kind": "normal", "std": 0.02 / 4}


def test_a_target_network_changes_where_it_follows_and_nowhere_else():
    model, rng = DQN(width=8), np.random.default_rng(0)
    rows = {name: rng.standard_normal((4, 4), np.float32) for name in ("state", "after")}
    rows |= {name: np.ones(4, np.float32) for name in ("reward", "goes_on")}
    rows["action"] = np.arange(4, dtype=np.int32) % 2

    @af.job(optimizer=af.optim.SGD(0.1), trainable=["online.*"])
    def train(model, batch):
        return model.loss(batch)

    train.step(model, rows)
    began, online = model.target.state(), model.online.state()
    train.step(model, rows)
    assert all((model.target.state()[n] == began[n]).all() for n in began)
    assert not (model.online.state()["head.weight"] == online["head.weight"]).all()
    model.follow(0.25)
    now, name = model.online.state(), "head.weight"
    moved = 0.75 * began[name] + 0.25 * now[name]
    np.testing.assert_allclose(model.target.state()[name], moved, rtol=1e-6)
