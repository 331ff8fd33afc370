"""Text of the examples' models: kept keys change no token, and choices follow numpy's."""

import numpy as np
import pytest
from error_texts import raises
from models import generation
from models.gpt2 import GPT2
from models.llama import Llama

import actorflow as af
from actorflow.data import spec_of

VOCAB, LENGTH = 61, 40
PROMPTS = [[3, 5, 7], [*range(1, 19)], [9]]
MODELS = {
    "gpt2": lambda: GPT2(VOCAB, LENGTH, width=16, layers=2, heads=2),
    "llama": lambda: Llama(VOCAB, width=16, layers=2, heads=4, kv_heads=2, hidden=24),
}
SAMPLED = {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.2}


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    """A model whose tokens vary: its weights are larger than those of a start."""
    model = MODELS[request.param]().init(3)
    model.load({path: value * 8 for path, value in model.state().items()})
    return model


@af.job(train=False)
def whole(model, batch):
    return {"scores": model(batch.x)}


@af.job(train=False, max_plans=64)
def with_scores(writer, batch):
    return writer(batch)


def recomputed(model, ids):
    """The scores of the token after some, from all of them."""
    x = np.zeros((1, LENGTH), np.int64)
    x[0, : len(ids)] = ids
    return whole.step(model, {"x": x})["scores"][0, len(ids) - 1]


def test_each_token_is_the_best_of_the_whole_text_computed_anew(model):
    """Prompts of unequal lengths, in one batch; so are the scores, from step to step."""
    writer = generation.Writer(model, len(PROMPTS), LENGTH)
    settings = generation.checked_settings(
        len(PROMPTS), VOCAB, temperature=0, top_k=0, top_p=1.0, penalty=1.0, seed=0
    )
    texts = [[*prompt] for prompt in PROMPTS]
    tokens = np.array([row + row[:1] * (32 - len(row)) for row in texts])
    for _ in range(4):
        lengths = np.array([len(text) for text in texts])
        got = with_scores.step(writer, settings | {"tokens": tokens, "lengths": lengths})
        for text, scores, token in zip(texts, got["scores"], got["token"], strict=True):
            expected = recomputed(model, text)
            np.testing.assert_allclose(scores, expected, rtol=1e-4, atol=1e-4)
            assert token == expected.argmax()
            text.append(int(token))
        tokens = got["token"].reshape(-1, 1)
    written = model.generate(PROMPTS, 4)
    assert written == [text[-4:] for text in texts]


def test_a_row_goes_on_alike_whatever_the_other_rows_are(model):
    together = model.generate(PROMPTS, 5, **SAMPLED, seed=7)
    alone = model.generate(PROMPTS[1:2], 5, **SAMPLED, seed=8)
    assert alone == together[1:2]
    assert model.generate(PROMPTS, 5, **SAMPLED, seed=[7, 8, 9]) == together
    assert model.generate(PROMPTS, 5, **SAMPLED, seed=[70, 8, 71])[1] == together[1]
    assert model.generate(PROMPTS, 5, temperature=[0, 1.0, 0], top_k=20) != together


def chosen(scores, **settings):
    """Return the tokens that a job chooses, as many times as there are seeds."""
    count = len(scores)
    plain = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "penalty": 1.0, "seed": 0}
    seen = settings.pop("seen", np.zeros(scores.shape, bool))
    arrays = generation.checked_settings(count, scores.shape[1], **plain | settings)
    job = af.job(train=False)(lambda model, b: {"y": generation.choose(b.s, b.seen, b.place, b)})
    batch = arrays | {"s": scores, "seen": seen, "place": np.full(count, 5)}
    return job.step(af.nn.Module(), batch)["y"]


def shares_of(scores, seen, *, temperature=1.0, top_k=0, top_p=1.0, penalty=1.0, **_):
    """Return the distribution that settings leave of one row of scores, in words of numpy."""
    scores = np.where(seen, np.where(scores > 0, scores / penalty, scores * penalty), scores)
    scores = scores.astype(float) / temperature
    order = np.argsort(-scores, kind="stable")
    kept = order[: top_k or len(order)]
    shares = np.exp(scores[kept] - scores.max())
    shares /= shares.sum()
    before = np.concatenate([[0.0], np.cumsum(shares)[:-1]])
    shares = np.where(before < top_p, shares, 0.0)
    out = np.zeros(len(scores))
    out[kept] = shares / shares.sum()
    return out


DRAWS = 4000


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.5},
        {"top_k": 3},
        {"top_p": 0.7},
        {"temperature": 2.0, "top_k": 6, "top_p": 0.8, "penalty": 1.7},
    ],
    ids=str,
)
def test_draws_have_the_distribution_that_the_settings_leave(settings):
    rng = np.random.default_rng(0)
    scores, seen = rng.standard_normal(12).astype(np.float32) * 2, rng.random(12) < 0.4
    rows = np.broadcast_to(scores, (DRAWS, 12))
    tokens = chosen(rows, seen=np.broadcast_to(seen, (DRAWS, 12)), **settings)
    expected = DRAWS * shares_of(scores, seen, **settings)
    counts = np.bincount(tokens, minlength=12)
    assert (counts[expected == 0] == 0).all()
    many = expected > 0
    statistic = ((counts - expected)[many] ** 2 / expected[many]).sum()
    degrees = many.sum() - 1
    # Wilson & Hilferty's cube for the 99.9 % point of chi-square.
    assert statistic < degrees * (1 - 2 / (9 * degrees) + 3.09 * np.sqrt(2 / (9 * degrees))) ** 3


def test_the_most_likely_token_is_taken_after_the_penalty_without_a_draw():
    scores = np.array([[1.0, 3.0, 2.9], [-1.0, -3.0, -1.1], [1.0, 3.0, 2.9]], np.float32)
    seen = np.array([[False, True, False], [True, False, False], [False, False, False]])
    assert chosen(scores, seen=seen, temperature=0.0, penalty=1.2).tolist() == [2, 2, 1]


def test_a_row_ends_with_a_stop_id_and_a_text_when_all_rows_have(model):
    texts = model.generate(PROMPTS, 6)
    stop = [texts[0][2], texts[2][0]]
    ended = model.generate(PROMPTS, 6, stop=stop)
    for text, whole_text in zip(ended, texts, strict=True):
        ends = [i for i, token in enumerate(whole_text) if token in stop]
        assert text == whole_text[: ends[0] + 1 if ends else None]
    columns = [*model.stream(PROMPTS[:1], 6, stop=stop)]
    assert [int(column[0]) for column in columns] == ended[0]


def test_a_step_writes_new_keys_in_place_and_copies_no_cache():
    model = MODELS["gpt2"]()
    writer = generation.Writer(model, 2, 32)
    settings = generation.checked_settings(
        2, VOCAB, temperature=0, top_k=0, top_p=1.0, penalty=1.0, seed=0
    )
    batch = settings | {"tokens": np.zeros((2, 1), np.int64), "lengths": np.ones(2, np.int64)}
    plan = generation.write.compile(writer, spec_of(batch, "a test"))
    cache_bytes = writer.layers[0].keys.type.size_bytes
    launches = [launch for actor in plan.actors for launch in actor.launches]
    writers = [
        launch.op
        for launch in launches
        if any([plan.views[view].type.size_bytes >= cache_bytes for view in launch.outputs])
    ]
    assert writers == ["assign_rows"] * 4  # keys and values of two layers
    moved = [
        plan.views[launch.inputs[2]].type.size_bytes
        for launch in launches
        if launch.op == "assign_rows"
    ]
    assert max(moved) == 2 * 16 * 4  # a token of each of two rows, 16 floats


def test_texts_share_plans_of_a_bucket_and_of_one_token(caplog):
    model = MODELS["gpt2"]().init(0)
    model.generate([[1, 2, 3]], 3)
    caplog.clear()
    for prompt in ([*range(16)], [5]):
        model.generate([prompt], 3)
    assert "recompiled" not in caplog.text


def test_another_text_ends_the_one_before():
    model = MODELS["gpt2"]().init(0)
    first = model.stream([[1, 2]], 5)
    next(first)
    next(model.stream([[3, 4]], 5))
    with raises(RuntimeError):
        next(first)


@pytest.mark.parametrize(
    "arguments",
    [
        {"prompts": []},
        {"prompts": [[]]},
        {"prompts": "Hello"},
        {"prompts": [1, 2]},
        {"prompts": [[1, VOCAB]]},
        {"prompts": [[1.5]]},
        {"prompts": [[1] * LENGTH]},
        {"prompts": [[1]], "max_new_tokens": 0},
        {"prompts": [[1]], "max_new_tokens": LENGTH},
        {"prompts": [[1]], "top_p": 0.0},
        {"prompts": [[1]], "top_p": 1.5},
        {"prompts": [[1]], "top_k": -1},
        {"prompts": [[1]], "temperature": -0.5},
        {"prompts": [[1]], "temperature": [1.0, 1.0]},
        {"prompts": [[1]], "repetition_penalty": 0},
        {"prompts": [[1]], "seed": -1},
        {"prompts": [[1]], "stop": [VOCAB]},
        {"prompts": [[1]], "context": 3},
        {"prompts": [[1]], "context": LENGTH + 1},
    ],
    ids=str,
)
def test_what_cannot_be_written_is_refused_with_a_remedy(arguments):
    """At the call, before anything is compiled."""
    with raises(ValueError):
        MODELS["gpt2"]().stream(**{"max_new_tokens": 5} | arguments)
