/* Updates of variables: one pass over parameter, gradient and moments.
 *
 * Everything is dense but the gradient, which may be a transposed product: it then comes through
 * a tile on the stack. What changes per step (rate, counters) is read from memory at every launch.
 * The outputs may lie over the inputs. Formulas are those of the numpy kernels.
 */
#include "runtime.h"

#include <math.h>

#define TILE_ROWS 32
#define TILE_COLUMNS 64

enum { SGD, MOMENTUM, ADAMW, ACCUMULATE };

/* An array [rows, columns]; `grad` has steps in elements, the others are dense. */
typedef struct {
    int64_t form; /* twice the algorithm, and 1 for float64 */
    void *param, *first, *second;
    const void *old_param, *old_first, *old_second;
    const char *grad;
    int64_t rows, columns, grad_row, grad_column;
    int64_t block_columns, num_blocks, blocks_per_chunk, max_workers;
    const void *lr;
    const int64_t *step;
    const int64_t *skip; /* or NULL */
    double a, b, eps, decay; /* momentum and whether it is Nesterov's; beta1 and beta2; every */
    /* What a launch computes first. */
    double rate, eps_now, keep;
    int64_t is_first;
} Arguments;

#define UPDATES(T, SQRT)                                                                     \
    static void sgd_##T(const Arguments *u, int64_t at, const T *g, int64_t n) {             \
        const T *p = (const T *)u->old_param + at;                                           \
        T *out = (T *)u->param + at;                                                         \
        T lr = (T)u->rate, decay = (T)u->decay;                                              \
        _Pragma("omp simd")                                                                  \
        for (int64_t i = 0; i < n; i++)                                                      \
            out[i] = p[i] - (decay == 0 ? g[i] : p[i] * decay + g[i]) * lr;                  \
    }                                                                                        \
    static void momentum_##T(const Arguments *u, int64_t at, const T *g, int64_t n) {        \
        const T *p = (const T *)u->old_param + at, *m = (const T *)u->old_first + at;        \
        T *out = (T *)u->param + at, *buffer = (T *)u->first + at;                           \
        T lr = (T)u->rate, decay = (T)u->decay, momentum = (T)u->a;                          \
        int is_nesterov = u->b != 0;                                                         \
        _Pragma("omp simd")                                                                  \
        for (int64_t i = 0; i < n; i++) {                                                    \
            T slope = decay == 0 ? g[i] : p[i] * decay + g[i];                               \
            T now = m[i] * momentum + slope;                                                 \
            buffer[i] = now;                                                                 \
            out[i] = p[i] - (is_nesterov ? now * momentum + slope : now) * lr;               \
        }                                                                                    \
    }                                                                                        \
    static void adamw_##T(const Arguments *u, int64_t at, const T *g, int64_t n) {           \
        const T *p = (const T *)u->old_param + at;                                           \
        const T *m = (const T *)u->old_first + at, *v = (const T *)u->old_second + at;       \
        T *out = (T *)u->param + at, *mean = (T *)u->first + at, *square = (T *)u->second + at; \
        T rate = (T)u->rate, eps = (T)u->eps_now, keep = (T)u->keep;                         \
        T c1 = (T)u->a, d1 = (T)(1.0 - u->a), c2 = (T)u->b, d2 = (T)(1.0 - u->b);            \
        _Pragma("omp simd")                                                                  \
        for (int64_t i = 0; i < n; i++) {                                                    \
            T mean_now = m[i] * c1 + g[i] * d1;                                              \
            T square_now = v[i] * c2 + g[i] * d2 * g[i]; /* g * g may overflow */            \
            mean[i] = mean_now;                                                              \
            square[i] = square_now;                                                          \
            out[i] = p[i] * keep - mean_now / (SQRT(square_now) + eps) * rate;               \
        }                                                                                    \
    }                                                                                        \
    static void accumulate_##T(const Arguments *u, int64_t at, const T *g, int64_t n) {      \
        const T *total = (const T *)u->old_param + at;                                       \
        T *out = (T *)u->param + at;                                                         \
        if (u->is_first)                                                                     \
            memcpy(out, g, n * sizeof(T));                                                   \
        else {                                                                               \
            _Pragma("omp simd")                                                              \
            for (int64_t i = 0; i < n; i++) out[i] = total[i] + g[i];                        \
        }                                                                                    \
    }                                                                                        \
    static void (*const updates_##T[])(const Arguments *, int64_t, const T *, int64_t) = {   \
        sgd_##T, momentum_##T, adamw_##T, accumulate_##T};                                   \
                                                                                             \
    static void update_rows_##T(const Arguments *u, int64_t row, int64_t rows, int64_t column, \
                                int64_t columns) {                                           \
        for (int64_t r = row; r < row + rows; r++) {                                         \
            const T *g = (const T *)u->grad + r * u->grad_row + column;                      \
            updates_##T[u->form / 2](u, r * u->columns + column, g, columns);                \
        }                                                                                    \
    }                                                                                        \
    static void update_tile_##T(const Arguments *u, int64_t row, int64_t rows, int64_t column, \
                                int64_t columns) {                                           \
        T tile[TILE_ROWS][TILE_COLUMNS];                                                     \
        const T *g = (const T *)u->grad + row * u->grad_row + column * u->grad_column;       \
        for (int64_t c = 0; c < columns; c++)                                                \
            for (int64_t r = 0; r < rows; r++)                                               \
                tile[r][c] = g[r * u->grad_row + c * u->grad_column];                        \
        for (int64_t r = 0; r < rows; r++)                                                   \
            updates_##T[u->form / 2](u, (row + r) * u->columns + column, tile[r], columns);  \
    }

UPDATES(float, sqrtf)
UPDATES(double, sqrt)

static void update_chunk(void *arguments, int64_t chunk, int32_t worker) {
    (void)worker;
    const Arguments *u = arguments;
    int64_t across = (u->columns + u->block_columns - 1) / u->block_columns;
    int64_t end = af_min((chunk + 1) * u->blocks_per_chunk, u->num_blocks);
    int is_dense = u->grad_column == 1, is_wide = u->form % 2;
    int64_t height = is_dense ? 1 : TILE_ROWS;
    for (int64_t block = chunk * u->blocks_per_chunk; block < end; block++) {
        int64_t row = block / across * height, column = block % across * u->block_columns;
        int64_t rows = af_min(height, u->rows - row);
        int64_t columns = af_min(u->block_columns, u->columns - column);
        if (is_wide)
            (is_dense ? update_rows_double : update_tile_double)(u, row, rows, column, columns);
        else
            (is_dense ? update_rows_float : update_tile_float)(u, row, rows, column, columns);
    }
}

static void prepare(Arguments *u) {
    double lr = 0;
    if (u->lr) lr = u->form % 2 ? *(const double *)u->lr : *(const float *)u->lr;
    u->rate = lr;
    if (u->form / 2 == ADAMW) {
        double t = (double)(*u->step + 1);
        double correction = sqrt(1.0 - pow(u->b, t));
        u->rate = lr * correction / (1.0 - pow(u->a, t));
        u->eps_now = u->eps * correction;
        u->keep = 1.0 - lr * u->decay;
    }
    if (u->form / 2 == ACCUMULATE) u->is_first = *u->step % (int64_t)u->a == 0;
}

static void keep_old(const Arguments *u) {
    void *news[] = {u->param, u->first, u->second};
    const void *olds[] = {u->old_param, u->old_first, u->old_second};
    size_t size = u->rows * u->columns * (u->form % 2 ? sizeof(double) : sizeof(float));
    for (int i = 0; i < 3; i++)
        if (news[i] != olds[i]) memcpy(news[i], olds[i], size);
}

AF_EXPORT int32_t af_update(void *arguments) {
    Arguments *u = arguments;
    if (u->skip && *u->skip) {
        keep_old(u);
        return 0;
    }
    prepare(u);
    int64_t chunks = (u->num_blocks + u->blocks_per_chunk - 1) / u->blocks_per_chunk;
    af_parallel(update_chunk, u, chunks, (int32_t)u->max_workers);
    return 0;
}

/* step + by, or + 1. */
AF_EXPORT int32_t af_increment(void *arguments) {
    af_word *a = arguments;
    *(int64_t *)a[0].p = *(const int64_t *)a[1].p + (a[2].p ? *(const int64_t *)a[2].p : 1);
    return 0;
}
