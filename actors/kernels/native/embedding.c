/* Rows of a table by integer id; the gradient of the table; an update of the rows of a batch.
 *
 * Ids outside of the table end a launch with status 1. Sums of rows are added in the order of the
 * ids, in double, and threads share the table by rows and columns, so that the sums are the same on
 * every run.
 */
#include "runtime.h"

#define MAX_OUTER 6
#define BUFFER 256 /* columns that are summed at once */
#define AHEAD 16   /* rows that are fetched into the cache before they are needed */
#define LINE 64
#define FETCHED (512 << 10) /* bytes that are fetched into the cache all at once, at most */

/* Places of a strided tensor in row-major order. */
typedef struct {
    int64_t num, extents[MAX_OUTER], steps[MAX_OUTER];
} Places;

static inline int64_t offset_at(const Places *p, int64_t place) {
    if (p->num <= 1) return place * p->steps[0];
    int64_t offset = 0;
    for (int64_t axis = p->num - 1; axis >= 0; axis--) {
        offset += place % p->extents[axis] * p->steps[axis];
        place /= p->extents[axis];
    }
    return offset;
}

typedef struct {
    const char *at;
    int64_t type, num; /* twice the logarithm of an integer's size, and 1 for unsigned */
    Places places;
} Ids;

/* What no int64 holds comes out negative, and is no row either. */
#define LOAD(T)                                                                              \
    if (ids->places.num <= 1) {                                                              \
        int64_t step = ids->places.steps[0];                                                 \
        const char *at = ids->at + first * step;                                             \
        for (int64_t i = 0; i < num; i++) into[i] = (int64_t)*(const T *)(at + i * step);    \
    } else {                                                                                 \
        for (int64_t i = 0; i < num; i++)                                                    \
            into[i] = (int64_t)*(const T *)(ids->at + offset_at(&ids->places, first + i));   \
    }                                                                                        \
    break;

/* Copies ids from `first` on; returns 1 when one is no row. */
static int load_ids(const Ids *ids, int64_t first, int64_t num, int64_t num_rows, int64_t *into) {
    switch (ids->type) {
    case 0: LOAD(int8_t)
    case 1: LOAD(uint8_t)
    case 2: LOAD(int16_t)
    case 3: LOAD(uint16_t)
    case 4: LOAD(int32_t)
    case 5: LOAD(uint32_t)
    default: LOAD(int64_t)
    }
    int is_bad = 0;
    for (int64_t i = 0; i < num; i++) is_bad |= (uint64_t)into[i] >= (uint64_t)num_rows;
    return is_bad;
}

/* Rows into an output whose rows lie evenly. */
typedef struct {
    const char *table;
    char *out;
    Ids ids;
    int64_t num_rows, row_step, row_bytes, out_step;
    int64_t rows_per_chunk, max_workers;
    int32_t is_bad;
} GatherArguments;

/* A copy whose size the compiler knows is a few vector moves. */
static inline void copy_row(char *target, const char *source, int64_t size_bytes) {
    switch (size_bytes) {
    case 32: memcpy(target, source, 32); break;
    case 64: memcpy(target, source, 64); break;
    case 128: memcpy(target, source, 128); break;
    default: memcpy(target, source, size_bytes);
    }
}

static void gather_chunk(void *arguments, int64_t chunk, int32_t worker) {
    (void)worker;
    GatherArguments *a = arguments;
    int64_t begin = chunk * a->rows_per_chunk;
    int64_t end = af_min(begin + a->rows_per_chunk, a->ids.num);
    int64_t ids[BUFFER + AHEAD], fetched = af_min(a->row_bytes, 4 * LINE);
    for (int64_t first = begin; first < end; first += BUFFER) {
        int64_t num = af_min(BUFFER, end - first);
        if (load_ids(&a->ids, first, num, a->num_rows, ids)) {
            __atomic_store_n(&a->is_bad, 1, __ATOMIC_RELAXED);
            return;
        }
        for (int64_t i = 0; i < AHEAD; i++) ids[num + i] = ids[num - 1];
        for (int64_t i = 0; i < num; i++) {
            const char *next = a->table + ids[i + AHEAD] * a->row_step;
            for (int64_t at = 0; at < fetched; at += LINE) __builtin_prefetch(next + at);
            copy_row(a->out + (first + i) * a->out_step, a->table + ids[i] * a->row_step,
                     a->row_bytes);
        }
    }
}

AF_EXPORT int32_t af_embedding(void *arguments) {
    GatherArguments *a = arguments;
    a->is_bad = 0;
    int64_t chunks = (a->ids.num + a->rows_per_chunk - 1) / a->rows_per_chunk;
    af_parallel(gather_chunk, a, chunks, (int32_t)a->max_workers);
    return a->is_bad;
}

/* The gradient of the table. The places of equal ids are chained in order; threads share a small
 * table by columns and a large one by rows. A row is added up in double before it is written. */
typedef struct {
    const char *dy;
    char *out;
    Ids ids;
    Places rows; /* of dy */
    int64_t num_rows, columns, is_wide;
    int64_t part_shift, num_row_parts, columns_per_part, num_column_parts, max_workers;
    int64_t *dense;         /* [num ids] */
    int32_t *next, *firsts; /* [num ids]: the next place of the same id; [num_rows]; or -1 */
} ScatterArguments;

#define SCATTER(T)                                                                           \
    static void scatter_row_##T(const ScatterArguments *a, int64_t row, int64_t column,      \
                                int64_t columns) {                                           \
        T *out = (T *)a->out + row * a->columns + column;                                    \
        double total[BUFFER];                                                                \
        for (int64_t c = 0; c < columns; c++) total[c] = 0;                                  \
        for (int64_t i = a->firsts[row]; i >= 0;) {                                          \
            const T *dy = (const T *)(a->dy + offset_at(&a->rows, i)) + column;              \
            i = a->next[i];                                                                  \
            if (i >= 0)                                                                      \
                __builtin_prefetch((const T *)(a->dy + offset_at(&a->rows, i)) + column);    \
            _Pragma("omp simd")                                                              \
            for (int64_t c = 0; c < columns; c++) total[c] += dy[c];                         \
        }                                                                                    \
        for (int64_t c = 0; c < columns; c++) out[c] = (T)total[c];                          \
    }                                                                                        \
    static void scatter_##T(const ScatterArguments *a, int64_t part, int64_t column,         \
                            int64_t columns) {                                               \
        T *table = (T *)a->out + column;                                                     \
        int64_t row = part << a->part_shift;                                                 \
        int64_t last = af_min(row + ((int64_t)1 << a->part_shift), a->num_rows);             \
        int is_whole = columns == a->columns;                                                \
        if (is_whole) memset(table + row * columns, 0, (last - row) * columns * sizeof(T));  \
        for (; row < last; row++) {                                                          \
            if (a->firsts[row] < 0) {                                                        \
                if (!is_whole) memset(table + row * a->columns, 0, columns * sizeof(T));     \
                continue;                                                                    \
            }                                                                                \
            for (int64_t done = 0; done < columns; done += BUFFER)                           \
                scatter_row_##T(a, row, column + done, af_min(BUFFER, columns - done));      \
        }                                                                                    \
    }
SCATTER(float)
SCATTER(double)

static void scatter_chunk(void *arguments, int64_t chunk, int32_t worker) {
    (void)worker;
    const ScatterArguments *a = arguments;
    int64_t column = chunk % a->num_column_parts * a->columns_per_part;
    int64_t columns = af_min(a->columns_per_part, a->columns - column);
    int64_t part = chunk / a->num_column_parts;
    (a->is_wide ? scatter_double : scatter_float)(a, part, column, columns);
}

AF_EXPORT int32_t af_embedding_grad(void *arguments) {
    ScatterArguments *a = arguments;
    if (load_ids(&a->ids, 0, a->ids.num, a->num_rows, a->dense)) return 1;
    memset(a->firsts, 0xff, a->num_rows * sizeof(int32_t));
    for (int64_t i = a->ids.num - 1; i >= 0; i--) {
        int32_t *first = a->firsts + a->dense[i];
        a->next[i] = *first;
        *first = (int32_t)i;
    }
    af_parallel(scatter_chunk, a, a->num_row_parts * a->num_column_parts,
                (int32_t)a->max_workers);
    return 0;
}

typedef struct {
    int32_t *out; /* [num_rows] */
    Ids ids;
    int64_t num_rows;
} LastArguments;

AF_EXPORT int32_t af_last_place(void *arguments) {
    const LastArguments *a = arguments;
    int64_t ids[BUFFER];
    memset(a->out, 0xff, a->num_rows * sizeof(int32_t));
    for (int64_t first = 0; first < a->ids.num; first += BUFFER) {
        int64_t num = af_min(BUFFER, a->ids.num - first);
        if (load_ids(&a->ids, first, num, a->num_rows, ids)) return 1;
        for (int64_t i = 0; i < num; i++) a->out[ids[i]] = (int32_t)(first + i);
    }
    return 0;
}

/* Rows put into a table, which is copied first unless the output lies over it. */
typedef struct {
    const char *table;
    char *out;
    Ids ids;
    const char *rows;
    Places places; /* of rows */
    int64_t num_rows, row_bytes, table_bytes, chunk_bytes, max_workers;
} PutArguments;

static void copy_chunk(void *arguments, int64_t chunk, int32_t worker) {
    (void)worker;
    const PutArguments *a = arguments;
    int64_t begin = chunk * a->chunk_bytes;
    memcpy(a->out + begin, a->table + begin, af_min(a->chunk_bytes, a->table_bytes - begin));
}

AF_EXPORT int32_t af_put_rows(void *arguments) {
    PutArguments *a = arguments;
    int64_t ids[BUFFER];
    for (int64_t first = 0; first < a->ids.num; first += BUFFER)
        if (load_ids(&a->ids, first, af_min(BUFFER, a->ids.num - first), a->num_rows, ids))
            return 1;
    if (a->out != a->table)
        af_parallel(copy_chunk, a, (a->table_bytes + a->chunk_bytes - 1) / a->chunk_bytes,
                    (int32_t)a->max_workers);
    for (int64_t first = 0; first < a->ids.num; first += BUFFER) {
        int64_t num = af_min(BUFFER, a->ids.num - first);
        load_ids(&a->ids, first, num, a->num_rows, ids);
        /* In order, on one thread: of equal ids the last one counts. */
        for (int64_t i = 0; i < num; i++)
            copy_row(a->out + ids[i] * a->row_bytes, a->rows + offset_at(&a->places, first + i),
                     a->row_bytes);
    }
    return 0;
}

#define MOST_WORDS 128

/* An update of the rows that occur: equal ids are found by a table of hashes, their rows of dy
 * chained in order and added up, and a generated function makes the new row of old ones and sum. */
typedef struct {
    const char *dy, *table;
    Ids ids;
    Places rows; /* of dy */
    int64_t num_rows, columns, is_wide;
    int64_t rows_per_chunk, num_chunks, max_workers;
    int64_t *dense;                     /* [num ids] */
    int32_t *slots, *next, *last, *firsts; /* [num_slots], then [num ids] each */
    int64_t num_slots;                  /* a power of two beyond the number of ids */
    int64_t num_distinct;
    void (*update)(void *block, int64_t row0, int64_t row1, int32_t worker);
    const af_word *block; /* of the function, with `num_words` of which one says where sums are */
    int64_t num_words, gradient_word;
    char *sums;
    int64_t sums_step;
} UpdateArguments;

/* Fetches a row of the table for writing. */
static inline void fetch_row(const char *row, int64_t size_bytes) {
    for (int64_t at = 0; at < size_bytes; at += LINE) __builtin_prefetch(row + at, 1);
}

/* Chains the places of equal ids: next[i] is the place after i with its id, or -1. Meanwhile the
 * rows come from memory, unless they are too many for the cache. */
static void chain_ids(UpdateArguments *a) {
    int64_t row_bytes = a->columns * (a->is_wide ? 8 : 4);
    int is_fetched = a->ids.num * row_bytes <= FETCHED;
    memset(a->slots, 0xff, a->num_slots * sizeof(int32_t));
    uint64_t mask = (uint64_t)a->num_slots - 1;
    a->num_distinct = 0;
    for (int64_t i = 0; i < a->ids.num; i++) {
        uint64_t slot = ((uint64_t)a->dense[i] * 0x9E3779B97F4A7C15u) >> 20 & mask;
        while (a->slots[slot] >= 0 && a->dense[a->slots[slot]] != a->dense[i])
            slot = (slot + 1) & mask;
        int32_t first = a->slots[slot];
        if (is_fetched) fetch_row(a->table + a->dense[i] * row_bytes, row_bytes);
        a->next[i] = -1;
        if (first < 0) {
            a->slots[slot] = (int32_t)i;
            a->last[i] = (int32_t)i;
            a->firsts[a->num_distinct++] = (int32_t)i;
        } else {
            a->next[a->last[first]] = (int32_t)i;
            a->last[first] = (int32_t)i;
        }
    }
}

/* The sum of the rows of dy of one id, rounded as that of the whole table is. */
#define ADD_UP(T)                                                                            \
    static void add_up_##T(const UpdateArguments *a, int32_t first, T *sum) {                \
        for (int64_t column = 0; column < a->columns; column += BUFFER) {                    \
            int64_t columns = af_min(BUFFER, a->columns - column);                           \
            double total[BUFFER];                                                            \
            for (int64_t c = 0; c < columns; c++) total[c] = 0;                              \
            for (int64_t i = first; i >= 0; i = a->next[i]) {                                \
                const T *dy = (const T *)(a->dy + offset_at(&a->rows, i)) + column;          \
                _Pragma("omp simd")                                                          \
                for (int64_t c = 0; c < columns; c++) total[c] += dy[c];                     \
            }                                                                                \
            for (int64_t c = 0; c < columns; c++) sum[column + c] = (T)total[c];             \
        }                                                                                    \
    }
ADD_UP(float)
ADD_UP(double)

static void update_chunk(void *arguments, int64_t chunk, int32_t worker) {
    const UpdateArguments *a = arguments;
    af_word block[MOST_WORDS];
    memcpy(block, a->block, a->num_words * sizeof(af_word));
    char *sum = block[a->gradient_word].p = a->sums + worker * a->sums_step;
    int64_t row_bytes = a->columns * (a->is_wide ? 8 : 4), begin = chunk * a->rows_per_chunk;
    int64_t end = af_min(begin + a->rows_per_chunk, a->num_distinct);
    for (int64_t i = begin; i < end; i++) {
        if (i + AHEAD < end) {
            int64_t ahead = a->firsts[i + AHEAD];
            const char *dy = a->dy + offset_at(&a->rows, ahead);
            __builtin_prefetch(dy);
            __builtin_prefetch(dy + LINE);
            fetch_row(a->table + a->dense[ahead] * row_bytes, af_min(row_bytes, 4 * LINE));
        }
        if (a->is_wide)
            add_up_double(a, a->firsts[i], (double *)sum);
        else
            add_up_float(a, a->firsts[i], (float *)sum);
        int64_t row = a->dense[a->firsts[i]];
        a->update(block, row, row + 1, worker);
    }
}

AF_EXPORT int32_t af_embedding_update(void *arguments) {
    UpdateArguments *a = arguments;
    if (load_ids(&a->ids, 0, a->ids.num, a->num_rows, a->dense)) return 1;
    chain_ids(a);
    af_parallel(update_chunk, a, a->num_chunks, (int32_t)a->max_workers);
    return 0;
}
