/* Sums, means and maxima over the rows of [outer, rows, columns]: what no fused kernel walks over,
 * because rows are reduced apart for every place on the outer axis.
 *
 * A block of columns, which lie dense, is reduced at once. Sums of floats are added in trees of 8
 * rows in their own type, and the trees in double: an order that no compiler and no number of
 * threads changes.
 */
#include "runtime.h"

#define MAX_COLUMNS 512

typedef float f32;
typedef double f64;
typedef int32_t i32;
typedef int64_t i64;
typedef uint64_t u64;

typedef struct {
    const char *x;
    char *out; /* dense [outer, columns] */
    int64_t rows, columns, outer_step, row_step, item; /* in bytes; columns are dense */
    int64_t block_columns, num_units, units_per_chunk, max_workers, form;
    double count; /* what a mean divides by, else 1 */
} Arguments;

#define MEAN_OF(total) (total) / a->count
#define AS_IT_IS(total) (total)

/* Rows are added in trees of 8 in NEAR, and the trees in FAR. */
#define SUM(T, NEAR, FAR, RESULT)                                                            \
    static void sum_##T(const Arguments *a, const char *x, int64_t columns, void *out) {     \
        FAR far[MAX_COLUMNS];                                                                \
        for (int64_t c = 0; c < columns; c++) far[c] = 0;                                    \
        int64_t i = 0, step = a->row_step;                                                   \
        for (; i + 8 <= a->rows; i += 8, x += 8 * step) {                                    \
            const T *r0 = (const T *)x, *r1 = (const T *)(x + step);                         \
            const T *r2 = (const T *)(x + 2 * step), *r3 = (const T *)(x + 3 * step);        \
            const T *r4 = (const T *)(x + 4 * step), *r5 = (const T *)(x + 5 * step);        \
            const T *r6 = (const T *)(x + 6 * step), *r7 = (const T *)(x + 7 * step);        \
            _Pragma("omp simd")                                                              \
            for (int64_t c = 0; c < columns; c++)                                            \
                far[c] += (((NEAR)r0[c] + r1[c]) + ((NEAR)r2[c] + r3[c])) +                  \
                          (((NEAR)r4[c] + r5[c]) + ((NEAR)r6[c] + r7[c]));                   \
        }                                                                                    \
        for (; i < a->rows; i++, x += step) {                                                \
            const T *row = (const T *)x;                                                     \
            _Pragma("omp simd")                                                              \
            for (int64_t c = 0; c < columns; c++) far[c] += row[c];                          \
        }                                                                                    \
        for (int64_t c = 0; c < columns; c++) ((T *)out)[c] = (T)(RESULT(far[c]));           \
    }
SUM(f32, float, double, MEAN_OF)
SUM(f64, double, double, MEAN_OF)
SUM(i32, u64, u64, AS_IT_IS)
SUM(i64, u64, u64, AS_IT_IS)

/* A NaN is the maximum of whatever it is among. There is at least one row. */
#define MAX(T)                                                                               \
    static void max_##T(const Arguments *a, const char *x, int64_t columns, void *out) {     \
        T most[MAX_COLUMNS];                                                                 \
        for (int64_t c = 0; c < columns; c++) most[c] = ((const T *)x)[c];                   \
        for (int64_t i = 1; i < a->rows; i++) {                                              \
            const T *row = (const T *)(x + i * a->row_step);                                 \
            _Pragma("omp simd")                                                              \
            for (int64_t c = 0; c < columns; c++)                                            \
                most[c] = (row[c] > most[c]) | (row[c] != row[c]) ? row[c] : most[c];        \
        }                                                                                    \
        for (int64_t c = 0; c < columns; c++) ((T *)out)[c] = most[c];                       \
    }
MAX(f32)
MAX(f64)
MAX(i32)
MAX(i64)

static void (*const forms[])(const Arguments *, const char *, int64_t, void *) = {
    sum_f32, sum_f64, sum_i32, sum_i64, max_f32, max_f64, max_i32, max_i64,
};

static void reduce_chunk(void *arguments, int64_t chunk, int32_t worker) {
    (void)worker;
    const Arguments *a = arguments;
    int64_t blocks = (a->columns + a->block_columns - 1) / a->block_columns;
    int64_t end = af_min((chunk + 1) * a->units_per_chunk, a->num_units);
    for (int64_t unit = chunk * a->units_per_chunk; unit < end; unit++) {
        int64_t place = unit / blocks, column = unit % blocks * a->block_columns;
        const char *x = a->x + place * a->outer_step + column * a->item;
        char *out = a->out + (place * a->columns + column) * a->item;
        forms[a->form](a, x, af_min(a->block_columns, a->columns - column), out);
    }
}

AF_EXPORT int32_t af_reduce(void *arguments) {
    Arguments *a = arguments;
    int64_t chunks = (a->num_units + a->units_per_chunk - 1) / a->units_per_chunk;
    af_parallel(reduce_chunk, a, chunks, (int32_t)a->max_workers);
    return 0;
}
