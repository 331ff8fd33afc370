"""Text from a model of the next token: keys and values are kept, tokens are chosen in the plan.

A step of the job `write` reads a whole prompt, or the token that the step before chose. Keys and
values of all tokens are buffers [batch, heads, context, size], in which a row has its tokens from
place 0 on, whatever the other rows have; a step writes one place of each row and copies nothing.
So there is one plan for prompts of each bucket of lengths, and one for all further tokens.
"""

import numbers
import weakref

import numpy as np

import actorflow as af
from actorflow import nn

SHORTEST = 16
"""Prompts are padded to this length or twice, four times, ... of it."""


class KeysAndValues(nn.Module):
    """What a layer of attention keeps of the tokens of each row."""

    def __init__(self, batch, heads, context, size):
        self.keys = nn.Buffer((batch, heads, context, size))
        self.values = nn.Buffer((batch, heads, context, size))

    def attend(self, q, k, v, place):
        """Keep k and v [batch, heads, T, size], and return what q has of all that it may see.

        Without a `place` they are those of the first T tokens; else of one token of each row, at
        place [batch].
        """
        self.keys.assign(self._with(self.keys, k, place))
        self.values.assign(self._with(self.values, v, place))
        if place is None:
            return af.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        is_there = np.arange(self.keys.shape[2]) <= place.reshape(-1, 1, 1, 1)
        return af.scaled_dot_product_attention(q, self.keys, self.values, is_there, enable_gqa=True)

    def _with(self, kept, new, place):
        batch, heads, length, _ = new.shape
        row, head = np.arange(batch).reshape(-1, 1, 1), np.arange(heads).reshape(-1, 1)
        places = np.arange(length) if place is None else place.reshape(-1, 1, 1)
        return af.index_put(kept, (row, head, places), new)


def choose(scores, seen, place, settings):
    """Return a token for each row of scores [batch, vocab], int64.

    The order is that of transformers: the penalty of tokens that were seen, the temperature, the
    `top_k` most likely, of these the fewest that have `top_p`. Of equally likely tokens the first
    ones count. Temperature 0 is the most likely token. A draw depends on the row's seed and place.
    """
    penalty = settings.penalty.to(scores.dtype).reshape(-1, 1)
    scores = af.where(seen, af.where(scores > 0, scores / penalty, scores * penalty), scores)
    best = af.argmax(scores, -1)

    def drawn():
        warmth = af.where(settings.temperature > 0, settings.temperature, 1.0).reshape(-1, 1)
        order = af.argsort(scores, -1, descending=True)
        number = np.arange(scores.shape[-1])
        sorted_scores = af.gather(scores, -1, order).to("float64") / warmth
        is_left = number < settings.top_k.reshape(-1, 1)
        shares = af.softmax(af.where(is_left, sorted_scores, -np.inf), -1)
        before = af.cumsum(shares, -1) - shares
        shares = af.where((before < settings.top_p.reshape(-1, 1)) | (number == 0), shares, 0.0)
        bounds = af.cumsum(shares, -1)
        draw = (af.rand_at(settings.seed, place).reshape(-1, 1) * bounds[:, -1:]).to("float64")
        at = ((bounds <= draw) & (shares > 0)).to("int64").sum(-1, keepdim=True)
        last = (shares > 0).to("int64").sum(-1, keepdim=True) - 1  # a draw may round to the end
        return af.gather(order, -1, af.minimum(at, last)).reshape(-1)

    is_drawn = settings.temperature > 0
    return af.where(is_drawn, af.cond(is_drawn.any(), drawn, lambda: best), best)


class Writer(nn.Module):
    """A model with what it keeps of `batch` rows of up to `context` tokens."""

    def __init__(self, model, batch, context):
        layers, heads, size = model.kept
        self.model, self.batch, self.context = model, batch, context
        self.layers = [KeysAndValues(batch, heads, context, size) for _ in range(layers)]
        self.seen = nn.Buffer((batch, model.vocab), dtype="bool")

    def __call__(self, batch):
        """Return the next "token" [batch], and the "scores" [batch, vocab] that it is chosen by.

        `batch.tokens` [batch, T] are prompts, padded behind with tokens of theirs, or with T = 1
        the newest token of each row. `batch.lengths` [batch] counts the tokens of rows with these.
        """
        tokens, last, rows = batch.tokens, batch.lengths - 1, np.arange(self.batch)
        if tokens.shape[1] == 1:
            features = self.model.features(tokens, self.layers, last)[:, 0]
            before = self.seen
        else:
            features = self.model.features(tokens, self.layers)[rows, last]
            before = np.zeros(self.seen.shape, bool)
        seen = af.index_put(before, (rows.reshape(-1, 1), tokens), np.ones(tokens.shape, bool))
        self.seen.assign(seen)
        scores = self.model.head(features)
        return {"token": choose(scores, seen, batch.lengths, batch), "scores": scores}


@af.job(train=False, max_plans=64)
def write(writer, batch):
    return {"token": writer(batch)["token"]}


class LanguageModel(nn.Module):
    """Scores of the next token at each place of x [batch, T]: `head` of `features`.

    A model has `vocab`; `length`, the most tokens, or None; and `kept`, its layers and the heads
    and the size of the keys of one. `features(x, layers, place)` calls `KeysAndValues.attend` of
    each layer where there are some.
    """

    def __call__(self, x):
        return self.head(self.features(x))

    def generate(self, prompts, max_new_tokens=64, **settings):
        """Return the new tokens of each prompt, a list of ints each; see `stream`."""
        texts = [[] for _ in prompts]
        for tokens in self.stream(prompts, max_new_tokens, **settings):
            for text, token in zip(texts, tokens.tolist(), strict=True):
                text += [token] * (token >= 0)
        return texts

    def stream(
        self, prompts, max_new_tokens=64, *, temperature=0.0, top_k=0, top_p=1.0,
        repetition_penalty=1.0, seed=0, stop=(), context=None,
    ):  # fmt: skip
        """Yield the next token of each prompt, int64 [batch], as they come; -1 of those at an end.

        Args:
            prompts: lists of ids, of any lengths.
            max_new_tokens: of each prompt.
            temperature: 0 takes the most likely token. This and what follows up to `seed` may be
                a list with one for each prompt.
            top_k: only so many of the most likely tokens; 0 for all.
            top_p: of these the fewest that have this share together.
            repetition_penalty: divides the scores of tokens that there were before, if they are
                above 0, and multiplies them else (Keskar et al., 2019).
            seed: of the first prompt, the next ones have the seeds that follow. A row with the same
                prompt, settings and seed goes on alike, whatever the other rows are.
            stop: ids that end their row, as its last token.
            context: tokens of a row that there is room for; by default as many as are needed, or
                some more. Calls of the same number of prompts share their plans where that fits.

        Raises ValueError for what cannot be written.
        """
        rows = checked_prompts(prompts, self.vocab)
        longest = max(map(len, rows))
        need = longest + whole("max_new_tokens", max_new_tokens, 1)
        if self.length is not None and need > self.length:
            raise ValueError(
                f"the longest prompt has {longest} tokens, and with {max_new_tokens} new ones that"
                f" is more than the {self.length} of the model: keep the last tokens of the prompt,"
                " or lower max_new_tokens"
            )
        batch = checked_settings(
            len(rows), self.vocab, temperature=temperature, top_k=top_k, top_p=top_p,
            penalty=repetition_penalty, seed=seed,
        )  # fmt: skip
        remedy = ": give ids of this model's tokenizer"
        stops = [whole("an id of stop", token, 0, self.vocab - 1, remedy) for token in stop]
        writer = self._writer(len(rows), need, context)
        return tokens_of(writer, rows, batch, stops, max_new_tokens)

    def _writer(self, batch, need, context):
        """Return a writer with room for so many tokens: that of the last call, where it has."""
        if context is not None:
            remedy = ": it has room for the longest prompt and its new tokens; leave it out"
            whole("context", context, need, self.length, remedy)
        kept = self.memo().get(write)
        if kept is not None:
            fits = kept.batch == batch and kept.context >= need and context in (None, kept.context)
            if fits:
                return kept
            write.close(kept)
        room = context or min(max(bucket_of(need), 4 * SHORTEST), self.length or 1 << 62)
        return self.memo().set(write, Writer(self, batch, room))


def bucket_of(length):
    """Return the least of 16, 32, 64, ... that is as long."""
    return max(SHORTEST, 1 << (length - 1).bit_length())


TURNS = weakref.WeakKeyDictionary()
"""By writer what stands for the text that it writes."""


def tokens_of(writer, rows, settings, stops, count):
    """Yield up to `count` tokens of each row of ids; see `LanguageModel.stream`."""
    lengths = np.array([len(row) for row in rows])
    width = min(bucket_of(int(lengths.max())), writer.context)
    tokens = np.array([row + row[:1] * (width - len(row)) for row in rows])
    TURNS[writer] = turn = object()
    is_over = np.zeros(len(rows), bool)
    for _ in range(count):
        if TURNS[writer] is not turn:
            raise RuntimeError(
                "another text of this model was begun, in whose place this one cannot go on: end"
                " one before the next, or give both prompts to one call"
            )
        new = write.step(writer, settings | {"tokens": tokens, "lengths": lengths})["token"]
        yield np.where(is_over, -1, new)
        is_over |= np.isin(new, stops)
        if is_over.all():
            return
        tokens, lengths = new.reshape(-1, 1), lengths + 1


def whole(name, value, least, most=None, remedy=""):
    """Return a number that is an integer in a range. Raises ValueError for another."""
    is_one = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not is_one or value < least or (most is not None and value > most):
        bounds = f"{least} or more" if most is None else f"in {least}..{most}"
        raise ValueError(f"{name} must be an integer, {bounds}, got {value!r}{remedy}")
    return int(value)


def checked_prompts(prompts, vocab):
    """Return prompts as lists of ids. Raises ValueError for those that are none."""
    is_text = isinstance(prompts, str) or not hasattr(prompts, "__len__")
    if is_text or not len(prompts) or not all(hasattr(prompt, "__len__") for prompt in prompts):
        raise ValueError(
            "prompts must be a list of lists of ids, one for each text, such as [[15496, 995]]; got"
            f" {prompts!r:.60}: put a single prompt into a list, and encode text by the tokenizer"
        )
    rows = [[*np.asarray(prompt).tolist()] for prompt in prompts]
    for number, row in enumerate(rows):
        if not row:
            raise ValueError(
                f"prompt {number} is empty: begin it with the token that separates texts, such as"
                " 50256 of GPT-2"
            )
        for token in row:
            remedy = ": encode the text by the tokenizer of this model"
            whole(f"an id of prompt {number}", token, 0, vocab - 1, remedy)
    return rows


RANGES = {
    "temperature": (lambda x: 0 <= x < np.inf, "a number, 0 or more"),
    "top_k": (lambda x: x >= 0 and x == int(x), "an integer, 0 or more (0 keeps all tokens)"),
    "top_p": (lambda x: 0 < x <= 1, "above 0 and up to 1 (1 keeps all tokens)"),
    "penalty": (lambda x: 0 < x < np.inf, "a number above 0 (1 changes nothing)"),
    "seed": (lambda x: 0 <= x < 2**31 and x == int(x), "an integer in 0..2147483647"),
}


def checked_settings(count, vocab, **given):
    """Return the settings of all rows as arrays [count]. Raises ValueError with what is wrong."""
    settings = {}
    for name, value in given.items():
        is_right, expected = RANGES[name]
        said = "repetition_penalty" if name == "penalty" else name
        values = np.asarray(value)
        if name == "seed" and values.ndim == 0 and values.dtype.kind == "i":
            values = values + np.arange(count)
        if values.shape not in ((), (count,)):
            raise ValueError(
                f"{said} must be one number, or one for each of the {count} prompts; got {value!r}"
            )
        wide = np.broadcast_to(values, (count,))
        if values.dtype.kind not in "iuf" or not all(map(is_right, wide.tolist())):
            raise ValueError(f"{said} must be {expected}; got {value!r}")
        settings[name] = wide.astype(np.int64 if name in ("top_k", "seed") else np.float64)
    settings["top_k"] = np.where(settings["top_k"] == 0, vocab, settings["top_k"])
    return settings
