/* The largest elements of windows, where they lie there, and the gradient; dense tensors.
 *
 * A thread takes whole planes, an image's channel each, so that what windows share is added up by
 * one thread, in the order of the windows. Space has three axes, the first of which may be of one.
 * Where channels come last, a plane is up to `MOST_LANES` of them, side by side.
 */
#include <math.h>

#include "runtime.h"

#define MOST_LANES 64

typedef struct {
    char *x, *y, *taps;
    int64_t planes, planes_per_chunk, max_workers;
    int64_t op, form; /* 0: max, 1: grad, 2: pick; 1 for double, and 2 for wide taps */
    int64_t channels; /* those that lie side by side, 1 where planes do */
    int64_t extents[3], counts[3], kernel[3], strides[3], dilation[3], low[3];
} Pool;

/* The taps of a window along an axis that lie inside: from `first` to before `stop`. */
typedef struct {
    int64_t begin, first, stop;
} Reach;

static Reach reach_of(const Pool *p, int axis, int64_t window) {
    const int64_t d = p->dilation[axis], begin = window * p->strides[axis] - p->low[axis];
    const int64_t room = p->extents[axis] - begin;
    Reach r = {begin, begin < 0 ? (-begin + d - 1) / d : 0, room > 0 ? (room + d - 1) / d : 0};
    r.stop = af_min(r.stop, p->kernel[axis]);
    return r;
}

static int64_t place_of(const Pool *p, const Reach *r, int64_t tap) {
    int64_t place = 0, step = 1;
    for (int axis = 2; axis >= 0; axis--) {
        place += (r[axis].begin + tap % p->kernel[axis] * p->dilation[axis]) * step;
        tap /= p->kernel[axis];
        step *= p->extents[axis];
    }
    return place;
}

#define POOL(NAME, REAL, TAP)                                                                     \
    static void NAME##_largest(const Pool *p, const REAL *x, const Reach *r, REAL *y, TAP *tap) { \
        const int64_t *k = p->kernel, *d = p->dilation, none = k[0] * k[1] * k[2];                \
        REAL best = -INFINITY;                                                                    \
        int64_t found = none;                                                                     \
        for (int64_t a = r[0].first; a < r[0].stop; a++)                                          \
            for (int64_t b = r[1].first; b < r[1].stop; b++) {                                    \
                const int64_t line = (r[0].begin + a * d[0]) * p->extents[1];                     \
                const REAL *row = x + (line + r[1].begin + b * d[1]) * p->extents[2];             \
                for (int64_t c = r[2].first; c < r[2].stop; c++) {                                \
                    const REAL value = row[r[2].begin + c * d[2]];                                \
                    if (value > best || value != value || found == none)                          \
                        best = value, found = (a * k[1] + b) * k[2] + c;                          \
                }                                                                                 \
            }                                                                                     \
        *y = best, *tap = (TAP)found;                                                             \
    }                                                                                             \
    static void NAME##_lanes(const Pool *p, REAL *x, REAL *y, TAP *tap, const Reach *r,           \
                             int64_t lanes) {                                                     \
        const int64_t *k = p->kernel, *d = p->dilation, none = k[0] * k[1] * k[2];                \
        REAL best[MOST_LANES];                                                                    \
        TAP found[MOST_LANES];                                                                    \
        for (int64_t i = 0; i < lanes; i++)                                                       \
            best[i] = p->op ? 0 : -INFINITY, found[i] = (TAP)none;                                \
        for (int64_t a = r[0].first; a < r[0].stop; a++)                                          \
            for (int64_t b = r[1].first; b < r[1].stop; b++)                                      \
                for (int64_t c = r[2].first; c < r[2].stop; c++) {                                \
                    const TAP own = (TAP)((a * k[1] + b) * k[2] + c);                             \
                    int64_t at = (r[0].begin + a * d[0]) * p->extents[1] + r[1].begin + b * d[1]; \
                    at = at * p->extents[2] + r[2].begin + c * d[2];                              \
                    REAL *restrict from = x + at * p->channels;                                   \
                    if (p->op == 0)                                                               \
                        for (int64_t i = 0; i < lanes; i++) {                                     \
                            const REAL value = from[i];                                           \
                            const int is_better =                                                 \
                                (value > best[i]) | (value != value) | (found[i] == (TAP)none);   \
                            best[i] = is_better ? value : best[i];                                \
                            found[i] = is_better ? own : found[i];                                \
                        }                                                                         \
                    else if (p->op == 1)                                                          \
                        for (int64_t i = 0; i < lanes; i++) from[i] += tap[i] == own ? y[i] : 0;  \
                    else                                                                          \
                        for (int64_t i = 0; i < lanes; i++)                                       \
                            best[i] = tap[i] == own ? from[i] : best[i];                          \
                }                                                                                 \
        if (p->op != 1) memcpy(y, best, (size_t)lanes * sizeof(REAL));                            \
        if (p->op == 0) memcpy(tap, found, (size_t)lanes * sizeof(TAP));                          \
    }                                                                                             \
    static void NAME##_blocks(const Pool *p, int64_t n) {                                         \
        const int64_t blocks = (p->channels + MOST_LANES - 1) / MOST_LANES, all = p->channels;    \
        const int64_t begin = n % blocks * MOST_LANES, image = n / blocks;                        \
        const int64_t lanes = af_min(all - begin, MOST_LANES);                                    \
        const int64_t size = p->extents[0] * p->extents[1] * p->extents[2];                       \
        const int64_t count = p->counts[0] * p->counts[1] * p->counts[2];                         \
        REAL *x = (REAL *)p->x + image * size * all + begin;                                      \
        REAL *y = (REAL *)p->y + image * count * all + begin;                                     \
        TAP *tap = (TAP *)p->taps + image * count * all + begin;                                  \
        Reach r[3];                                                                               \
        if (p->op == 1)                                                                           \
            for (int64_t i = 0; i < size; i++)                                                    \
                memset(x + i * all, 0, (size_t)lanes * sizeof(REAL));                             \
        for (int64_t i = 0; i < count; i++, y += all, tap += all) {                               \
            r[0] = reach_of(p, 0, i / p->counts[2] / p->counts[1]);                               \
            r[1] = reach_of(p, 1, i / p->counts[2] % p->counts[1]);                               \
            r[2] = reach_of(p, 2, i % p->counts[2]);                                              \
            NAME##_lanes(p, x, y, tap, r, lanes);                                                 \
        }                                                                                         \
    }                                                                                             \
    static void NAME(void *arguments, int64_t chunk, int32_t worker) {                            \
        const Pool *p = arguments;                                                                \
        const int64_t size = p->extents[0] * p->extents[1] * p->extents[2];                       \
        const int64_t count = p->counts[0] * p->counts[1] * p->counts[2];                         \
        const int64_t none = p->kernel[0] * p->kernel[1] * p->kernel[2];                          \
        const int64_t first = chunk * p->planes_per_chunk;                                        \
        (void)worker;                                                                             \
        for (int64_t n = first; n < af_min(first + p->planes_per_chunk, p->planes); n++) {        \
            REAL *x = (REAL *)p->x + n * size, *y = (REAL *)p->y + n * count;                     \
            TAP *tap = (TAP *)p->taps + n * count;                                                \
            Reach r[3];                                                                           \
            if (p->channels > 1) {                                                                \
                NAME##_blocks(p, n);                                                              \
                continue;                                                                         \
            }                                                                                     \
            if (p->op == 1) memset(x, 0, (size_t)size * sizeof(REAL));                            \
            for (int64_t a = 0; a < p->counts[0]; a++) {                                          \
                r[0] = reach_of(p, 0, a);                                                         \
                for (int64_t b = 0; b < p->counts[1]; b++) {                                      \
                    r[1] = reach_of(p, 1, b);                                                     \
                    for (int64_t c = 0; c < p->counts[2]; c++, y++, tap++) {                      \
                        r[2] = reach_of(p, 2, c);                                                 \
                        if (p->op == 0) {                                                         \
                            NAME##_largest(p, x, r, y, tap);                                      \
                            continue;                                                             \
                        }                                                                         \
                        const int64_t at = *tap >= 0 && *tap < none ? place_of(p, r, *tap) : -1;  \
                        const int is_there = at >= 0 && at < size;                                \
                        if (p->op == 2)                                                           \
                            *y = is_there ? x[at] : 0;                                            \
                        else if (is_there)                                                        \
                            x[at] += *y;                                                          \
                    }                                                                             \
                }                                                                                 \
            }                                                                                     \
        }                                                                                         \
    }

POOL(pool_float, float, uint8_t)
POOL(pool_double, double, uint8_t)
POOL(pool_float_wide, float, int32_t)
POOL(pool_double_wide, double, int32_t)

AF_EXPORT int32_t af_pool(void *arguments) {
    const Pool *p = arguments;
    const af_body bodies[] = {pool_float, pool_double, pool_float_wide, pool_double_wide};
    const int64_t chunks = (p->planes + p->planes_per_chunk - 1) / p->planes_per_chunk;
    af_parallel(bodies[p->form], arguments, chunks, (int32_t)p->max_workers);
    return 0;
}
