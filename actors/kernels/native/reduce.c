/* Sums, means and maxima over any axes of a strided tensor, and argmax along one.
 *
 * A result belongs to a place on the kept axes. The kept axis along which the tensor is dense, if
 * there is one, is the columns, and a block of columns is reduced at once; else one result is
 * reduced along a run. Where results are few, the reduced axes are split and the partial results
 * joined in order: splits depend on shapes alone.
 *
 * Sums are added in an order that depends on shapes alone (see sums.h).
 */
#include "runtime.h"
#include "sums.h"

#include <math.h>

#define MAX_OUTER 6
#define MAX_COLUMNS 512

typedef float f32;
typedef double f64;
typedef int32_t i32;
typedef int64_t i64;
typedef uint64_t u64;

/* A partial result: `d` of floats, `i` of integers. */
typedef union {
    double d;
    int64_t i;
} Cell;

typedef struct {
    const char *x;
    char *out;
    Cell *partials; /* [splits, num_results] */
    int64_t num_kept, kept_extents[MAX_OUTER], kept_x[MAX_OUTER], kept_out[MAX_OUTER];
    int64_t columns, column_x, column_out, block_columns;
    int64_t num_axes, extents[MAX_OUTER], steps[MAX_OUTER]; /* reduced axes but for the run */
    int64_t num_places, run, run_x;                          /* places on them, each with a run */
    int64_t splits, num_units, units_per_chunk, max_workers, num_results;
    double count; /* what a mean divides by, else 1 */
    int64_t form;
} Arguments;

/* What one call of a reduction covers. */
typedef struct {
    const char *x;
    char *out;
    int64_t columns, result; /* columns of the block; the number of the first result */
    int64_t begin, end, run_begin, run_end;
} Unit;

static Unit unit_of(const Arguments *a, int64_t index) {
    int64_t split = index % a->splits;
    int64_t blocks = (a->columns + a->block_columns - 1) / a->block_columns;
    int64_t column = index / a->splits % blocks * a->block_columns;
    int64_t place = index / a->splits / blocks;
    Unit u;
    u.x = a->x + column * a->column_x;
    u.out = a->out + column * a->column_out;
    u.columns = af_min(a->block_columns, a->columns - column);
    u.result = place * a->columns + column;
    for (int64_t axis = a->num_kept - 1; axis >= 0; axis--) {
        int64_t at = place % a->kept_extents[axis];
        place /= a->kept_extents[axis];
        u.x += at * a->kept_x[axis];
        u.out += at * a->kept_out[axis];
    }
    int is_cut = a->num_places > 1;
    u.begin = is_cut ? a->num_places * split / a->splits : 0;
    u.end = is_cut ? a->num_places * (split + 1) / a->splits : a->num_places;
    u.run_begin = is_cut ? 0 : a->run * split / a->splits;
    u.run_end = is_cut ? a->run : a->run * (split + 1) / a->splits;
    return u;
}

/* The first element of the run at a place. */
static const char *run_at(const Arguments *a, const Unit *u, int64_t place) {
    const char *x = u->x + u->run_begin * a->run_x;
    for (int64_t axis = a->num_axes - 1; axis >= 0; axis--) {
        x += place % a->extents[axis] * a->steps[axis];
        place /= a->extents[axis];
    }
    return x;
}

#define INTEGER_RUN(T)                                                                       \
    static u64 run_##T(const T *x, int64_t count) {                                          \
        u64 total = 0;                                                                       \
        for (int64_t i = 0; i < count; i++) total += (u64)x[i];                              \
        return total;                                                                        \
    }
INTEGER_RUN(i32)
INTEGER_RUN(i64)

/* Rows of columns are added in trees of 8 in NEAR, and the trees in FAR; CELL is where they go. */
#define SUM(T, NEAR, FAR, CELL, RUN)                                                              \
    static void sum_columns_##T(const Arguments *a, const Unit *u, Cell *totals) {           \
        FAR far[MAX_COLUMNS];                                                                \
        for (int64_t c = 0; c < u->columns; c++) far[c] = 0;                                 \
        for (int64_t place = u->begin; place < u->end; place++) {                            \
            const char *x = run_at(a, u, place);                                             \
            int64_t i = u->run_begin, step = a->run_x;                                       \
            for (; i + 8 <= u->run_end; i += 8, x += 8 * step) {                             \
                const T *r0 = (const T *)x, *r1 = (const T *)(x + step);                     \
                const T *r2 = (const T *)(x + 2 * step), *r3 = (const T *)(x + 3 * step);    \
                const T *r4 = (const T *)(x + 4 * step), *r5 = (const T *)(x + 5 * step);    \
                const T *r6 = (const T *)(x + 6 * step), *r7 = (const T *)(x + 7 * step);    \
                _Pragma("omp simd")                                                          \
                for (int64_t c = 0; c < u->columns; c++)                                     \
                    far[c] += (((NEAR)r0[c] + r1[c]) + ((NEAR)r2[c] + r3[c])) +              \
                              (((NEAR)r4[c] + r5[c]) + ((NEAR)r6[c] + r7[c]));               \
            }                                                                                \
            for (; i < u->run_end; i++, x += step) {                                         \
                const T *row = (const T *)x;                                                 \
                _Pragma("omp simd")                                                          \
                for (int64_t c = 0; c < u->columns; c++) far[c] += row[c];                   \
            }                                                                                \
        }                                                                                    \
        for (int64_t c = 0; c < u->columns; c++) totals[c].CELL = far[c];                    \
    }                                                                                        \
    static void sum_##T(const Arguments *a, const Unit *u, Cell *totals) {                   \
        if (a->columns > 1) {                                                                \
            sum_columns_##T(a, u, totals);                                                   \
            return;                                                                          \
        }                                                                                    \
        FAR total = 0;                                                                       \
        int64_t count = u->run_end - u->run_begin;                                           \
        for (int64_t place = u->begin; place < u->end; place++) {                            \
            const char *x = run_at(a, u, place);                                             \
            if (a->run_x == sizeof(T))                                                       \
                total += RUN((const T *)x, count);                                           \
            else                                                                             \
                for (int64_t i = 0; i < count; i++) total += *(const T *)(x + i * a->run_x); \
        }                                                                                    \
        totals[0].CELL = total;                                                              \
    }
SUM(f32, float, double, d, af_sum_float)
SUM(f64, double, double, d, af_sum_double)
SUM(i32, u64, u64, i, run_i32)
SUM(i64, u64, u64, i, run_i64)

/* A NaN is the maximum of whatever it is among. */
#define MAX(T, CELL, LEAST, WORST)                                                           \
    static T max_run_##T(const char *x, int64_t step, int64_t count) {                       \
        T m = LEAST;                                                                         \
        int is_bad = 0;                                                                      \
        if (step == sizeof(T)) {                                                             \
            const T *dense = (const T *)x;                                                   \
            _Pragma("omp simd reduction(max : m) reduction(| : is_bad)")                     \
            for (int64_t i = 0; i < count; i++) {                                            \
                is_bad |= dense[i] != dense[i];                                              \
                m = dense[i] > m ? dense[i] : m;                                             \
            }                                                                                \
        } else {                                                                             \
            for (int64_t i = 0; i < count; i++) {                                            \
                T value = *(const T *)(x + i * step);                                        \
                is_bad |= value != value;                                                    \
                m = value > m ? value : m;                                                   \
            }                                                                                \
        }                                                                                    \
        return is_bad ? (T)WORST : m;                                                        \
    }                                                                                        \
    static void max_##T(const Arguments *a, const Unit *u, Cell *totals) {                   \
        T most[MAX_COLUMNS];                                                                 \
        for (int64_t c = 0; c < u->columns; c++) most[c] = LEAST;                            \
        for (int64_t place = u->begin; place < u->end; place++) {                            \
            const char *x = run_at(a, u, place);                                             \
            if (a->columns == 1) {                                                           \
                T m = max_run_##T(x, a->run_x, u->run_end - u->run_begin);                   \
                most[0] = (m > most[0]) | (m != m) ? m : most[0];                            \
                continue;                                                                    \
            }                                                                                \
            for (int64_t i = u->run_begin; i < u->run_end; i++, x += a->run_x) {             \
                const T *row = (const T *)x;                                                 \
                _Pragma("omp simd")                                                          \
                for (int64_t c = 0; c < u->columns; c++)                                     \
                    most[c] = (row[c] > most[c]) | (row[c] != row[c]) ? row[c] : most[c];    \
            }                                                                                \
        }                                                                                    \
        for (int64_t c = 0; c < u->columns; c++) totals[c].CELL = most[c];                   \
    }
MAX(f32, d, -INFINITY, NAN)
MAX(f64, d, -INFINITY, NAN)
MAX(i32, i, INT32_MIN, 0)
MAX(i64, i, INT64_MIN, 0)

static Cell add_d(Cell a, Cell b) { return (Cell){.d = a.d + b.d}; }
static Cell add_i(Cell a, Cell b) { return (Cell){.i = (int64_t)((u64)a.i + (u64)b.i)}; }
static Cell most_d(Cell a, Cell b) { return b.d > a.d || b.d != b.d ? b : a; }
static Cell most_i(Cell a, Cell b) { return b.i > a.i ? b : a; }

/* Writes results `step` bytes apart; floats are divided by the count. */
#define STORE(T, VALUE)                                                                      \
    static void store_##T(char *out, int64_t step, const Cell *cells, int64_t num,           \
                          double count) {                                                    \
        (void)count;                                                                         \
        if (step == sizeof(T))                                                               \
            for (int64_t c = 0; c < num; c++) ((T *)out)[c] = (T)(VALUE);                    \
        else                                                                                 \
            for (int64_t c = 0; c < num; c++) *(T *)(out + c * step) = (T)(VALUE);           \
    }
STORE(f32, cells[c].d / count)
STORE(f64, cells[c].d / count)
STORE(i32, cells[c].i)
STORE(i64, cells[c].i)

typedef struct {
    void (*reduce)(const Arguments *, const Unit *, Cell *);
    Cell (*join)(Cell, Cell);
    void (*store)(char *, int64_t, const Cell *, int64_t, double);
} Form;

static const Form forms[] = {
    {sum_f32, add_d, store_f32},  {sum_f64, add_d, store_f64},
    {sum_i32, add_i, store_i32},  {sum_i64, add_i, store_i64},
    {max_f32, most_d, store_f32}, {max_f64, most_d, store_f64},
    {max_i32, most_i, store_i32}, {max_i64, most_i, store_i64},
};

static void reduce_chunk(void *arguments, int64_t chunk, int32_t worker) {
    (void)worker;
    const Arguments *a = arguments;
    const Form *form = &forms[a->form];
    int64_t end = af_min((chunk + 1) * a->units_per_chunk, a->num_units);
    for (int64_t index = chunk * a->units_per_chunk; index < end; index++) {
        Cell totals[MAX_COLUMNS];
        Unit u = unit_of(a, index);
        form->reduce(a, &u, totals);
        if (a->splits > 1)
            memcpy(a->partials + index % a->splits * a->num_results + u.result, totals,
                   u.columns * sizeof(Cell));
        else
            form->store(u.out, a->column_out, totals, u.columns, a->count);
    }
}

static void join_splits(const Arguments *a) {
    const Form *form = &forms[a->form];
    for (int64_t index = 0; index < a->num_units; index += a->splits) {
        Cell totals[MAX_COLUMNS];
        Unit u = unit_of(a, index);
        for (int64_t c = 0; c < u.columns; c++) {
            const Cell *partial = a->partials + u.result + c;
            totals[c] = *partial;
            for (int64_t s = 1; s < a->splits; s++)
                totals[c] = form->join(totals[c], partial[s * a->num_results]);
        }
        form->store(u.out, a->column_out, totals, u.columns, a->count);
    }
}

AF_EXPORT int32_t af_reduce(void *arguments) {
    Arguments *a = arguments;
    int64_t chunks = (a->num_units + a->units_per_chunk - 1) / a->units_per_chunk;
    af_parallel(reduce_chunk, a, chunks, (int32_t)a->max_workers);
    if (a->splits > 1) join_splits(a);
    return 0;
}

/* The first largest element, or the first NaN, along an axis. The output is dense. */
typedef struct {
    const char *x;
    int64_t *out;
    int64_t num_kept, kept_extents[MAX_OUTER], kept_x[MAX_OUTER];
    int64_t extent, step;
    int64_t num_results, results_per_chunk, max_workers, type;
} ArgmaxArguments;

#define ARGMAX(T)                                                                            \
    static int64_t argmax_##T(const char *x, int64_t step, int64_t extent) {                 \
        T m = *(const T *)x;                                                                 \
        int64_t at = 0;                                                                      \
        for (int64_t i = 1; i < extent && m == m; i++) {                                     \
            T value = *(const T *)(x + i * step);                                            \
            if ((value > m) | (value != value)) m = value, at = i;                           \
        }                                                                                    \
        return at;                                                                           \
    }
ARGMAX(f32)
ARGMAX(f64)
ARGMAX(i32)
ARGMAX(i64)

static int64_t (*const argmaxes[])(const char *, int64_t, int64_t) = {argmax_f32, argmax_f64,
                                                                      argmax_i32, argmax_i64};

static void argmax_chunk(void *arguments, int64_t chunk, int32_t worker) {
    (void)worker;
    const ArgmaxArguments *a = arguments;
    int64_t end = af_min((chunk + 1) * a->results_per_chunk, a->num_results);
    for (int64_t result = chunk * a->results_per_chunk; result < end; result++) {
        const char *x = a->x;
        int64_t place = result;
        for (int64_t axis = a->num_kept - 1; axis >= 0; axis--) {
            x += place % a->kept_extents[axis] * a->kept_x[axis];
            place /= a->kept_extents[axis];
        }
        a->out[result] = argmaxes[a->type](x, a->step, a->extent);
    }
}

AF_EXPORT int32_t af_argmax(void *arguments) {
    ArgmaxArguments *a = arguments;
    int64_t chunks = (a->num_results + a->results_per_chunk - 1) / a->results_per_chunk;
    af_parallel(argmax_chunk, a, chunks, (int32_t)a->max_workers);
    return 0;
}
