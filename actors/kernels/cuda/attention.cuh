/* Rows of attention between its products, for some heads and some rows of queries.
 *
 * NAME_T is the type of an element, NAME_FROM makes a NAME_REAL of one and NAME_TO one of that;
 * Scores and statistics of rows are NAME_REAL.
 *
 * Query i sees the first `seen` + i keys of a chunk, and all of them at most. Of what it does not
 * see nothing is read, and the probabilities of that are 0 to the bit. Since 0 * NaN is NaN, values
 * go into products with 0 for what is not finite, and `restored` adds the rest for those that see it.
 *
 * Where NAME_MASKED is 1 a mask is added to scaled scores, and the maximum of a row is at least
 * NAME_LOWEST: so a row of -inf becomes one of 0. Where NAME_DROPPED is 1 `kept` has a byte for each
 * score of a chunk, by its place among all scores, and weights are dropped by it.
 */
#if NAME_MASKED
#define NAME_SCALED(score, j) \
    ((score) * scale + NAME_FROM(*(const NAME_T *)(mask + (j) * a->mask.column_step)))
#define NAME_FLOOR NAME_LOWEST
#else
#define NAME_SCALED(score, j) ((score) * scale)
#define NAME_FLOOR (-INFINITY)
#endif
#if NAME_DROPPED
#define NAME_WEIGHED(x, j) (kept[j] ? (x) * factor : 0)
#else
#define NAME_WEIGHED(x, j) (x)
#endif
#define NAME_MAX_AXES 6
#define NAME_HELD 32   /* numbers of a row that a thread has in registers */
#define NAME_AT_ONCE 4 /* and those that are on their way before the first is used */
#define NAME_STRETCH 8 /* terms that are added up in their own type before they become doubles */

/* Heads of a chunk in row-major order; a tensor [heads, rows, columns] that lies in any way. */
typedef struct {
    int64_t num_axes, extents[NAME_MAX_AXES];
} NAME_heads;
typedef struct {
    char *first;
    int64_t row_step, column_step, head_steps[NAME_MAX_AXES];
} NAME_tensor;

AF_FUNCTION char *NAME_row(const NAME_tensor *x, const NAME_heads *heads, int64_t head, int64_t row) {
    char *place = x->first + row * x->row_step;
    for (int64_t axis = heads->num_axes - 1; axis >= 0; axis--) {
        place += head % heads->extents[axis] * x->head_steps[axis];
        head /= heads->extents[axis];
    }
    return place;
}

AF_FUNCTION _Bool NAME_is_finite(NAME_REAL x) { return x - x == 0; }

/* A dense copy of tiles of rows, 0 for what is not finite, and whether a tile has any of that. */
typedef struct {
    NAME_heads heads;
    NAME_tensor x;
    NAME_T *copy;
    int32_t *flags; /* one per head and tile */
    int64_t num_rows, width, tile_rows;
} NAME_finite_arguments;

AF_KERNEL NAME_finite(AF_ARGUMENTS(NAME_finite) arguments) {
    AF_EXCHANGE(exchange);
    const NAME_finite_arguments *a = &arguments;
    const int64_t num_tiles = (a->num_rows + a->tile_rows - 1) / a->tile_rows;
    const int64_t head = AF_BLOCK / num_tiles, first = AF_BLOCK % num_tiles * a->tile_rows;
    const int64_t count = af_min(a->tile_rows, a->num_rows - first) * a->width;
    const char *x = NAME_row(&a->x, &a->heads, head, first);
    NAME_T *copy = a->copy + (head * a->num_rows + first) * a->width;
    const int64_t down = AF_NUM_THREADS / a->width, across = AF_NUM_THREADS % a->width;
    int64_t row = AF_THREAD / a->width, column = AF_THREAD % a->width, is_bad = 0;
    for (int64_t i = AF_THREAD; i < count; i += AF_NUM_THREADS) {
        const NAME_T given = *(const NAME_T *)(x + row * a->x.row_step + column * a->x.column_step);
        const _Bool is_good = NAME_is_finite(NAME_FROM(given));
        copy[i] = is_good ? given : (NAME_T)0;
        if (!is_good) is_bad = 1;
        row += down;
        column += across;
        if (column >= a->width) {
            column -= a->width;
            row++;
        }
    }
    is_bad = af_team_max_i64(is_bad, AF_NUM_THREADS, exchange);
    if (AF_THREAD == 0) a->flags[AF_BLOCK] = (int32_t)is_bad;
}

#if NAME_DROPPED
/* Which scores of a chunk of rows are kept: a thread draws for 8 columns of a row. */
typedef struct {
    uint8_t *kept;
    const uint64_t *seed, *step;
    const int64_t *firsts; /* of each head, where that is told */
    int64_t key, least, first_head, first_row, all_rows, all_columns, num_rows, num_columns, count;
} NAME_kept_arguments;

AF_KERNEL NAME_kept(AF_ARGUMENTS(NAME_kept) arguments) {
    const NAME_kept_arguments *a = &arguments;
    const int64_t pieces = (a->num_columns + 7) / 8, all = AF_NUM_BLOCKS * AF_NUM_THREADS;
    for (int64_t i = AF_BLOCK * AF_NUM_THREADS + AF_THREAD; i < a->count; i += all) {
        const int64_t place = i / pieces, column = i % pieces * 8;
        const int64_t head = a->first_head + place / a->num_rows;
        const int64_t row = a->first_row + place % a->num_rows;
        uint32_t bits[8];
        const int64_t size = a->all_rows * a->all_columns;
        const int64_t first = a->firsts ? a->firsts[head] : head * size;
        af_random8(bits, first + row * a->all_columns + column, *a->step, *a->seed,
                   (uint64_t)a->key);
        uint8_t *kept = a->kept + place * a->num_columns + column;
        for (int32_t k = 0; k < 8; k++)
            if (column + k < a->num_columns) kept[k] = (bits[k] >> 8) >= (uint32_t)a->least;
    }
}
#endif

/* From scores to probabilities, which may lie over them where the types are equal; lse and tail. */
typedef struct {
    NAME_heads heads;
    NAME_tensor lse, tail;
    const NAME_REAL *scores;
    NAME_T *probabilities;
    int64_t num_rows, num_columns, seen, num_places, team;
    double scale;
#if NAME_MASKED
    NAME_tensor mask;
#endif
#if NAME_DROPPED
    const uint8_t *kept;
    double factor;
#endif
} NAME_probabilities_arguments;

AF_KERNEL NAME_probabilities(AF_ARGUMENTS(NAME_probabilities) arguments) {
    AF_EXCHANGE(exchange);
    const NAME_probabilities_arguments *a = &arguments;
    const NAME_REAL scale = (NAME_REAL)a->scale;
    const int64_t team = a->team, lane = AF_THREAD % team, columns = a->num_columns;
    const int64_t place = AF_BLOCK * (AF_NUM_THREADS / team) + AF_THREAD / team;
    const _Bool is_row = place < a->num_places;
    const int64_t head = place / a->num_rows, row = place % a->num_rows;
    const int64_t seen = is_row ? af_min(columns, a->seen + row) : 0;
    const int64_t end = is_row ? columns : 0;
    const NAME_REAL *scores = a->scores + place * columns;
    NAME_T *probabilities = a->probabilities + place * columns;
#if NAME_MASKED
    const char *mask = NAME_row(&a->mask, &a->heads, head, row);
#endif
#if NAME_DROPPED
    const uint8_t *kept = a->kept + place * columns;
    const NAME_REAL factor = (NAME_REAL)a->factor;
#endif
    const _Bool is_held = columns <= NAME_HELD * team; /* then memory is read once */
    /* Offsets of 32 bits: wider ones cost more than what is computed. */
    const int32_t step = (int32_t)team, held_seen = is_held ? (int32_t)(seen - lane) : 0;
    const int32_t held_end = is_held ? (int32_t)(end - lane) : 0;
    NAME_REAL held[NAME_HELD], most = NAME_FLOOR;
    double sum = 0;
    if (is_held) {
        const NAME_REAL *own = scores + lane;
        AF_UNROLL
        for (int32_t k = 0; k < NAME_HELD; k++) {
            held[k] = -INFINITY;
            if (k * step < held_seen) held[k] = NAME_SCALED(own[k * step], lane + k * step);
        }
        AF_UNROLL
        for (int32_t k = 0; k < NAME_HELD; k++) most = AF_LARGER(held[k], most);
    } else {
        for (int64_t j = lane; j < seen; j += team) {
            const NAME_REAL score = NAME_SCALED(scores[j], j);
            most = AF_LARGER(score, most);
        }
    }
    const NAME_REAL largest = (NAME_REAL)af_team_max_f64((double)most, team, exchange);
    if (is_held) {
        NAME_REAL stretch = 0;
        AF_UNROLL
        for (int32_t k = 0; k < NAME_HELD; k++) {
            held[k] = k * step < held_seen ? NAME_EXP(held[k] - largest) : 0;
            stretch += held[k];
            if (k % NAME_STRETCH == NAME_STRETCH - 1) {
                sum += (double)stretch;
                stretch = 0;
            }
        }
    } else {
        for (int64_t j = lane; j < seen; j += team)
            sum += (double)NAME_EXP(NAME_SCALED(scores[j], j) - largest);
    }
    sum = af_team_sum_f64(sum, team, exchange);
    if (NAME_MASKED && sum == 0) sum = 1;
    const NAME_REAL share = (NAME_REAL)(1 / sum);
    if (is_held) {
        NAME_T *own = probabilities + lane;
        AF_UNROLL
        for (int32_t k = 0; k < NAME_HELD; k++) {
            NAME_REAL p = held[k] * share;
            if (NAME_DROPPED && k * step < held_seen) p = NAME_WEIGHED(p, lane + k * step);
            const NAME_T made = k * step < held_seen ? NAME_TO(p) : (NAME_T)0;
            if (k * step < held_end) own[k * step] = made;
        }
    } else {
        for (int64_t j = lane; j < end; j += team) {
            NAME_REAL p = j < seen ? NAME_EXP(NAME_SCALED(scores[j], j) - largest) * share : 0;
            p = NAME_WEIGHED(p, j);
            const NAME_T made = j < seen ? NAME_TO(p) : (NAME_T)0;
            probabilities[j] = made;
        }
    }
    if (lane == 0 && is_row) {
        const NAME_REAL log_sum = (NAME_REAL)log(sum), lse = largest + log_sum;
        *(NAME_REAL *)NAME_row(&a->lse, &a->heads, head, row) = lse;
        *(NAME_REAL *)NAME_row(&a->tail, &a->heads, head, row) = (largest - lse) + log_sum;
    }
}

/* Adds to y the products of probabilities with values that are not finite, where they are seen. */
typedef struct {
    NAME_heads heads;
    NAME_tensor v, y;
    const NAME_T *probabilities;
    const int32_t *flags;
    int64_t num_flags; /* of a head */
    int64_t num_rows, num_columns, seen, width, tile_rows;
} NAME_restored_arguments;

AF_KERNEL NAME_restored(AF_ARGUMENTS(NAME_restored) arguments) {
    const NAME_restored_arguments *a = &arguments;
    const int64_t num_tiles = (a->num_rows + a->tile_rows - 1) / a->tile_rows;
    const int64_t head = AF_BLOCK / num_tiles, first = AF_BLOCK % num_tiles * a->tile_rows;
    const int64_t count = af_min(a->tile_rows, a->num_rows - first) * a->width;
    int32_t is_bad = 0;
    for (int64_t tile = 0; tile < a->num_flags; tile++) is_bad |= a->flags[head * a->num_flags + tile];
    if (!is_bad) return;
    for (int64_t i = AF_THREAD; i < count; i += AF_NUM_THREADS) {
        const int64_t row = first + i / a->width, column = i % a->width;
        const int64_t seen = af_min(a->num_columns, a->seen + row);
        const NAME_T *p = a->probabilities + (head * a->num_rows + row) * a->num_columns;
        const char *v = NAME_row(&a->v, &a->heads, head, 0) + column * a->v.column_step;
        NAME_T *y = (NAME_T *)(NAME_row(&a->y, &a->heads, head, row) + column * a->y.column_step);
        for (int64_t j = 0; j < seen; j++) {
            const NAME_REAL value = NAME_FROM(*(const NAME_T *)(v + j * a->v.row_step));
            if (NAME_is_finite(value)) continue;
            const NAME_REAL sum = NAME_FROM(*y) + NAME_FROM(p[j]) * value;
            *y = NAME_TO(sum);
        }
    }
}

/* From scores and dy vT to probabilities and the gradient of the scores, which may lie over them
 * where the types are equal. */
typedef struct {
    NAME_heads heads;
    NAME_tensor dy, y, lse, tail;
    const NAME_REAL *scores, *products;
    NAME_T *probabilities, *slopes;
    int64_t num_rows, num_columns, seen, width, num_places, team;
    double scale;
#if NAME_MASKED
    NAME_tensor mask;
#endif
#if NAME_DROPPED
    const uint8_t *kept;
    double factor;
#endif
} NAME_slopes_arguments;

AF_KERNEL NAME_slopes(AF_ARGUMENTS(NAME_slopes) arguments) {
    AF_EXCHANGE(exchange);
    const NAME_slopes_arguments *a = &arguments;
    const NAME_REAL scale = (NAME_REAL)a->scale;
    const int64_t team = a->team, lane = AF_THREAD % team, columns = a->num_columns;
    const int64_t place = AF_BLOCK * (AF_NUM_THREADS / team) + AF_THREAD / team;
    const _Bool is_row = place < a->num_places;
    const int64_t head = is_row ? place / a->num_rows : 0, row = is_row ? place % a->num_rows : 0;
    const int64_t seen = is_row ? af_min(columns, a->seen + row) : 0;
    const int64_t end = is_row ? columns : 0, first = place * columns;
#if NAME_MASKED
    const char *mask = NAME_row(&a->mask, &a->heads, head, row);
#endif
#if NAME_DROPPED
    const uint8_t *kept = a->kept + first;
    const NAME_REAL factor = (NAME_REAL)a->factor;
#endif
    const char *dy = NAME_row(&a->dy, &a->heads, head, row);
    const char *y = NAME_row(&a->y, &a->heads, head, row);
    const NAME_REAL lse = *(const NAME_REAL *)NAME_row(&a->lse, &a->heads, head, row);
    const NAME_REAL tail = *(const NAME_REAL *)NAME_row(&a->tail, &a->heads, head, row);
    double sum = 0;
    for (int64_t e = lane; e < a->width; e += team) {
        const NAME_T one = *(const NAME_T *)(dy + e * a->dy.column_step);
        const NAME_T other = *(const NAME_T *)(y + e * a->y.column_step);
        sum += (double)NAME_FROM(one) * (double)NAME_FROM(other);
    }
    const NAME_REAL delta = (NAME_REAL)af_team_sum_f64(sum, team, exchange);
    for (int64_t start = lane; start < end; start += NAME_AT_ONCE * team) {
        const NAME_REAL *given_scores = a->scores + first + start;
        const NAME_REAL *given_products = a->products + first + start;
        NAME_T *probabilities = a->probabilities + first + start, *slopes = a->slopes + first + start;
        const int32_t step = (int32_t)team;
        const int32_t seen_here = (int32_t)af_min(seen - start, NAME_AT_ONCE * team);
        const int32_t here = (int32_t)af_min(end - start, NAME_AT_ONCE * team);
        NAME_REAL scores[NAME_AT_ONCE], products[NAME_AT_ONCE];
        AF_UNROLL
        for (int32_t k = 0; k < NAME_AT_ONCE; k++) {
            scores[k] = products[k] = 0;
            if (k * step < seen_here) {
                scores[k] = NAME_SCALED(given_scores[k * step], start + k * step);
                products[k] = NAME_WEIGHED(given_products[k * step], start + k * step);
            }
        }
        AF_UNROLL
        for (int32_t k = 0; k < NAME_AT_ONCE; k++) {
            NAME_REAL p = NAME_EXP(scores[k] - lse - tail);
            /* Of a weight of 1 it is 0: see the op. */
            const NAME_REAL ds = scale * (p == 1 ? 0 : p) * (products[k] - delta);
            if (NAME_DROPPED && k * step < seen_here) p = NAME_WEIGHED(p, start + k * step);
            const NAME_T made = NAME_TO(p), slope = NAME_TO(ds);
            if (k * step < here) {
                probabilities[k * step] = k * step < seen_here ? made : (NAME_T)0;
                slopes[k * step] = k * step < seen_here ? slope : (NAME_T)0;
            }
        }
    }
}

/* Sums of chunks, rounded once. */
typedef struct {
    const NAME_REAL *sums;
    NAME_T *out;
    int64_t count;
} NAME_rounded_arguments;

AF_KERNEL NAME_rounded(AF_ARGUMENTS(NAME_rounded) arguments) {
    const NAME_rounded_arguments *a = &arguments;
    const int64_t step = AF_NUM_BLOCKS * AF_NUM_THREADS;
    for (int64_t i = AF_BLOCK * AF_NUM_THREADS + AF_THREAD; i < a->count; i += step)
        a->out[i] = NAME_TO(a->sums[i]);
}
