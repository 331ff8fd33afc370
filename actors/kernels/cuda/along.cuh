/* Along the last axis of a tensor: the order of elements, and linear recurrences.
 *
 * NAME_T is the type of an element, NAME_WIDE what is computed in, which NAME_FROM makes of one and
 * NAME_TO makes one of, and NAME_KEY(x) a uint64_t in the order of elements. Rows lie as `NAME_rows` says; outputs and scratch are dense.
 */
#define NAME_MAX_OUTER 6
#define NAME_SHORT_RUN 32 /* elements that are put in order by counting */
#define NAME_THREADS 256

typedef struct {
    const char *at;
    int64_t column, num, extents[NAME_MAX_OUTER], steps[NAME_MAX_OUTER];
} NAME_rows;

AF_FUNCTION const char *NAME_row(const NAME_rows *rows, int64_t row) {
    const char *at = rows->at;
    for (int64_t axis = rows->num - 1; axis >= 0; axis--) {
        at += row % rows->extents[axis] * rows->steps[axis];
        row /= rows->extents[axis];
    }
    return at;
}

/* Numbers in the order of their values; NaN is the largest, and both zeros are one. */
AF_FUNCTION uint64_t NAME_of_float(double x) {
    const uint64_t top = (uint64_t)1 << 63;
    if (x != x) return UINT64_MAX;
    const uint64_t bits = af_bits_of_double(x == 0 ? 0.0 : x);
    return bits & top ? ~bits : bits | top;
}
AF_FUNCTION uint64_t NAME_of_int(uint64_t x) { return x ^ ((uint64_t)1 << 63); }

typedef struct {
    NAME_rows x;
    uint64_t *keys, *to_keys;
    uint32_t *places, *to_places;
    int64_t *out; /* in the last merge */
    int64_t num, columns, width, is_descending;
} NAME_arguments;
typedef NAME_arguments NAME_keys_arguments, NAME_merge_arguments;

AF_KERNEL NAME_keys(AF_ARGUMENTS(NAME_keys) arguments) {
    const NAME_arguments *a = &arguments;
    const int64_t i = AF_BLOCK * AF_NUM_THREADS + AF_THREAD;
    if (i >= a->num) return;
    const int64_t row = i / a->columns, column = i % a->columns;
    const NAME_T x = *(const NAME_T *)(NAME_row(&a->x, row) + column * a->x.column);
    a->keys[i] = a->is_descending ? ~NAME_KEY(NAME_FROM(x)) : NAME_KEY(NAME_FROM(x));
    a->places[i] = (uint32_t)column;
}

/* A thread finds where its element goes: in a run of `width` 0 by counting those before it, else in
 * two sorted runs side by side, where it knows its place in its own and looks for that in the other.
 * Equal keys stay as they came. */
AF_KERNEL NAME_merge(AF_ARGUMENTS(NAME_merge) arguments) {
    const NAME_arguments *a = &arguments;
    const int64_t i = AF_BLOCK * AF_NUM_THREADS + AF_THREAD;
    if (i >= a->num) return;
    const int64_t column = i % a->columns, row = i - column;
    const uint64_t *keys = a->keys + row;
    const uint64_t key = keys[column];
    int64_t to;
    if (a->width == 0) {
        const int64_t first = column - column % NAME_SHORT_RUN;
        const int64_t stop = af_min(first + NAME_SHORT_RUN, a->columns);
        to = first;
        for (int64_t k = first; k < stop; k++) to += keys[k] < key || (keys[k] == key && k < column);
    } else {
        const int64_t run = column / a->width, is_right = run & 1;
        const int64_t first = (run - is_right) * a->width;
        int64_t low = is_right ? first : af_min(first + a->width, a->columns);
        const int64_t begin = low;
        int64_t high = is_right ? first + a->width : af_min(low + a->width, a->columns);
        while (low < high) {
            const int64_t middle = (low + high) / 2;
            if (is_right ? keys[middle] <= key : keys[middle] < key)
                low = middle + 1;
            else
                high = middle;
        }
        to = (is_right ? column - a->width : column) + (low - begin);
    }
    const uint32_t place = a->places[i];
    if (a->out) {
        a->out[row + to] = (int64_t)place;
    } else {
        a->to_keys[row + to] = key;
        a->to_places[row + to] = place;
    }
}

typedef struct {
    NAME_rows a, b;
    NAME_T *out;
    int64_t columns, is_reverse;
} NAME_recur_arguments;

/* A block per row. Each thread has a stretch: what that makes of any number before it is a factor
 * and a term, which are joined in order; then it goes over its stretch again. */
AF_KERNEL NAME_recur(AF_ARGUMENTS(NAME_recur) arguments) {
    AF_SHARED(NAME_WIDE, factors, NAME_THREADS);
    AF_SHARED(NAME_WIDE, terms, NAME_THREADS);
    const NAME_recur_arguments *r = &arguments;
    const char *a = NAME_row(&r->a, AF_BLOCK), *b = NAME_row(&r->b, AF_BLOCK);
    NAME_T *out = r->out + AF_BLOCK * r->columns;
    const int64_t stretch = (r->columns + AF_NUM_THREADS - 1) / AF_NUM_THREADS;
    const int64_t first = af_min(AF_THREAD * stretch, r->columns);
    const int64_t stop = af_min(first + stretch, r->columns);
    NAME_WIDE factor = 1, term = 0;
    for (int64_t n = first; n < stop; n++) {
        const int64_t c = r->is_reverse ? r->columns - 1 - n : n;
        const NAME_WIDE own = NAME_FROM(*(const NAME_T *)(a + c * r->a.column));
        factor *= own;
        term = own * term + NAME_FROM(*(const NAME_T *)(b + c * r->b.column));
    }
    factors[AF_THREAD] = factor;
    terms[AF_THREAD] = term;
    AF_BARRIER();
    if (AF_THREAD == 0) {
        NAME_WIDE before = 0;
        for (int32_t t = 0; t < AF_NUM_THREADS; t++) {
            /* The first has nothing before it: a factor that overflowed means nothing there. */
            const NAME_WIDE after = t == 0 ? terms[t] : factors[t] * before + terms[t];
            terms[t] = before;
            before = after;
        }
    }
    AF_BARRIER();
    NAME_WIDE total = terms[AF_THREAD];
    for (int64_t n = first; n < stop; n++) {
        const int64_t c = r->is_reverse ? r->columns - 1 - n : n;
        const NAME_WIDE own = NAME_FROM(*(const NAME_T *)(a + c * r->a.column));
        total = own * total + NAME_FROM(*(const NAME_T *)(b + c * r->b.column));
        out[c] = NAME_TO(total);
    }
}
