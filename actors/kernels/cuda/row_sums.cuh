/* Sums of the rows of equal ids, which `sort.cuh` has sorted. NAME_ROW is the type of an element,
 * NAME_FROM makes a double of one and NAME_TO one of a double. A thread has NAME_WIDTH neighbouring
 * columns; several lie as `af_get` needs them.
 *
 * Sums are made in double in two levels, each in the order of the ids: a run of equal ids is cut
 * where chunks of sorted entries begin, and a run of several chunks is joined from the sums of its
 * pieces. So the bits do not depend on which block runs first. Threads do not meet in here.
 */
#define NAME_MAX_OUTER 6
#define NAME_AT_ONCE 8 /* rows that are on their way before the first of them is added */
#define NAME_SIZE (NAME_WIDTH * (int32_t)sizeof(NAME_ROW))
#define NAME_WORDS ((NAME_SIZE + 3) / 4)

typedef struct {
    const uint32_t *keys, *positions; /* sorted; a key that is no row has num_rows */
    const char *dy;
    int64_t num_axes, extents[NAME_MAX_OUTER], steps[NAME_MAX_OUTER]; /* of dy, in bytes */
    int64_t column_step;
    NAME_ROW *out;    /* the sum of a run: in the row of its id, or in that of its first entry */
    int64_t *picks;   /* [num], if any: the id of a run where it begins, -1 elsewhere */
    double *partials; /* [num_chunks, 2, columns]: of a run from before, of one that goes on */
    int64_t num, num_rows, columns, num_parts, is_by_entry;
    int64_t chunk; /* sorted entries that are added up by the threads of one block */
} NAME_arguments;
typedef NAME_arguments NAME_chunks_arguments, NAME_joins_arguments;

typedef union {
    uint32_t words[NAME_WORDS];
    NAME_ROW each[NAME_WIDTH];
} NAME_run;

AF_FUNCTION int64_t NAME_offset(const NAME_arguments *a, int64_t place) {
    int64_t offset = 0;
    for (int64_t axis = a->num_axes - 1; axis > 0; axis--) {
        offset += place % a->extents[axis] * a->steps[axis];
        place /= a->extents[axis];
    }
    return offset + place * a->steps[0];
}

AF_FUNCTION NAME_run NAME_load(const char *place) {
    NAME_run run;
    if (NAME_WIDTH > 1)
        af_get(run.words, place, NAME_SIZE);
    else
        run.each[0] = *(const NAME_ROW *)place;
    return run;
}

AF_FUNCTION double *NAME_partial(const NAME_arguments *a, int64_t chunk, int64_t which) {
    return a->partials + (2 * chunk + which) * a->columns;
}

AF_FUNCTION void NAME_leave(double *partial, const double *totals) {
    AF_UNROLL
    for (int32_t i = 0; i < NAME_WIDTH; i++) partial[i] = totals[i];
}

AF_FUNCTION void NAME_store(
    const NAME_arguments *a, uint32_t key, int64_t entry, int64_t column, const double *totals
) {
    const int64_t row = a->is_by_entry ? entry : (int64_t)key;
    if (key >= a->num_rows) return;
    NAME_ROW *out = a->out + row * a->columns + column;
    NAME_run run;
    AF_UNROLL
    for (int32_t i = 0; i < NAME_WIDTH; i++) run.each[i] = NAME_TO(totals[i]);
    if (NAME_WIDTH > 1)
        af_put(out, run.words, NAME_SIZE);
    else
        out[0] = run.each[0];
}

/* A block per chunk and part of the columns. The division is one of 32 bits, a fifth of one of 64.
 */
#define NAME_CHUNK_OF(a) ((int64_t)((uint32_t)AF_BLOCK / (uint32_t)(a)->num_parts))
AF_KERNEL NAME_chunks(AF_ARGUMENTS(NAME_chunks) arguments) {
    const NAME_arguments *a = &arguments;
    const int64_t chunk = NAME_CHUNK_OF(a), part = AF_BLOCK - chunk * a->num_parts;
    const int64_t first = chunk * a->chunk, last = af_min(first + a->chunk, a->num);
    const int64_t column = (part * AF_NUM_THREADS + AF_THREAD) * NAME_WIDTH;
    const uint32_t *keys = a->keys;
    if (a->picks && part == 0) {
        for (int64_t i = first + AF_THREAD; i < last; i += AF_NUM_THREADS) {
            const int is_pick = keys[i] < a->num_rows && (i == 0 || keys[i - 1] != keys[i]);
            a->picks[i] = is_pick ? (int64_t)keys[i] : -1;
        }
    }
    if (column >= a->columns) return;
    const char *dy = a->dy + column * a->column_step;
    uint32_t key = keys[first];
    int is_cut = first > 0 && keys[first - 1] == key;
    int64_t begin = first;
    double totals[NAME_WIDTH] = {0};
    for (int64_t i = first; i < last; i += NAME_AT_ONCE) {
        NAME_run rows[NAME_AT_ONCE];
        uint32_t keys_of_rows[NAME_AT_ONCE];
        AF_UNROLL /* rows are registers only where each k is a constant */
        for (int32_t k = 0; k < NAME_AT_ONCE; k++) {
            const int64_t entry = af_min(i + k, last - 1);
            keys_of_rows[k] = keys[entry];
            rows[k] = NAME_load(dy + NAME_offset(a, a->positions[entry]));
        }
        AF_UNROLL
        for (int32_t k = 0; k < NAME_AT_ONCE; k++) {
            if (i + k >= last) continue;
            if (keys_of_rows[k] != key) {
                if (is_cut)
                    NAME_leave(NAME_partial(a, chunk, 0) + column, totals);
                else
                    NAME_store(a, key, begin, column, totals);
                key = keys_of_rows[k];
                begin = i + k;
                is_cut = 0;
                AF_UNROLL
                for (int32_t n = 0; n < NAME_WIDTH; n++) totals[n] = 0;
            }
            AF_UNROLL
            for (int32_t n = 0; n < NAME_WIDTH; n++) totals[n] += NAME_FROM(rows[k].each[n]);
        }
    }
    if (is_cut)
        NAME_leave(NAME_partial(a, chunk, 0) + column, totals);
    else if (last < a->num && keys[last] == key)
        NAME_leave(NAME_partial(a, chunk, 1) + column, totals);
    else
        NAME_store(a, key, begin, column, totals);
}

/* As above: where a run begins in a chunk and goes on after it, its pieces are added in order. */
AF_KERNEL NAME_joins(AF_ARGUMENTS(NAME_joins) arguments) {
    const NAME_arguments *a = &arguments;
    const int64_t chunk = NAME_CHUNK_OF(a), part = AF_BLOCK - chunk * a->num_parts;
    const int64_t first = chunk * a->chunk, last = first + a->chunk;
    const int64_t column = (part * AF_NUM_THREADS + AF_THREAD) * NAME_WIDTH;
    const uint32_t *keys = a->keys;
    if (column >= a->columns || last >= a->num) return;
    const uint32_t key = keys[last - 1];
    if (keys[last] != key || (first > 0 && keys[first - 1] == key)) return;
    int64_t begin = last - 1;
    if (a->is_by_entry) {
        while (begin > first && keys[begin - 1] == key) begin--;
    }
    int64_t end = chunk + 2, behind = (a->num + a->chunk - 1) / a->chunk;
    while (end < behind) { /* the first chunk that does not begin within the run */
        const int64_t middle = (end + behind) / 2;
        if (keys[middle * a->chunk] == key)
            end = middle + 1;
        else
            behind = middle;
    }
    double totals[NAME_WIDTH];
    AF_UNROLL
    for (int32_t n = 0; n < NAME_WIDTH; n++) totals[n] = NAME_partial(a, chunk, 1)[column + n];
    for (int64_t next = chunk + 1; next < end; next += NAME_AT_ONCE) {
        double pieces[NAME_AT_ONCE][NAME_WIDTH];
        AF_UNROLL
        for (int32_t k = 0; k < NAME_AT_ONCE; k++) {
            const double *piece = NAME_partial(a, af_min(next + k, end - 1), 0) + column;
            AF_UNROLL
            for (int32_t n = 0; n < NAME_WIDTH; n++) pieces[k][n] = piece[n];
        }
        AF_UNROLL
        for (int32_t k = 0; k < NAME_AT_ONCE; k++) {
            if (next + k >= end) continue;
            AF_UNROLL
            for (int32_t n = 0; n < NAME_WIDTH; n++) totals[n] += pieces[k][n];
        }
    }
    NAME_store(a, key, begin, column, totals);
}
