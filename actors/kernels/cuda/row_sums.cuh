/* Sums of the rows of equal ids, which `sort.cuh` has sorted. NAME_ROW is the type of an element,
 * NAME_FROM makes a double of one and NAME_TO one of a double.
 *
 * Sums are made in double in two levels, each in the order of the ids: a run of equal ids is cut
 * where chunks of sorted entries begin, and a run of several chunks is joined from the sums of its
 * pieces. So the bits do not depend on which block runs first. Threads do not meet in here.
 */
#define NAME_MAX_OUTER 6
#define NAME_CHUNK 64  /* sorted entries that are added up by the threads of one block */
#define NAME_AT_ONCE 8 /* rows that are on their way before the first of them is added */

typedef struct {
    const uint32_t *keys, *positions; /* sorted; a key that is no row has num_rows */
    const char *dy;
    int64_t num_axes, extents[NAME_MAX_OUTER], steps[NAME_MAX_OUTER]; /* of dy, in bytes */
    int64_t column_step;
    NAME_ROW *out;    /* the sum of a run: in the row of its id, or in that of its first entry */
    int64_t *picks;   /* [num], if any: the id of a run where it begins, -1 elsewhere */
    double *partials; /* [num_chunks, 2, columns]: of a run from before, of one that goes on */
    int64_t num, num_rows, columns, num_parts, is_by_entry;
} NAME_arguments;
typedef NAME_arguments NAME_chunks_arguments, NAME_joins_arguments;

AF_FUNCTION int64_t NAME_offset(const NAME_arguments *a, int64_t place) {
    int64_t offset = 0;
    for (int64_t axis = a->num_axes - 1; axis > 0; axis--) {
        offset += place % a->extents[axis] * a->steps[axis];
        place /= a->extents[axis];
    }
    return offset + place * a->steps[0];
}

AF_FUNCTION double *NAME_partial(const NAME_arguments *a, int64_t chunk, int64_t which) {
    return a->partials + (2 * chunk + which) * a->columns;
}

AF_FUNCTION void NAME_store(
    const NAME_arguments *a, uint32_t key, int64_t entry, int64_t column, double total
) {
    const int64_t row = a->is_by_entry ? entry : (int64_t)key;
    if (key < a->num_rows) a->out[row * a->columns + column] = NAME_TO(total);
}

/* A block per chunk and part of the columns, a thread per column. The division is one of 32 bits,
 * a fifth of one of 64. */
#define NAME_CHUNK_OF(a) ((int64_t)((uint32_t)AF_BLOCK / (uint32_t)(a)->num_parts))
AF_KERNEL NAME_chunks(AF_ARGUMENTS(NAME_chunks) arguments) {
    const NAME_arguments *a = &arguments;
    const int64_t chunk = NAME_CHUNK_OF(a), part = AF_BLOCK - chunk * a->num_parts;
    const int64_t first = chunk * NAME_CHUNK, last = af_min(first + NAME_CHUNK, a->num);
    const int64_t column = part * AF_NUM_THREADS + AF_THREAD;
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
    double total = 0;
    for (int64_t i = first; i < last; i += NAME_AT_ONCE) {
        double rows[NAME_AT_ONCE];
        AF_UNROLL /* rows are registers only where each k is a constant */
        for (int64_t k = 0; k < NAME_AT_ONCE; k++) {
            const int64_t place = a->positions[af_min(i + k, last - 1)];
            rows[k] = NAME_FROM(*(const NAME_ROW *)(dy + NAME_offset(a, place)));
        }
        AF_UNROLL
        for (int64_t k = 0; k < NAME_AT_ONCE && i + k < last; k++) {
            if (keys[i + k] != key) {
                if (is_cut)
                    NAME_partial(a, chunk, 0)[column] = total;
                else
                    NAME_store(a, key, begin, column, total);
                key = keys[i + k];
                begin = i + k;
                is_cut = 0;
                total = 0;
            }
            total += rows[k];
        }
    }
    if (is_cut)
        NAME_partial(a, chunk, 0)[column] = total;
    else if (last < a->num && keys[last] == key)
        NAME_partial(a, chunk, 1)[column] = total;
    else
        NAME_store(a, key, begin, column, total);
}

/* As above: where a run begins in a chunk and goes on after it, its pieces are added in order. */
AF_KERNEL NAME_joins(AF_ARGUMENTS(NAME_joins) arguments) {
    const NAME_arguments *a = &arguments;
    const int64_t chunk = NAME_CHUNK_OF(a), part = AF_BLOCK - chunk * a->num_parts;
    const int64_t first = chunk * NAME_CHUNK, last = first + NAME_CHUNK;
    const int64_t column = part * AF_NUM_THREADS + AF_THREAD;
    const uint32_t *keys = a->keys;
    if (column >= a->columns || last >= a->num) return;
    const uint32_t key = keys[last - 1];
    if (keys[last] != key || (first > 0 && keys[first - 1] == key)) return;
    int64_t begin = last - 1;
    while (begin > first && keys[begin - 1] == key) begin--;
    int64_t end = chunk + 2, behind = (a->num + NAME_CHUNK - 1) / NAME_CHUNK;
    while (end < behind) { /* the first chunk that does not begin within the run */
        const int64_t middle = (end + behind) / 2;
        if (keys[middle * NAME_CHUNK] == key)
            end = middle + 1;
        else
            behind = middle;
    }
    double total = NAME_partial(a, chunk, 1)[column];
    for (int64_t next = chunk + 1; next < end; next += NAME_AT_ONCE) {
        double pieces[NAME_AT_ONCE];
        for (int64_t k = 0; k < NAME_AT_ONCE; k++)
            pieces[k] = NAME_partial(a, af_min(next + k, end - 1), 0)[column];
        for (int64_t k = 0; k < NAME_AT_ONCE && next + k < end; k++) total += pieces[k];
    }
    NAME_store(a, key, begin, column, total);
}
