/* Attention and its gradient over blocks of keys, with an online softmax.
 *
 * Forward (Milakov & Gimelshein, 2018; Dao, Fu, Ermon, Rudra & Re, FlashAttention, 2022, algorithm
 * 1): a chunk is a head and a block of queries. For each block of keys, packed transposed, a strip
 * of queries computes its scores, and adds exponentials and their product with the values to what
 * the strip has, which is scaled down where the row's maximum grew.
 *
 * Backward (same, appendix B): a chunk is a head, and a head keeps one thread busy. The
 * probabilities are exp(scale * score - lse - tail), the gradient of the scaled scores is
 * p * (dy vT - delta) with delta = sum(dy * y) of the row; the gradients of a block of keys are
 * complete when all strips of queries have passed over it, and those of the queries when all blocks
 * have. A head's sums run in one order, whoever computes it, and those of a score in that of the
 * forward pass: scores are the same to the bit.
 *
 * Everything is computed in float32. Where the processor multiplies pairs of bfloat16, operands of
 * that type stay as they are, and probabilities and the gradients of scores are rounded to it as
 * factors of their second product. Scratch is a few blocks of keys, strips of scores, and backward
 * the gradient of all queries of a head. What a causal mask hides is skipped but for the edges of
 * strips, which are zero. A zero times NaN is NaN: so where a block of values has numbers that are
 * not finite its rows are multiplied one by one, and keys of the backward product are made finite
 * (what sees them has NaN for a gradient of its score already).
 *
 * A mask, which may repeat along any axis, is added to a row of scores where it is scaled; a query
 * that it leaves nothing has zeros, and the lowest number for a maximum, so that exponentials of
 * -inf are 0 in the gradient too. Dropout numbers the weights of all heads [heads, rows, columns], and
 * draws those of a part of a row when it is there: weights after they were summed up, and in the
 * gradient products with values, and then weights.
 */
#include <float.h>
#include "runtime.h"
#include "sums.h"
#include "af_math.h"
#include "tiles.h"
#include "packing.h"

#define MOST_KEYS 512 /* of a block: more than attention.py takes */
#define GAP 16 /* between long rows, which else would meet in few sets of the cache */

/* What both launches are told; attention.py chooses the extents of blocks and plans scratch. */
typedef struct {
    int64_t rows, columns, width, out; /* queries, keys, and the elements of a row of q and of v */
    int64_t causal;
    int half, pairs; /* bfloat16 operands, and whether products take two of them at once */
    float scale;
    int64_t heads;
    int64_t keys, strip; /* keys of a block, a multiple of VW; queries of a strip, one of MR */
    int64_t block;       /* queries of a chunk; backward: all of them */
    int64_t parts;       /* blocks of a chunk; backward: heads */
    int32_t workers;
    int64_t scratch_bytes;
    char *scratch;
    int masked;
    int64_t mask_step; /* bytes between its columns: 0, or those of an element */
    int64_t least;     /* of 2^24, above which a weight is kept; 0 where none is dropped */
    float factor;
    uint64_t key, seed, step;
    const int64_t *firsts; /* the number of the first weight of each head, where that is told */
} call;

enum { ROWS, COLUMNS, WIDTH, OUT, CAUSAL, HALF, SCALE, HEADS, KEYS, STRIP, BLOCK, PARTS, WORKERS,
       BYTES, SCRATCH, MASKED, MASK_STEP, LEAST, FACTOR, KEY, SEED, STEP, FIRSTS, OPERANDS };

static call read_call(const af_word *w) {
    return (call){
        .rows = w[ROWS].i, .columns = w[COLUMNS].i, .width = w[WIDTH].i, .out = w[OUT].i,
        .causal = w[CAUSAL].i, .half = (int)w[HALF].i, .pairs = HAS_PAIRS && w[HALF].i,
        .scale = w[SCALE].f, .heads = w[HEADS].i, .keys = w[KEYS].i, .strip = w[STRIP].i,
        .block = w[BLOCK].i, .parts = w[PARTS].i, .workers = (int32_t)w[WORKERS].i,
        .scratch_bytes = w[BYTES].i, .scratch = w[SCRATCH].p,
        .masked = (int)w[MASKED].i, .mask_step = w[MASK_STEP].i, .least = w[LEAST].i,
        .factor = w[FACTOR].f, .key = (uint64_t)w[KEY].i,
        .seed = w[LEAST].i ? *(const uint64_t *)w[SEED].p : 0,
        .step = w[LEAST].i ? *(const uint64_t *)w[STEP].p : 0, .firsts = w[FIRSTS].p,
    };
}

/* Per operand three words: its address, the bytes between rows, and a table of the bytes from the
 * first head to each. */
static inline char *at(const af_word *w, int operand, int64_t head, int64_t row) {
    const af_word *o = w + OPERANDS + 3 * operand;
    return (char *)o[0].p + ((const int64_t *)o[2].p)[head] + row * o[1].i;
}

static inline int64_t step_of(const af_word *w, int operand) {
    return w[OPERANDS + 3 * operand + 1].i;
}

/* Rows of an operand of `count` elements, as a left or a right panel (see packing.h). */
static void load_left(float *to, int64_t width, const af_word *w, const call *c, int operand,
                      int64_t head, int64_t row, int64_t rows, int64_t count) {
    af_load_left(to, width, at(w, operand, head, row), step_of(w, operand), rows, count, c->half,
                 c->pairs);
}

static void load_right(float *to, int64_t width, const af_word *w, const call *c, int operand,
                       int64_t head, int64_t row, int64_t rows, int64_t count) {
    af_load_right(to, width, at(w, operand, head, row), step_of(w, operand), rows, count, c->half,
                  c->pairs);
}

static void store(const float *from, int64_t width, const af_word *w, const call *c, int operand,
                  int64_t head, int64_t row, int64_t rows, int64_t count, float factor) {
    af_store_rows(at(w, operand, head, row), step_of(w, operand), from, width, rows, count, c->half,
                  factor);
}

static inline float *take(char **from, int64_t count) {
    float *taken = (float *)*from;
    *from += (count * 4 + 63) / 64 * 64;
    return taken;
}

/* How many keys of the block [first, first + count) row `row` sees. */
static inline int64_t visible(const call *c, int64_t row, int64_t first, int64_t count) {
    if (!c->causal) return count;
    return af_max(0, af_min(count, row + af_max(c->columns - c->rows, 0) + 1 - first));
}

static inline float larger(float a, float b) { return b > a ? b : a; }

/* Fills the last vector of a row, of which `seen` elements count; returns where it ends. */
static inline int64_t hide(float *s, int64_t seen, float filler) {
    int64_t end = af_round_up(seen);
    for (int64_t j = seen; j < end; j++) s[j] = filler;
    return end;
}

static void multiply(const call *c, float *to, int64_t ldt, const float *a, int64_t a_row,
                     int64_t a_step, const float *b, int64_t ldb, int64_t m, int64_t n, int64_t k,
                     int add) {
#if HAS_PAIRS
    if (c->pairs) {
        af_multiply_pairs(to, ldt, a, a_row, a_step, b, ldb, m, n, k, add);
        return;
    }
#else
    (void)c;
#endif
    af_multiply(to, ldt, a, a_row, a_step, b, ldb, m, n, k, add);
}

/* Scales the scores of a row, of keys from `first` on, and adds the mask. */
static void add_mask(float *s, int64_t count, const af_word *w, const call *c, int operand,
                     int64_t head, int64_t row, int64_t first) {
    const char *mask = at(w, operand, head, row) + first * c->mask_step;
    const float *m = (const float *)mask;
    const af_half *low = (const af_half *)mask;
    float scale = c->scale;
    if (c->mask_step == 0) {
        float one = c->half ? af_from_bf16(*low) : *m;
        for (int64_t j = 0; j < count; j++) s[j] = s[j] * scale + one;
    } else if (c->half) {
        for (int64_t j = 0; j < count; j++) s[j] = s[j] * scale + af_from_bf16(low[j]);
    } else {
#pragma omp simd
        for (int64_t j = 0; j < count; j++) s[j] = s[j] * scale + m[j];
    }
}

/* What the weights of a row, of keys from `first` on, are multiplied with: 0 or c->factor. */
static void draw(float *kept, int64_t count, const call *c, int64_t head, int64_t row,
                 int64_t first) {
    uint64_t words[4 * (MOST_KEYS / 8 + 8)];
    int64_t begin = c->firsts ? c->firsts[head] : head * c->rows * c->columns;
    uint64_t element = (uint64_t)(begin + row * c->columns + first);
    int64_t skipped = (int64_t)(element % 8);
    af_philox(words, 1 + element / 8, (skipped + count + 7) / 8, c->step, c->seed, c->key);
    for (int64_t j = 0; j < count; j++) {
        int64_t place = skipped + j;
        uint32_t bits = (uint32_t)(words[place / 2] >> (place % 2 * 32)) >> 8;
        kept[j] = bits >= c->least ? c->factor : 0.0f;
    }
}

static inline void drop(float *x, const float *kept, int64_t count) {
#pragma omp simd
    for (int64_t j = 0; j < count; j++) x[j] *= kept[j];
}

/* One row of scores becomes exponentials; what the row has is scaled to its new maximum. */
static void add_exponentials(float *s, int64_t seen, int64_t width, float scale, float *largest,
                             double *sum, float *total, int64_t out) {
    float before = *largest, most = -INFINITY;
    int64_t end = hide(s, seen, -INFINITY);
#pragma omp simd reduction(max : most)
    for (int64_t j = 0; j < end; j++) most = s[j] > most ? s[j] : most;
    most = larger(before, most * scale);
    float shift = most == -INFINITY ? 0.0f : most; /* no score yet: exponentials are 0, or NaN */
#pragma omp simd
    for (int64_t j = 0; j < end; j++) s[j] = af_expf(s[j] * scale - shift);
    double added = af_sum_float(s, end);
    for (int64_t j = end; j < width; j++) s[j] = 0.0f;
    if (before == most || before == -INFINITY) {
        *sum += added;
    } else {
        float down = af_expf(before - most);
        *sum = *sum * down + added;
#pragma omp simd
        for (int64_t e = 0; e < out; e++) total[e] *= down;
    }
    *largest = most;
}

/* An element of a right panel. */
static inline float panel_at(const float *panel, int64_t width, int pairs, int64_t j, int64_t e) {
    if (!pairs) return panel[j * width + e];
    return af_from_bf16(((const af_half *)(panel + j / 2 * width + e))[j % 2]);
}

static int is_finite(const float *panel, int64_t count, int pairs) {
    const uint32_t __attribute__((may_alias)) *words = (const void *)panel;
    const uint32_t high = 0x7f800000u, low = 0x7f80u; /* exponents: all ones where not finite */
    uint32_t is_bad = 0;
    if (pairs) {
#pragma omp simd reduction(| : is_bad)
        for (int64_t i = 0; i < count; i++)
            is_bad |= ((words[i] & high) == high) | ((words[i] & low) == low);
    } else {
#pragma omp simd reduction(| : is_bad)
        for (int64_t i = 0; i < count; i++) is_bad |= (words[i] & high) == high;
    }
    return !is_bad;
}

/* Adds to a row of outputs what the keys that it sees have, and no other. */
static void add_seen(float *total, const float *p, const float *values, int64_t width, int pairs,
                     int64_t seen, int64_t out, int add) {
    for (int64_t e = 0; e < out; e++) {
        float sum = add ? total[e] : 0.0f;
        for (int64_t j = 0; j < seen; j++)
            sum = af_fmaf(p[j], panel_at(values, width, pairs, j, e), sum);
        total[e] = sum;
    }
}

/* Whether the mask hides some keys from all queries of a chunk: their block need not be read. */
static int are_hidden(const af_word *w, const call *c, int operand, int64_t head, int64_t begin,
                      int64_t end, int64_t first, int64_t count) {
    if (step_of(w, operand) == 0) end = begin + 1; /* one row for all */
    int64_t size = c->mask_step ? count : 1;
    for (int64_t row = begin; row < end; row++) {
        const char *mask = at(w, operand, head, row) + first * c->mask_step;
        for (int64_t j = 0; j < size; j++) {
            float x = c->half ? af_from_bf16(((const af_half *)mask)[j]) : ((const float *)mask)[j];
            if (x != -INFINITY) return 0;
        }
    }
    return 1;
}

enum { Q, K, V, Y, LSE, TAIL, MASK };

static void forward_block(const af_word *w, const call *c, int64_t head, int64_t begin, int64_t end,
                          char *scratch) {
    int64_t width = af_round_up(c->width), out = af_round_up(c->out), wide = c->keys + GAP;
    int64_t depth = af_words(c->width, c->pairs);
    float *keys = take(&scratch, c->width * wide), *values = take(&scratch, c->keys * out);
    float *rows = take(&scratch, af_max(c->keys, c->strip) * width);
    float *scores = take(&scratch, c->strip * wide), *narrow = take(&scratch, c->strip * wide);
    float *total = take(&scratch, c->block * out), *largest = take(&scratch, c->block);
    float *p = c->pairs ? narrow : scores;
    double *sums = (double *)take(&scratch, 2 * c->block);
    for (int64_t i = 0; i < end - begin; i++) largest[i] = -INFINITY, sums[i] = 0;
    int64_t last = visible(c, end - 1, 0, c->columns), num_blocks = 0;
    for (int64_t first = 0; first < last; first += c->keys) {
        int64_t count = af_min(c->keys, last - first);
        if (c->masked && are_hidden(w, c, MASK, head, begin, end, first, count)) continue;
        int is_later = num_blocks++ > 0;
        load_left(rows, width, w, c, K, head, first, count, c->width);
        af_transpose(keys, wide, af_round_up(count), rows, width, count, depth);
        load_right(values, out, w, c, V, head, first, count, c->out);
        int is_plain = !c->causal || is_finite(values, af_words(count, c->pairs) * out, c->pairs);
        for (int64_t i = begin, stop; i < end; i = stop) {
            stop = af_min(i + c->strip, end);
            int64_t seen = visible(c, stop - 1, first, count), num = stop - i, at_row = i - begin;
            int64_t n = af_round_up(seen);
            if (seen == 0) continue;
            load_left(rows, width, w, c, Q, head, i, num, c->width);
            multiply(c, scores, wide, rows, width, 1, keys, wide, num, n, depth, 0);
            for (int64_t r = 0; r < num; r++) {
                int64_t own = visible(c, i + r, first, count), row = at_row + r;
                float *s = scores + r * wide, kept[MOST_KEYS];
                if (own == 0) {
                    memset(s, 0, n * 4);
                    continue;
                }
                if (c->masked) add_mask(s, own, w, c, MASK, head, i + r, first);
                add_exponentials(s, own, n, c->masked ? 1.0f : c->scale, largest + row, sums + row,
                                 total + row * out, is_later ? out : 0);
                if (c->least) {
                    draw(kept, own, c, head, i + r, first);
                    drop(s, kept, own);
                }
            }
            if (!is_plain) {
                for (int64_t r = 0; r < num; r++)
                    add_seen(total + (at_row + r) * out, scores + r * wide, values, out, c->pairs,
                             visible(c, i + r, first, count), c->out, is_later);
                continue;
            }
            if (c->pairs) af_store_rows((char *)narrow, wide * 4, scores, wide, num, n, 1, 1.0f);
            multiply(c, total + at_row * out, out, p, wide, 1, values, out, num, out,
                     af_words(seen, c->pairs), is_later);
        }
    }
    if (num_blocks == 0) memset(total, 0, (size_t)((end - begin) * out) * 4);
    for (int64_t i = 0; i < end - begin; i++) {
        float sum = (float)sums[i], log_sum = sum == 0.0f ? NAN : af_logf(sum);
        float lse = largest[i] + log_sum, tail = (largest[i] - lse) + log_sum;
        int is_blind = c->masked && sum == 0.0f;
        if (is_blind) lse = -FLT_MAX, tail = 0.0f;
        store(total + i * out, out, w, c, Y, head, begin + i, 1, c->out,
              is_blind ? 0.0f : 1.0f / sum);
        *(float *)at(w, LSE, head, begin + i) = lse;
        *(float *)at(w, TAIL, head, begin + i) = tail;
    }
}

static void forward_chunk(void *arguments, int64_t chunk, int32_t worker) {
    const af_word *w = arguments;
    call c = read_call(w);
    int64_t blocks = (c.rows + c.block - 1) / c.block;
    char *scratch = c.scratch + worker * c.scratch_bytes;
    for (int64_t i = chunk * c.parts; i < (chunk + 1) * c.parts; i++) {
        if (i >= c.heads * blocks) break;
        int64_t begin = i % blocks * c.block;
        forward_block(w, &c, i / blocks, begin, af_min(begin + c.block, c.rows), scratch);
    }
}

static inline int64_t num_chunks(int64_t parts, int64_t group) {
    return (parts + group - 1) / group;
}

AF_EXPORT int32_t af_attention(void *arguments) {
    call c = read_call(arguments);
    int64_t parts = c.heads * ((c.rows + c.block - 1) / c.block);
    af_parallel(forward_chunk, arguments, num_chunks(parts, c.parts), c.workers);
    return 0;
}

enum { G_DY, G_Q, G_K, G_V, G_Y, G_LSE, G_TAIL, G_DQ, G_DK, G_DV, G_MASK };

/* Probabilities from scores, and the gradient of the scaled scores from that of probabilities. */
static void score_gradients(float *p, float *ds, int64_t seen, int64_t width, float lse,
                            float tail, float delta, float scale) {
    int64_t end = hide(p, seen, -INFINITY);
    hide(ds, seen, delta);
#pragma omp simd
    for (int64_t j = 0; j < end; j++) {
        p[j] = af_expf(p[j] * scale - lse - tail);
        ds[j] = (p[j] == 1.0f ? 0.0f : p[j]) * (ds[j] - delta); /* see the op */
    }
    for (int64_t j = seen; j < width; j++) p[j] = ds[j] = 0.0f; /* also where delta is NaN */
}

/* Rows of floats as rows of bfloat16 and, two by two, as words. */
static void narrow_rows(const float *from, float *rows, float *words, int64_t wide, int64_t num,
                        int64_t n) {
    af_store_rows((char *)rows, wide * 4, from, wide, num, n, 1, 1.0f);
    af_load_right(words, wide, (const char *)rows, wide * 4, num, n, 1, 1);
}

/* What the passes of a head share. Without pairs, the panels that differ by their side are one. */
typedef struct {
    int64_t width, out, wide;
    float *keys_t, *values_t, *keys, *dk, *dv, *dq, *delta;
    float *p, *ds, *q, *dy, *y; /* floats; q and dy as left panels */
    float *ds_rows, *p_words, *ds_words, *q_words, *dy_words, *dy_floats;
} backward;

static backward take_backward(const call *c, char *scratch) {
    int64_t width = af_round_up(c->width), out = af_round_up(c->out), wide = c->keys + GAP;
    backward b = {.width = width, .out = out, .wide = wide};
    b.keys_t = take(&scratch, c->width * wide), b.values_t = take(&scratch, c->out * wide);
    b.keys = take(&scratch, c->keys * width);
    b.dk = take(&scratch, c->keys * width), b.dv = take(&scratch, c->keys * out);
    b.dq = take(&scratch, c->rows * width), b.delta = take(&scratch, c->rows);
    b.p = take(&scratch, c->strip * wide), b.ds = take(&scratch, c->strip * wide);
    b.q = take(&scratch, c->strip * width);
    b.dy = take(&scratch, c->strip * out), b.y = take(&scratch, c->strip * out);
    b.ds_rows = b.ds, b.p_words = b.p, b.ds_words = b.ds;
    b.q_words = b.q, b.dy_words = b.dy, b.dy_floats = b.dy;
    if (c->pairs) {
        b.ds_rows = take(&scratch, c->strip * wide);
        b.p_words = take(&scratch, c->strip * wide), b.ds_words = take(&scratch, c->strip * wide);
        b.q_words = take(&scratch, c->strip * width);
        b.dy_words = take(&scratch, c->strip * out), b.dy_floats = take(&scratch, c->strip * out);
    }
    return b;
}

/* What is not finite becomes 0. */
static void make_finite(float *panel, int64_t count, int pairs) {
    uint32_t __attribute__((may_alias)) *words = (void *)panel;
    if (pairs) {
#pragma omp simd
        for (int64_t i = 0; i < count; i++) {
            uint32_t low = (words[i] & 0x7f80u) == 0x7f80u ? 0 : words[i] & 0xffffu;
            words[i] = low | ((words[i] & 0x7f800000u) == 0x7f800000u ? 0 : words[i] & 0xffff0000u);
        }
    } else {
#pragma omp simd
        for (int64_t i = 0; i < count; i++)
            words[i] = (words[i] & 0x7f800000u) == 0x7f800000u ? 0 : words[i];
    }
}

/* Packs a block of keys, and clears its gradients, which hold the left panels before. */
static void pack_keys(const af_word *w, const call *c, const backward *b, int64_t head,
                      int64_t first, int64_t count) {
    int64_t padded = af_round_up(count);
    load_left(b->dv, b->out, w, c, G_V, head, first, count, c->out);
    af_transpose(b->values_t, b->wide, padded, b->dv, b->out, count, af_words(c->out, c->pairs));
    load_left(b->dk, b->width, w, c, G_K, head, first, count, c->width);
    af_transpose(b->keys_t, b->wide, padded, b->dk, b->width, count,
                 af_words(c->width, c->pairs));
    load_right(b->keys, b->width, w, c, G_K, head, first, count, c->width);
    if (c->causal) make_finite(b->keys, af_words(count, c->pairs) * b->width, c->pairs);
    memset(b->dk, 0, count * b->width * 4);
    memset(b->dv, 0, count * b->out * 4);
}

static void pack_queries(const af_word *w, const call *c, const backward *b, int64_t head,
                         int64_t i, int64_t num) {
    load_left(b->q, b->width, w, c, G_Q, head, i, num, c->width);
    load_left(b->dy, b->out, w, c, G_DY, head, i, num, c->out);
    if (!c->pairs) return;
    load_right(b->q_words, b->width, w, c, G_Q, head, i, num, c->width);
    load_right(b->dy_words, b->out, w, c, G_DY, head, i, num, c->out);
}

static void find_delta(const af_word *w, const call *c, const backward *b, int64_t head, int64_t i,
                       int64_t num) {
    const char *y = at(w, G_Y, head, i), *dy = at(w, G_DY, head, i);
    af_load_rows(b->y, b->out, y, step_of(w, G_Y), num, c->out, c->half);
    if (c->pairs) af_load_rows(b->dy_floats, b->out, dy, step_of(w, G_DY), num, c->out, 1);
    for (int64_t r = 0; r < num; r++) {
        const float *y_row = b->y + r * b->out, *dy_row = b->dy_floats + r * b->out;
        float terms[256]; /* rows are not longer: see attention.py */
        for (int64_t e = 0; e < c->out; e++) terms[e] = dy_row[e] * y_row[e];
        b->delta[i + r] = (float)af_sum_float(terms, c->out);
    }
}

/* A strip of queries against a block of keys: adds to dq of the strip, and to dk and dv. */
static void backward_strip(const af_word *w, const call *c, const backward *b, int64_t head,
                           int64_t i, int64_t num, int64_t first, int64_t count) {
    int64_t seen = visible(c, i + num - 1, first, count), n = af_round_up(seen), wide = b->wide;
    int64_t by_keys = af_words(seen, c->pairs), by_rows = af_words(num, c->pairs);
    int64_t by_width = af_words(c->width, c->pairs), by_out = af_words(c->out, c->pairs);
    multiply(c, b->p, wide, b->q, b->width, 1, b->keys_t, wide, num, n, by_width, 0);
    multiply(c, b->ds, wide, b->dy, b->out, 1, b->values_t, wide, num, n, by_out, 0);
    for (int64_t r = 0; r < num; r++) {
        int64_t own = visible(c, i + r, first, count);
        float *p = b->p + r * wide, *ds = b->ds + r * wide, kept[MOST_KEYS];
        if (c->masked) add_mask(p, own, w, c, G_MASK, head, i + r, first);
        if (c->least) {
            draw(kept, own, c, head, i + r, first);
            drop(ds, kept, own);
        }
        score_gradients(p, ds, own, n, *(const float *)at(w, G_LSE, head, i + r),
                        *(const float *)at(w, G_TAIL, head, i + r), b->delta[i + r],
                        c->masked ? 1.0f : c->scale);
        if (c->least) drop(p, kept, own);
    }
    if (c->pairs) {
        narrow_rows(b->p, b->ds_rows, b->p_words, wide, num, n);
        narrow_rows(b->ds, b->ds_rows, b->ds_words, wide, num, n);
    }
    multiply(c, b->dq + i * b->width, b->width, b->ds_rows, wide, 1, b->keys, b->width, num,
             b->width, by_keys, first > 0);
    multiply(c, b->dk, b->width, b->ds_words, 1, wide, b->q_words, b->width, seen, b->width, by_rows,
             1);
    multiply(c, b->dv, b->out, b->p_words, 1, wide, b->dy_words, b->out, seen, b->out, by_rows, 1);
}

static void backward_head(const af_word *w, const call *c, int64_t head, char *scratch) {
    backward b = take_backward(c, scratch);
    for (int64_t first = 0; first < c->columns; first += c->keys) {
        int64_t count = af_min(c->keys, c->columns - first);
        pack_keys(w, c, &b, head, first, count);
        for (int64_t i = 0, stop; i < c->rows; i = stop) {
            stop = af_min(i + c->strip, c->rows);
            if (visible(c, stop - 1, first, count) == 0) continue; /* never in the first block */
            pack_queries(w, c, &b, head, i, stop - i);
            if (first == 0) find_delta(w, c, &b, head, i, stop - i);
            backward_strip(w, c, &b, head, i, stop - i, first, count);
        }
        store(b.dk, b.width, w, c, G_DK, head, first, count, c->width, c->scale);
        store(b.dv, b.out, w, c, G_DV, head, first, count, c->out, 1.0f);
    }
    store(b.dq, b.width, w, c, G_DQ, head, 0, c->rows, c->width, c->scale);
}

static void backward_chunk(void *arguments, int64_t chunk, int32_t worker) {
    const af_word *w = arguments;
    call c = read_call(w);
    char *scratch = c.scratch + worker * c.scratch_bytes;
    int64_t end = af_min((chunk + 1) * c.parts, c.heads);
    for (int64_t head = chunk * c.parts; head < end; head++)
        backward_head(w, &c, head, scratch);
}

AF_EXPORT int32_t af_attention_grad(void *arguments) {
    call c = read_call(arguments);
    af_parallel(backward_chunk, arguments, num_chunks(c.heads, c.parts), c.workers);
    return 0;
}
