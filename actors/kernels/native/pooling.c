/* The largest elements of windows, where they lie there, and the gradient; tensors that lie anyhow.
 *
 * A row of windows is taken in blocks of lanes: some windows of some channels, in the order in which
 * x has them, so that what is near is read together. A table says how far from the first lane each
 * lies, in x, y and taps, and one for the whole tensor does. Taps come one after another, each for
 * all lanes at once: no branch hangs on a value, which of a window is the largest cannot be guessed.
 *
 * A thread takes an image's group of channels, so that what windows share is added up by one thread;
 * of what is not added up it may take some rows of windows.
 * Space has three axes, the first of which may be of one.
 */
#include <math.h>

#include "af_math.h"
#include "runtime.h"

#define MOST_LANES 128
#define MOST_NEAR 512

enum { LARGEST, ADD, PICK, SPREAD }; /* SPREAD: the gradient where windows are tiles of x */

typedef struct {
    char *x, *y, *taps;
    int64_t units, units_per_chunk, max_workers;
    int64_t op, form; /* form: 1 for double and 2 for bfloat16, and 3 more for wide taps */
    int64_t channels, group, at_once, is_last; /* of a block: channels, windows, and their order */
    int64_t parts; /* of the rows of windows of a block's channels, each of them a unit */
    int64_t x_steps[5], y_steps[5], tap_steps[5];
    int64_t extents[3], counts[3], kernel[3], strides[3], dilation[3], low[3];
    /* Where x is narrower than what is added up: sums of a unit for each worker, in which x_steps
     * are; steps of x itself. */
    char *sums;
    int64_t sum_bytes, into_steps[5];
} Pool;

/* Of each lane: how far it lies from the first, in elements. */
typedef struct {
    int32_t x[MOST_LANES], y[MOST_LANES], taps[MOST_LANES];
    int is_dense, are_dense; /* x, and y with taps: the lanes lie side by side */
    int is_near, is_filled;  /* lanes ascend in x, MOST_NEAR at most; tiles of them leave no gap */
} Lanes;

static void lay_out(const Pool *p, Lanes *to) {
    const int64_t windows = p->at_once, step = p->strides[2] * p->x_steps[4];
    const int64_t row = p->is_last ? p->group : 1;
    to->is_dense = to->are_dense = to->is_near = 1;
    to->is_filled = p->x_steps[4] == row && (p->is_last ? p->x_steps[1] == 1 : p->group == 1) &&
                    windows * p->kernel[2] * row <= MOST_NEAR;
    for (int64_t i = 0; i < p->group * windows; i++) {
        const int64_t channel = p->is_last ? i % p->group : i / windows;
        const int64_t window = p->is_last ? i / p->group : i % windows;
        to->x[i] = (int32_t)(channel * p->x_steps[1] + window * step);
        to->y[i] = (int32_t)(channel * p->y_steps[1] + window * p->y_steps[4]);
        to->taps[i] = (int32_t)(channel * p->tap_steps[1] + window * p->tap_steps[4]);
        to->is_dense &= to->x[i] == i;
        to->is_near &= to->x[i] >= (i ? to->x[i - 1] : 0) && to->x[i] < MOST_NEAR;
        to->are_dense &= to->y[i] == i && to->taps[i] == i;
    }
}

/* Numbers from `first` to before `stop`. */
typedef struct {
    int64_t begin, first, stop;
} Reach;

/* The taps of a window that lie inside along an axis. */
static Reach reach_of(const Pool *p, int axis, int64_t window) {
    const int64_t d = p->dilation[axis], begin = window * p->strides[axis] - p->low[axis];
    const int64_t room = p->extents[axis] - begin;
    Reach r = {begin, begin < 0 ? (-begin + d - 1) / d : 0, p->kernel[axis]};
    if (begin + (r.stop - 1) * d >= p->extents[axis]) r.stop = room > 0 ? (room + d - 1) / d : 0;
    return r;
}

/* The windows of a block, of `windows`, whose tap lies inside; `begin` is where the first has it. */
static Reach inside_of(const Pool *p, int64_t begin, int64_t windows) {
    const int64_t s = p->strides[2], room = p->extents[2] - begin;
    Reach r = {begin, begin < 0 ? (-begin + s - 1) / s : 0, windows};
    if (begin + (windows - 1) * s >= p->extents[2]) r.stop = room > 0 ? (room + s - 1) / s : 0;
    return r;
}

/* What an element is read and written by. All but sums are elements of x, which round to themselves. */
#define AS_IT_IS(v) (v)
#define CUT_OFF(v) ((uint16_t)(af_bits_of(v) >> 16))

#define FOR_LANES for (int64_t i = first; i < stop; i++)
#define POOL(NAME, ITEM, REAL, TAP, LANE, READ, WRITE, ROUND, NEAR)                               \
    static inline __attribute__((always_inline)) void NAME##_lanes(                               \
        int64_t op, void *restrict from, const int32_t *restrict at, int64_t first, int64_t stop, \
        LANE own, LANE none, REAL *restrict value, LANE *restrict tap) {                          \
        ITEM *restrict x = from;                                                                  \
        REAL *restrict sum = from;                                                                \
        if (op == LARGEST)                                                                        \
            FOR_LANES {                                                                           \
                const REAL v = READ(x[at ? at[i] : i]);                                           \
                const int is_better = (v > value[i]) | (v != v) | (tap[i] == none);               \
                value[i] = is_better ? v : value[i], tap[i] = is_better ? own : tap[i];           \
            }                                                                                     \
        else if (op == PICK)                                                                      \
            FOR_LANES value[i] = tap[i] == own ? READ(x[at ? at[i] : i]) : value[i];              \
        else if (op == SPREAD) {                                                                  \
            _Pragma("GCC ivdep") FOR_LANES x[at ? at[i] : i] = tap[i] == own ? WRITE(value[i]) : 0;\
        } else                                                                                    \
            _Pragma("GCC ivdep") FOR_LANES sum[at ? at[i] : i] += tap[i] == own ? value[i] : 0;   \
    }                                                                                             \
    static void NAME##_tap(const Pool *p, void *x, const Lanes *at, int64_t first, int64_t stop,  \
                           LANE own, LANE none, REAL *value, LANE *tap) {                         \
        const int32_t *far = at->x;                                                               \
        if (NEAR##_tap(p, x, at, first, stop, own, none, value, tap)) return;                     \
        if (at->is_dense)                                                                         \
            switch (p->op) {                                                                      \
            case LARGEST: NAME##_lanes(LARGEST, x, 0, first, stop, own, none, value, tap); break; \
            case ADD: NAME##_lanes(ADD, x, 0, first, stop, own, none, value, tap); break;         \
            case PICK: NAME##_lanes(PICK, x, 0, first, stop, own, none, value, tap); break;       \
            default: NAME##_lanes(SPREAD, x, 0, first, stop, own, none, value, tap);              \
            }                                                                                     \
        else                                                                                      \
            switch (p->op) {                                                                      \
            case LARGEST:                                                                         \
                NAME##_lanes(LARGEST, x, far, first, stop, own, none, value, tap);                \
                break;                                                                            \
            case ADD: NAME##_lanes(ADD, x, far, first, stop, own, none, value, tap); break;       \
            case PICK: NAME##_lanes(PICK, x, far, first, stop, own, none, value, tap); break;     \
            default: NAME##_lanes(SPREAD, x, far, first, stop, own, none, value, tap);            \
            }                                                                                     \
    }                                                                                             \
    static void NAME##_block(const Pool *p, char *x, ITEM *y, TAP *taps, const Lanes *at,         \
                             const Reach *r, int64_t window, int64_t channels) {                  \
        const int64_t *k = p->kernel, *d = p->dilation, *step = p->x_steps;                       \
        const int64_t windows = af_min(p->counts[2] - window, p->at_once);                        \
        const int64_t lanes = windows * channels, none = k[0] * k[1] * k[2];                      \
        const int64_t begin = window * p->strides[2] - p->low[2];                                 \
        const int64_t item = p->op == ADD ? sizeof(REAL) : sizeof(ITEM);                          \
        REAL value[MOST_LANES];                                                                   \
        LANE tap[MOST_LANES];                                                                     \
        if (p->op == LARGEST)                                                                     \
            for (int64_t i = 0; i < lanes; i++) value[i] = -INFINITY, tap[i] = (LANE)none;        \
        else if (at->are_dense)                                                                   \
            for (int64_t i = 0; i < lanes; i++) value[i] = READ(y[i]), tap[i] = (LANE)taps[i];    \
        else                                                                                      \
            for (int64_t i = 0; i < lanes; i++)                                                   \
                value[i] = READ(y[at->y[i]]), tap[i] = (LANE)taps[at->taps[i]];                   \
        if (p->op == PICK) memset(value, 0, sizeof value);                                        \
        for (int64_t a = r[0].first; a < r[0].stop; a++)                                          \
            for (int64_t b = r[1].first; b < r[1].stop; b++) {                                    \
                char *row = x + item * (r[0].begin + a * d[0]) * step[2] +                        \
                            item * (r[1].begin + b * d[1]) * step[3];                             \
                const LANE before = (LANE)((a * k[1] + b) * k[2]);                                \
                if (NEAR##_spread(p, row + item * begin * step[4], at, lanes, before, value, tap))\
                    continue;                                                                     \
                for (int64_t c = 0; c < k[2]; c++) {                                              \
                    const LANE own = (LANE)(before + c);                                          \
                    const Reach in = inside_of(p, begin + c * d[2], windows);                     \
                    if (in.first >= in.stop) continue;                                            \
                    char *from = row + item * in.begin * step[4];                                 \
                    const int64_t width = p->is_last ? channels : 1;                              \
                    const int is_whole = p->is_last || in.stop - in.first == windows;             \
                    int64_t first = in.first * width, stop = in.stop * width;                     \
                    if (is_whole && !p->is_last) stop = lanes;                                    \
                    for (int64_t n = is_whole ? 1 : channels; n > 0; n--) {                       \
                        NAME##_tap(p, from, at, first, stop, own, (LANE)none, value, tap);        \
                        first += windows, stop += windows;                                        \
                    }                                                                             \
                }                                                                                 \
            }                                                                                     \
        const int is_read = p->op == LARGEST || p->op == PICK, is_told = p->op == LARGEST;        \
        if (is_read && at->are_dense)                                                             \
            for (int64_t i = 0; i < lanes; i++) y[i] = WRITE(value[i]);                           \
        else if (is_read)                                                                         \
            for (int64_t i = 0; i < lanes; i++) y[at->y[i]] = WRITE(value[i]);                    \
        if (is_told && at->are_dense)                                                             \
            for (int64_t i = 0; i < lanes; i++) taps[i] = (TAP)tap[i];                            \
        else if (is_told)                                                                         \
            for (int64_t i = 0; i < lanes; i++) taps[at->taps[i]] = (TAP)tap[i];                  \
    }                                                                                             \
    static void NAME##_clear(const Pool *p, REAL *x, int64_t channels) {                          \
        const int64_t *n = p->extents, *step = p->x_steps;                                        \
        for (int64_t a = 0; a < n[0]; a++)                                                        \
            for (int64_t b = 0; b < n[1]; b++) {                                                  \
                REAL *row = x + a * step[2] + b * step[3];                                        \
                if (p->is_last)                                                                   \
                    for (int64_t c = 0; c < n[2]; c++)                                            \
                        for (int64_t i = 0; i < channels; i++) row[c * step[4] + i * step[1]] = 0;\
                else                                                                              \
                    for (int64_t i = 0; i < channels; i++)                                        \
                        for (int64_t c = 0; c < n[2]; c++) row[c * step[4] + i * step[1]] = 0;    \
            }                                                                                     \
    }                                                                                             \
    static void NAME##_round(const Pool *p, const REAL *from, ITEM *x, int64_t channels) {        \
        const int64_t *n = p->extents, *step = p->x_steps, *into = p->into_steps;                 \
        const int64_t inner = p->is_last ? 1 : 4, outer = p->is_last ? 4 : 1;                     \
        const int64_t width = p->is_last ? channels : n[2], rows = p->is_last ? n[2] : channels;  \
        for (int64_t a = 0; a < n[0]; a++)                                                        \
            for (int64_t b = 0; b < n[1]; b++)                                                    \
                for (int64_t row = 0; row < rows; row++) {                                        \
                    const REAL *sum = from + a * step[2] + b * step[3] + row * step[outer];       \
                    ITEM *to = x + a * into[2] + b * into[3] + row * into[outer];                 \
                    for (int64_t i = 0; i < width; i++) to[i * into[inner]] = ROUND(sum[i]);      \
                }                                                                                 \
    }                                                                                             \
    static void NAME(void *arguments, int64_t chunk, int32_t worker) {                            \
        const Pool *p = arguments;                                                                \
        const int64_t first = chunk * p->units_per_chunk, *counts = p->counts;                    \
        const int64_t groups = (p->channels + p->group - 1) / p->group;                           \
        const int64_t *yn = p->y_steps, *tn = p->tap_steps;                                       \
        Lanes at;                                                                                 \
        lay_out(p, &at);                                                                          \
        for (int64_t n = first; n < af_min(first + p->units_per_chunk, p->units); n++) {          \
            const int64_t part = n % p->parts, block = n / p->parts;                              \
            const int64_t image = block / groups, channel = block % groups * p->group;            \
            const int64_t channels = af_min(p->channels - channel, p->group);                     \
            const int64_t *xn = p->sums ? p->into_steps : p->x_steps;                             \
            ITEM *own = (ITEM *)p->x + image * xn[0] + channel * xn[1];                           \
            char *x = p->sums ? p->sums + worker * p->sum_bytes : (char *)own;                    \
            ITEM *y = (ITEM *)p->y + image * yn[0] + channel * yn[1];                             \
            TAP *tap = (TAP *)p->taps + image * tn[0] + channel * tn[1];                          \
            Reach r[2];                                                                           \
            if (p->op == ADD) NAME##_clear(p, (REAL *)x, channels);                               \
            for (int64_t a = 0; a < counts[0]; a++) {                                             \
                r[0] = reach_of(p, 0, a);                                                         \
                for (int64_t b = counts[1] * part / p->parts;                                     \
                     b < counts[1] * (part + 1) / p->parts; b++) {                                \
                    r[1] = reach_of(p, 1, b);                                                     \
                    for (int64_t c = 0; c < counts[2]; c += p->at_once)                           \
                        NAME##_block(p, x, y + a * yn[2] + b * yn[3] + c * yn[4],                 \
                                     tap + a * tn[2] + b * tn[3] + c * tn[4], &at, r, c,          \
                                     channels);                                                   \
                }                                                                                 \
            }                                                                                     \
            if (p->sums) NAME##_round(p, (const REAL *)x, own, channels);                         \
        }                                                                                         \
    }

#define NONE_tap(...) 0
#define NONE_spread(...) 0

POOL(pool_float, float, float, uint8_t, int32_t, AS_IT_IS, AS_IT_IS, AS_IT_IS, NONE)
POOL(pool_double, double, double, uint8_t, int64_t, AS_IT_IS, AS_IT_IS, AS_IT_IS, NONE)
POOL(pool_float_wide, float, float, int32_t, int32_t, AS_IT_IS, AS_IT_IS, AS_IT_IS, NONE)
POOL(pool_double_wide, double, double, int32_t, int64_t, AS_IT_IS, AS_IT_IS, AS_IT_IS, NONE)

/* No processor gathers 16 bits. The elements between the first lane and the last are converted side
 * by side, and gathered as float: a fifth of the time. Return 0 where the lanes are not near. */
static int half_tap(const Pool *p, const void *x, const Lanes *at, int64_t first, int64_t stop,
                    int32_t own, int32_t none, float *value, int32_t *tap) {
    const uint16_t *from = x;
    float near[MOST_NEAR];
    if (at->is_dense || !at->is_near || p->op == SPREAD || p->op == ADD) return 0;
    const int64_t end = at->x[stop - 1] + 1;
#pragma omp simd
    for (int64_t i = at->x[first]; i < end; i++) near[i] = af_from_bf16(from[i]);
    if (p->op == LARGEST)
        pool_float_lanes(LARGEST, near, at->x, first, stop, own, none, value, tap);
    else
        pool_float_lanes(PICK, near, at->x, first, stop, own, none, value, tap);
    return 1;
}

/* Write the taps of tiles along the last axis, the first of which is `before`. */
static int half_spread(const Pool *p, void *x, const Lanes *at, int64_t lanes, int32_t before,
                       float *value, int32_t *tap) {
    const int64_t taps = p->kernel[2];
    uint16_t *to = x;
    float near[MOST_NEAR];
    if (p->op != SPREAD || at->is_dense || !at->is_filled) return 0;
    for (int64_t c = 0; c < taps; c++)
        pool_float_lanes(SPREAD, near + c * p->x_steps[4], at->x, 0, lanes, before + (int32_t)c, 0,
                         value, tap);
#pragma omp simd
    for (int64_t i = 0; i < lanes * taps; i++) to[i] = CUT_OFF(near[i]);
    return 1;
}

POOL(pool_half, uint16_t, float, uint8_t, int32_t, af_from_bf16, CUT_OFF, af_to_bf16, half)
POOL(pool_half_wide, uint16_t, float, int32_t, int32_t, af_from_bf16, CUT_OFF, af_to_bf16, half)

AF_EXPORT int32_t af_pool(void *arguments) {
    const Pool *p = arguments;
    const af_body bodies[] = {pool_float,      pool_double,      pool_half,
                              pool_float_wide, pool_double_wide, pool_half_wide};
    const int64_t chunks = (p->units + p->units_per_chunk - 1) / p->units_per_chunk;
    af_parallel(bodies[p->form], arguments, chunks, (int32_t)p->max_workers);
    return 0;
}
