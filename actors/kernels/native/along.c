/* Along the last axis of a tensor: the order of elements, and linear recurrences.
 *
 * Rows are shared among threads; a row is one thread's.
 */
#include "runtime.h"

#define MAX_OUTER 6
#define SHORT_RUN 16 /* elements that are put in order by insertion */

/* Rows of a strided tensor: `column` is the step along a row in bytes. */
typedef struct {
    const char *at;
    int64_t column, num, extents[MAX_OUTER], steps[MAX_OUTER];
} Rows;

static inline const char *row_at(const Rows *rows, int64_t row) {
    const char *at = rows->at;
    for (int64_t axis = rows->num - 1; axis >= 0; axis--) {
        at += row % rows->extents[axis] * rows->steps[axis];
        row /= rows->extents[axis];
    }
    return at;
}

/* Of types 0 float, 1 double, 2 int64. */
typedef struct {
    Rows x;
    int64_t *out; /* dense */
    int64_t num_rows, columns, type, is_descending, rows_per_chunk, max_workers;
    struct Entry *entries; /* [max_workers, 2, columns] */
} SortArguments;

typedef struct Entry {
    uint64_t key;
    int64_t place;
} Entry;

/* Numbers in the order of their values; NaN is the largest, and both zeros are one. */
static inline uint64_t key_of(const char *at, int64_t type) {
    uint64_t bits;
    if (type == 2) return *(const uint64_t *)at ^ (uint64_t)1 << 63;
    double x = type ? *(const double *)at : (double)*(const float *)at;
    if (x != x) return UINT64_MAX;
    x += 0.0;
    memcpy(&bits, &x, sizeof bits);
    return bits >> 63 ? ~bits : bits | (uint64_t)1 << 63;
}

/* Puts entries in order; returns where they are, in one or the other of two arrays. */
static Entry *sorted(Entry *from, Entry *to, int64_t count) {
    for (int64_t first = 0; first < count; first += SHORT_RUN) {
        int64_t stop = af_min(first + SHORT_RUN, count);
        for (int64_t i = first + 1; i < stop; i++) {
            Entry own = from[i];
            int64_t k = i;
            for (; k > first && from[k - 1].key > own.key; k--) from[k] = from[k - 1];
            from[k] = own;
        }
    }
    for (int64_t width = SHORT_RUN; width < count; width *= 2) {
        for (int64_t first = 0; first < count; first += 2 * width) {
            int64_t middle = af_min(first + width, count), stop = af_min(middle + width, count);
            int64_t i = first, j = middle;
            for (int64_t k = first; k < stop; k++) {
                int is_left = i < middle && (j >= stop || from[i].key <= from[j].key);
                to[k] = from[is_left ? i : j];
                i += is_left;
                j += !is_left;
            }
        }
        Entry *other = from;
        from = to;
        to = other;
    }
    return from;
}

static void sort_chunk(void *arguments, int64_t chunk, int32_t worker) {
    const SortArguments *a = arguments;
    Entry *entries = a->entries + 2 * worker * a->columns;
    uint64_t turn = a->is_descending ? UINT64_MAX : 0;
    int64_t end = af_min((chunk + 1) * a->rows_per_chunk, a->num_rows);
    for (int64_t row = chunk * a->rows_per_chunk; row < end; row++) {
        const char *x = row_at(&a->x, row);
        for (int64_t c = 0; c < a->columns; c++)
            entries[c] = (Entry){key_of(x + c * a->x.column, a->type) ^ turn, c};
        const Entry *made = sorted(entries, entries + a->columns, a->columns);
        for (int64_t c = 0; c < a->columns; c++) a->out[row * a->columns + c] = made[c].place;
    }
}

AF_EXPORT int32_t af_argsort(void *arguments) {
    SortArguments *a = arguments;
    int64_t chunks = (a->num_rows + a->rows_per_chunk - 1) / a->rows_per_chunk;
    af_parallel(sort_chunk, a, chunks, (int32_t)a->max_workers);
    return 0;
}

typedef struct {
    Rows a, b;
    char *out; /* dense */
    int64_t num_rows, columns, type, is_reverse, rows_per_chunk, max_workers;
} RecurrenceArguments;

#define RECUR(T, WIDE)                                                                       \
    static void recur_##T(const RecurrenceArguments *r, const char *a, const char *b,        \
                          char *out) {                                                       \
        WIDE total = 0;                                                                      \
        for (int64_t n = 0; n < r->columns; n++) {                                           \
            int64_t c = r->is_reverse ? r->columns - 1 - n : n;                              \
            WIDE product = (WIDE)*(const T *)(a + c * r->a.column) * total;                  \
            total = product + (WIDE)*(const T *)(b + c * r->b.column);                       \
            ((T *)out)[c] = (T)total;                                                        \
        }                                                                                    \
    }
RECUR(float, double)
RECUR(double, double)
RECUR(int64_t, uint64_t)

static void recur_chunk(void *arguments, int64_t chunk, int32_t worker) {
    (void)worker;
    static void (*const forms[])(const RecurrenceArguments *, const char *, const char *,
                                 char *) = {recur_float, recur_double, recur_int64_t};
    const RecurrenceArguments *r = arguments;
    int64_t end = af_min((chunk + 1) * r->rows_per_chunk, r->num_rows);
    int64_t item = r->type ? 8 : 4;
    for (int64_t row = chunk * r->rows_per_chunk; row < end; row++)
        forms[r->type](r, row_at(&r->a, row), row_at(&r->b, row),
                       r->out + row * r->columns * item);
}

AF_EXPORT int32_t af_recurrence(void *arguments) {
    RecurrenceArguments *r = arguments;
    int64_t chunks = (r->num_rows + r->rows_per_chunk - 1) / r->rows_per_chunk;
    af_parallel(recur_chunk, r, chunks, (int32_t)r->max_workers);
    return 0;
}
