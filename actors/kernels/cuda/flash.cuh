/* Attention of 16-bit floats by tensor cores, and its gradient, whose scores stay in registers
 * (Dao, FlashAttention-2, 2023).
 *
 * The text says NAME_WIDTH, what queries, keys and values are wide, filled up with zeros to a
 * multiple of 16; NAME_ROWS of a block, of which a warp has NAME_TILES times 16; NAME_COLUMNS, how
 * many rows of the other side it meets at a time; NAME_CAUSAL and NAME_MASKED; NAME_EXACT, whether
 * the scale is a power of 2; and of the type of elements NAME_MULTIPLY, NAME_PAIR, NAME_FROM, and
 * NAME_INFINITE, the bits of infinity.
 *
 * A block has NAME_GROUPS groups of warps, NAME_THREADS threads in all. Of the gradient there may be
 * several: the warps of each have all rows of the block, and a share of each tile; in the end the
 * first group adds up the sums of all, in the order of groups.
 *
 * Rows lie in shared memory 16 bytes further apart than they are long: so the 8 rows of a matrix
 * that tensor cores load lie in different banks. While a block works on one tile, the next is on its
 * way into the other of two places. A barrier ends each tile: behind it the next one is there, and
 * nobody reads the last one, whose place is then filled.
 *
 * Scores are scaled, and rounded, before anything is taken off them: what the gradient computes again
 * is then the same to the bit, and its difference to the row's largest exact, however large they are.
 * A power of 2 rounds nothing: then one instruction scales and takes off.
 *
 * Every sum is added up in a fixed order: nothing depends on when a block or a warp runs. For that
 * the gradient computes scores and their gradients twice: `queries` adds up over keys, `keys` over
 * queries.
 */
#define NAME_MAX_AXES 6
enum {
    NAME_STEPS = NAME_WIDTH / 16,
    NAME_WARP_ROWS = 16 * NAME_TILES,
    NAME_ROW = NAME_WIDTH + 8,
    NAME_CHUNKS = NAME_WIDTH / 8, /* of 16 bytes in a row */
    /* Words of 16 bits for sums of a block's rows, or of two tiles. */
    NAME_SUMS = 8 * (NAME_ROWS > 2 * NAME_COLUMNS ? NAME_ROWS : 2 * NAME_COLUMNS),
    /* What a warp meets at once, of keys in `queries` and of queries in `keys`, which has twice the
     * sums: more are more than a thread has registers. */
    NAME_KEYS = NAME_TILES == 2 || NAME_MASKED ? 16 : 32,
    NAME_QUERIES = NAME_TILES == 2 || NAME_MASKED ? 16 : 32,
    NAME_GROUP = 32 * (NAME_ROWS / NAME_WARP_ROWS), /* threads of a group, and of all others */
    NAME_OTHERS = NAME_GROUP * (NAME_GROUPS - 1)
};
#define NAME_LOG2_E 1.4426950408889634f
#define NAME_LN_2 0.6931471805599453f
#define NAME_NOTHING (-3.402823466e38f) /* lse of a query without any weight */

/* Heads in row-major order; a tensor [heads, rows, width], whose rows are dense. */
typedef struct {
    int64_t num_axes, extents[NAME_MAX_AXES];
} NAME_heads;
typedef struct {
    char *first;
    int64_t row_step, head_steps[NAME_MAX_AXES];
} NAME_tensor;
/* A query sees `shift` keys more than its number and 1. */
typedef struct {
    int64_t rows, columns, width, out, num_blocks, shift, mask_step; /* of a key, in bytes */
    int64_t scale; /* by its bits: a double becomes a float in each use of it */
} NAME_extents;
/* What the gradient knows of a query: lse, infinite behind the last one; log2(e) tail; the sum of
 * dy y. */
typedef struct {
    float lse, tail, delta, unused;
} NAME_sums;

/* What each kernel knows of its call and of its place in it. */
#define NAME_BEGIN(a)                                                                    \
    const int32_t rows = (int32_t)a->e.rows, columns = (int32_t)a->e.columns;            \
    const int32_t width = (int32_t)a->e.width, out = (int32_t)a->e.out;                  \
    const int32_t shift = (int32_t)a->e.shift, num_blocks = (int32_t)a->e.num_blocks;    \
    const float scale = af_float_of_bits((uint32_t)a->e.scale);                          \
    const float factor = NAME_EXACT ? scale : 1.0f; /* of what `NAME_scale` leaves */    \
    /* Of few blocks the longest of all heads come first: the call waits for them. */    \
    const int32_t side = NAME_GROUPS > 1 ? (int32_t)AF_NUM_BLOCKS / num_blocks : num_blocks;\
    const int32_t outer = (int32_t)AF_BLOCK / side, inner = (int32_t)AF_BLOCK % side;    \
    const int32_t head = NAME_GROUPS > 1 ? inner : outer;                                \
    const int32_t block = NAME_GROUPS > 1 ? outer : inner;                               \
    const int32_t group = NAME_GROUPS > 1 ? AF_THREAD / NAME_GROUP : 0;                  \
    const int32_t g = (AF_THREAD & 31) / 4, t = AF_THREAD % 4;                           \
    const int32_t warp_first = (AF_THREAD - group * NAME_GROUP) / 32 * NAME_WARP_ROWS;   \
    const char *mask = NAME_MASKED ? NAME_matrix(&a->mask, &a->heads, head) : 0;

AF_FUNCTION char *NAME_matrix(const NAME_tensor *x, const NAME_heads *heads, int32_t head) {
    char *place = x->first;
    AF_ROLLED
    for (int32_t axis = (int32_t)heads->num_axes - 1; axis >= 0; axis--) {
        const int32_t extent = (int32_t)heads->extents[axis];
        place += head % extent * x->head_steps[axis];
        head /= extent;
    }
    return place;
}

/* Asks for rows first to first + count - 1 of a matrix; zeros behind its last row and column. */
AF_FUNCTION void NAME_fetch(
    uint16_t *tile, const char *matrix, int64_t row_step, int32_t first, int32_t end, int32_t width,
    int32_t count
) {
    int32_t row = AF_THREAD / NAME_CHUNKS, chunk = AF_THREAD % NAME_CHUNKS;
    const char *from = matrix + (first + row) * row_step + chunk * 16;
    AF_UNROLL
    for (int32_t i = 0; i < count * NAME_CHUNKS; i += NAME_THREADS) {
        if (NAME_THREADS % NAME_CHUNKS) {
            row = (i + AF_THREAD) / NAME_CHUNKS, chunk = (i + AF_THREAD) % NAME_CHUNKS;
            from = matrix + (first + row) * row_step + chunk * 16;
        }
        if (count * NAME_CHUNKS % NAME_THREADS && row >= count) break;
        const _Bool is_there = first + row < end && chunk * 8 < width;
        AF_COPY_16(tile + row * NAME_ROW + chunk * 8, is_there ? from : matrix, is_there);
        row += NAME_THREADS / NAME_CHUNKS;
        from += NAME_THREADS / NAME_CHUNKS * row_step;
    }
}

AF_FUNCTION void NAME_fetch_rows(
    uint16_t *tile, const NAME_tensor *x, const NAME_heads *heads, int32_t head, int32_t first,
    int32_t end, int32_t width
) {
    NAME_fetch(tile, NAME_matrix(x, heads, head), x->row_step, first, end, width, NAME_ROWS);
}
/* Asks for a tile of two matrices, where its number says; and for the sums of its queries. */
AF_FUNCTION void NAME_fetch_pair(
    uint16_t *stages, int32_t tile, const char *x, const NAME_tensor *of_x, const char *y,
    const NAME_tensor *of_y, const NAME_extents *e, int32_t end
) {
    uint16_t *stage = stages + (tile & 1) * 2 * NAME_COLUMNS * NAME_ROW;
    const int32_t first = tile * NAME_COLUMNS;
    NAME_fetch(stage, x, of_x->row_step, first, end, (int32_t)e->width, NAME_COLUMNS);
    stage += NAME_COLUMNS * NAME_ROW;
    NAME_fetch(stage, y, of_y->row_step, first, end, (int32_t)e->out, NAME_COLUMNS);
}
AF_FUNCTION void NAME_fetch_sums(NAME_sums *stages, int32_t tile, const NAME_sums *sums) {
    const int32_t i = AF_THREAD;
    if (i < NAME_COLUMNS)
        AF_COPY_16(
            stages + (tile & 1) * NAME_COLUMNS + i, sums + tile * NAME_COLUMNS + i, 1
        );
}

/* 0 * NaN is NaN: what a causal mask hides from some queries of a block goes into products with 0 for
 * what is not finite. `firsts` keeps, for each column or for all of a row, the first row that had any
 * of that: queries that see it get NaN. Each thread looks at what it asked for itself. */
AF_FUNCTION void NAME_clean(uint16_t *tile, int32_t first, int32_t *firsts, _Bool is_whole) {
    AF_ROLLED
    for (int32_t i = AF_THREAD; i < NAME_COLUMNS * NAME_CHUNKS; i += NAME_THREADS) {
        const int32_t row = i / NAME_CHUNKS, column = i % NAME_CHUNKS * 8;
        uint16_t *place = tile + row * NAME_ROW + column;
        uint32_t words[4], found = 0;
        af_get(words, place, 16);
        AF_UNROLL
        for (int32_t j = 0; j < 4; j++)
            found |= (words[j] & 0x10001u * NAME_INFINITE) + 0x10001u * (0x8000u - NAME_INFINITE);
        if (!(found & 0x80008000u)) continue;
        AF_ROLLED
        for (int32_t j = 0; j < 8; j++) {
            if ((place[j] & NAME_INFINITE) != NAME_INFINITE) continue;
            place[j] = 0;
            int32_t *least = firsts + (is_whole ? 0 : column + j), was = *(volatile int32_t *)least;
            while (first + row < was) {
                const int32_t before = AF_ATOMIC_CAS_I32(least, was, first + row);
                was = before == was ? INT32_MIN : before;
            }
        }
    }
}

/* Where a lane's row of 4 matrices begins, of 16 x 16 numbers: a left factor, or a right one whose
 * columns lie along rows (turned); and a right one whose rows do. */
AF_FUNCTION int32_t NAME_along(void) {
    const int32_t lane = AF_THREAD & 31;
    return (lane & 15) * NAME_ROW + (lane >> 4) * 8;
}
AF_FUNCTION int32_t NAME_across(void) {
    const int32_t lane = AF_THREAD & 31;
    return ((lane & 7) + (lane >> 4) * 8) * NAME_ROW + ((lane >> 3) & 1) * 8;
}

/* A warp's rows of a tile, as left factors. */
AF_FUNCTION void NAME_left(uint32_t (*x)[NAME_STEPS][4], const uint16_t *rows) {
    AF_UNROLL
    for (int32_t m = 0; m < NAME_TILES; m++) {
        AF_UNROLL
        for (int32_t k = 0; k < NAME_STEPS; k++)
            AF_MATRICES(x[m][k], rows + m * 16 * NAME_ROW + k * 16 + NAME_along());
    }
}

/* sums[rows of the warp][16] += x rows^T, for 16 rows of the other side. */
AF_FUNCTION void NAME_scores(
    float (*sums)[2][4], const uint32_t (*x)[NAME_STEPS][4], const uint16_t *rows, int32_t stride
) {
    AF_UNROLL
    for (int32_t k = 0; k < NAME_STEPS; k++) {
        uint32_t b[4];
        AF_MATRICES(b, rows + k * 16 + NAME_across());
        AF_UNROLL
        for (int32_t m = 0; m < NAME_TILES; m++) {
            NAME_MULTIPLY(sums[m * stride][0], x[m][k], b[0], b[1]);
            NAME_MULTIPLY(sums[m * stride][1], x[m][k], b[2], b[3]);
        }
    }
}

/* The same for `count` times 16 rows, whose left factor stays in shared memory: registers are few. */
AF_FUNCTION void NAME_scores_of_rows(
    float (*sums)[2][4], const uint16_t *left, const uint16_t *rows, int32_t count
) {
    AF_UNROLL
    for (int32_t k = 0; k < NAME_STEPS; k++) {
        uint32_t x[NAME_TILES][4];
        AF_UNROLL
        for (int32_t m = 0; m < NAME_TILES; m++)
            AF_MATRICES(x[m], left + m * 16 * NAME_ROW + k * 16 + NAME_along());
        AF_UNROLL
        for (int32_t n = 0; n < count; n++) {
            uint32_t b[4];
            AF_MATRICES(b, rows + n * 16 * NAME_ROW + k * 16 + NAME_across());
            AF_UNROLL
            for (int32_t m = 0; m < NAME_TILES; m++) {
                NAME_MULTIPLY(sums[m * count + n][0], x[m], b[0], b[1]);
                NAME_MULTIPLY(sums[m * count + n][1], x[m], b[2], b[3]);
            }
        }
    }
}

/* sums[rows of the warp][width] += x rows, for 16 rows of the other side. */
AF_FUNCTION void NAME_add(
    float (*sums)[2 * NAME_STEPS][4], const uint32_t (*x)[4], const uint16_t *rows
) {
    AF_UNROLL
    for (int32_t k = 0; k < NAME_STEPS; k++) {
        uint32_t b[4];
        AF_TURNED_MATRICES(b, rows + k * 16 + NAME_along());
        AF_UNROLL
        for (int32_t m = 0; m < NAME_TILES; m++) {
            NAME_MULTIPLY(sums[m][2 * k], x[m], b[0], b[1]);
            NAME_MULTIPLY(sums[m][2 * k + 1], x[m], b[2], b[3]);
        }
    }
}

/* 16 x 16 results as a left factor. */
AF_FUNCTION void NAME_narrowed(uint32_t *x, const float (*sums)[4]) {
    x[0] = NAME_PAIR(sums[0][0], sums[0][1]);
    x[1] = NAME_PAIR(sums[0][2], sums[0][3]);
    x[2] = NAME_PAIR(sums[1][0], sums[1][1]);
    x[3] = NAME_PAIR(sums[1][2], sums[1][3]);
}

/* Puts `with` where a warp's queries do not see one of `count` keys: from `end` on, and, of a causal
 * call, from `hidden` on, and for each query one later. */
AF_FUNCTION void NAME_hide(float *x, int32_t count, int32_t end, int32_t hidden, float with) {
    const int32_t g = (AF_THREAD & 31) / 4, t = AF_THREAD % 4;
    AF_UNROLL
    for (int32_t i = 0; i < NAME_TILES * count / 2; i++) {
        const int32_t m = i / (count / 2), n = i / 4 % (count / 8), at = 8 * n + 2 * t + i % 2;
        const int32_t seen = hidden + 16 * m + g + 8 * (i / 2 % 2);
        if (at >= end || (NAME_CAUSAL && at >= seen)) x[i] = with;
    }
}

/* Scales `count` scores of each of a warp's rows, unless that rounds nothing, and adds the mask, whose
 * rows are `down` bytes apart and columns `across`. The last ones stand for what is behind them. */
AF_FUNCTION void NAME_scale(
    float *x, int32_t count, float scale, const char *mask, int64_t down, int64_t across,
    int32_t row, int32_t rows, int32_t column, int32_t columns
) {
    const int32_t g = (AF_THREAD & 31) / 4, t = AF_THREAD % 4;
    AF_UNROLL
    for (int32_t i = 0; i < NAME_TILES * count / 2 && !NAME_EXACT; i++) {
        if (!NAME_MASKED) {
            x[i] *= scale;
            continue;
        }
        const int32_t m = i / (count / 2), n = i / 4 % (count / 8);
        const int32_t own = row + 16 * m + g + 8 * (i / 2 % 2), other = column + 8 * n + 2 * t + i % 2;
        const int64_t at = own < rows ? own : rows - 1, over = other < columns ? other : columns - 1;
        const uint16_t added = *(const uint16_t *)(mask + at * down + over * across);
        x[i] = fmaf(x[i], scale, NAME_FROM(added));
    }
}

AF_FUNCTION void NAME_clear(float *x, int32_t count) {
    AF_UNROLL
    for (int32_t i = 0; i < count; i++) x[i] = 0;
}

/* Puts a warp's results into its rows of a tile. */
AF_FUNCTION void NAME_put(
    uint16_t *rows, const float (*sums)[2 * NAME_STEPS][4], const float (*factors)[2]
) {
    const int32_t g = (AF_THREAD & 31) / 4, t = AF_THREAD % 4;
    AF_UNROLL
    for (int32_t m = 0; m < NAME_TILES; m++) {
        AF_UNROLL
        for (int32_t h = 0; h < 2; h++) {
            uint16_t *row = rows + (16 * m + 8 * h + g) * NAME_ROW + 2 * t;
            AF_UNROLL
            for (int32_t n = 0; n < 2 * NAME_STEPS; n++)
                *(uint32_t *)(row + 8 * n) = NAME_PAIR(
                    sums[m][n][2 * h] * factors[m][h], sums[m][n][2 * h + 1] * factors[m][h]
                );
        }
    }
}

/* Puts `count` numbers of each thread behind the first group where that group finds them. */
AF_FUNCTION void NAME_hand_over(float *space, const float *x, int32_t count) {
    AF_UNROLL
    for (int32_t i = 0; i < count; i++) space[i * NAME_OTHERS + AF_THREAD - NAME_GROUP] = x[i];
}
/* Adds to sums of the first group those of the others, in their order; all threads call it, behind a
 * barrier after which nobody reads the space. */
AF_FUNCTION void NAME_add_groups(float *x, int32_t count, float *space, int32_t group) {
    if (group) NAME_hand_over(space, x, count);
    AF_BARRIER();
    if (group) return;
    AF_UNROLL
    for (int32_t other = 0; other < NAME_GROUPS - 1; other++) {
        AF_UNROLL
        for (int32_t i = 0; i < count; i++)
            x[i] += space[i * NAME_OTHERS + NAME_GROUP * other + AF_THREAD];
    }
}

/* Stores a tile of a block's rows; behind a barrier. */
AF_FUNCTION void NAME_store(
    const NAME_tensor *x, const NAME_heads *heads, int32_t head, const uint16_t *tile,
    int32_t first, int32_t end, int32_t width
) {
    char *matrix = NAME_matrix(x, heads, head);
    AF_UNROLL
    for (int32_t i = 0; i < NAME_ROWS * NAME_CHUNKS; i += NAME_THREADS) {
        const int32_t row = (i + AF_THREAD) / NAME_CHUNKS, chunk = (i + AF_THREAD) % NAME_CHUNKS;
        if (NAME_ROWS * NAME_CHUNKS % NAME_THREADS && row >= NAME_ROWS) break;
        if (first + row < end && chunk * 8 < width)
            *(af_16_bytes *)AF_ALIGNED(matrix + (first + row) * x->row_step + chunk * 16, 16) =
                *(const af_16_bytes *)(tile + row * NAME_ROW + chunk * 8);
    }
}

#if NAME_GROUPS == 1
/* y, lse and tail. */
typedef struct {
    NAME_heads heads;
    NAME_tensor q, k, v, y, lse, tail, mask;
    NAME_extents e;
} NAME_attend_arguments;

AF_KERNEL_UP_TO(NAME_THREADS) NAME_attend(AF_ARGUMENTS(NAME_attend) arguments) {
    AF_SHARED_OF_LAUNCH(uint16_t, shared, (NAME_ROWS + 4 * NAME_COLUMNS) * NAME_ROW);
    AF_SHARED(int32_t, firsts, NAME_WIDTH);
    const NAME_attend_arguments *a = &arguments;
    NAME_BEGIN(a)
    /* Those that see most keys first: they take longest. */
    const int32_t first = (num_blocks - 1 - block) * NAME_ROWS;
    const int32_t end = NAME_CAUSAL ? (int32_t)af_min(columns, first + NAME_ROWS + shift) : columns;
    const int32_t num_tiles = (end + NAME_COLUMNS - 1) / NAME_COLUMNS;
    const char *k = NAME_matrix(&a->k, &a->heads, head), *v = NAME_matrix(&a->v, &a->heads, head);
    uint16_t *stages = shared + NAME_ROWS * NAME_ROW;

    NAME_fetch_rows(shared, &a->q, &a->heads, head, first, rows, width);
    NAME_fetch_pair(stages, 0, k, &a->k, v, &a->v, &a->e, columns);
    if (AF_THREAD < NAME_WIDTH) firsts[AF_THREAD] = INT32_MAX;
    AF_COPIED();
    AF_BARRIER();
    /* Some query of the block does not see the last key of a tile that begins here or later. */
    const int32_t diagonal = first + shift + 2 - NAME_COLUMNS;
    if (NAME_CAUSAL && diagonal <= 0) {
        NAME_clean(stages + NAME_COLUMNS * NAME_ROW, 0, firsts, 0);
        AF_BARRIER();
    }
    uint32_t q[NAME_TILES][NAME_STEPS][4];
    NAME_left(q, shared + warp_first * NAME_ROW);
    float y[NAME_TILES][2 * NAME_STEPS][4], most[NAME_TILES][2], total[NAME_TILES][2];
    NAME_clear(&y[0][0][0], NAME_TILES * NAME_STEPS * 8);
    NAME_clear(&total[0][0], NAME_TILES * 2);
    AF_UNROLL
    for (int32_t m = 0; m < NAME_TILES; m++) most[m][0] = most[m][1] = -INFINITY;

    AF_ROLLED
    for (int32_t tile = 0; tile < num_tiles; tile++) {
        const int32_t column = tile * NAME_COLUMNS;
        const uint16_t *keys = stages + (tile & 1) * 2 * NAME_COLUMNS * NAME_ROW;
        const uint16_t *values = keys + NAME_COLUMNS * NAME_ROW;
        if (tile + 1 < num_tiles)
            NAME_fetch_pair(stages, tile + 1, k, &a->k, v, &a->v, &a->e, columns);
        /* The first keys that the warp's first query does not see, and those that none does. */
        const int32_t hidden = first + warp_first + shift + 1;
        if (!NAME_CAUSAL || column < hidden + NAME_WARP_ROWS - 1) {
            float s[NAME_TILES][NAME_COLUMNS / 16][2][4];
            NAME_clear(&s[0][0][0][0], NAME_TILES * NAME_COLUMNS / 2);
            AF_UNROLL
            for (int32_t n = 0; n < NAME_COLUMNS / 16; n++)
                NAME_scores(&s[0][n], q, keys + n * 16 * NAME_ROW, NAME_COLUMNS / 16);
            NAME_scale(
                &s[0][0][0][0], NAME_COLUMNS, scale, mask, a->mask.row_step, a->e.mask_step,
                first + warp_first, rows, column, columns
            );
            if (column + NAME_COLUMNS > columns || (NAME_CAUSAL && column + NAME_COLUMNS > hidden))
                NAME_hide(&s[0][0][0][0], NAME_COLUMNS, columns - column, hidden - column, -INFINITY);
            AF_UNROLL
            for (int32_t m = 0; m < NAME_TILES; m++) {
                AF_UNROLL
                for (int32_t h = 0; h < 2; h++) {
                    float largest = -INFINITY;
                    AF_UNROLL
                    for (int32_t n = 0; n < NAME_COLUMNS / 8; n++) {
                        const float *x = &s[m][n / 2][n % 2][2 * h];
                        largest = fmaxf(largest, fmaxf(x[0], x[1]));
                    }
                    largest = fmaxf(largest, AF_SHUFFLE_XOR_F32(largest, 1));
                    largest = fmaxf(largest, AF_SHUFFLE_XOR_F32(largest, 2));
                    largest = fmaxf(most[m][h], largest * factor);
                    /* Of nothing but -inf all weights are 0. */
                    const float base = largest == -INFINITY ? 0.0f : largest;
                    const float shrink = af_power_of_2((most[m][h] - base) * NAME_LOG2_E);
                    float sum = 0;
                    AF_UNROLL
                    for (int32_t n = 0; n < NAME_COLUMNS / 8; n++) {
                        float *x = &s[m][n / 2][n % 2][2 * h];
                        x[0] = af_power_of_2(fmaf(x[0], factor, -base) * NAME_LOG2_E);
                        x[1] = af_power_of_2(fmaf(x[1], factor, -base) * NAME_LOG2_E);
                        sum += x[0] + x[1];
                    }
                    most[m][h] = largest;
                    total[m][h] = fmaf(total[m][h], shrink, sum);
                    AF_UNROLL
                    for (int32_t n = 0; n < 2 * NAME_STEPS; n++)
                        y[m][n][2 * h] *= shrink, y[m][n][2 * h + 1] *= shrink;
                }
            }
            AF_UNROLL
            for (int32_t n = 0; n < NAME_COLUMNS / 16; n++) {
                uint32_t p[NAME_TILES][4];
                AF_UNROLL
                for (int32_t m = 0; m < NAME_TILES; m++) NAME_narrowed(p[m], s[m][n]);
                NAME_add(y, p, values + n * 16 * NAME_ROW);
            }
        }
        AF_COPIED();
        if (NAME_CAUSAL && tile + 1 < num_tiles && column + NAME_COLUMNS >= diagonal)
            NAME_clean(
                stages + (2 * (~tile & 1) + 1) * NAME_COLUMNS * NAME_ROW, column + NAME_COLUMNS,
                firsts, 0
            );
        AF_BARRIER();
    }

    float shares[NAME_TILES][2];
    char *logs = NAME_matrix(&a->lse, &a->heads, head);
    char *tails = NAME_matrix(&a->tail, &a->heads, head);
    AF_UNROLL
    for (int32_t m = 0; m < NAME_TILES; m++) {
        AF_UNROLL
        for (int32_t h = 0; h < 2; h++) {
            float sum = total[m][h];
            sum += AF_SHUFFLE_XOR_F32(sum, 1);
            sum += AF_SHUFFLE_XOR_F32(sum, 2);
            shares[m][h] = sum == 0 ? 0.0f : 1.0f / sum;
            const int32_t row = first + warp_first + 16 * m + 8 * h + g;
            const float largest = sum == 0 ? NAME_NOTHING : most[m][h];
            const float log_sum = sum == 0 ? 0.0f : log2f(sum) * NAME_LN_2, lse = largest + log_sum;
            if (t == 0 && row < rows) {
                *(float *)(logs + row * a->lse.row_step) = lse;
                *(float *)(tails + row * a->tail.row_step) = (largest - lse) + log_sum;
            }
        }
    }
    AF_UNROLL
    for (int32_t i = 0; i < NAME_TILES * NAME_STEPS * 8 && NAME_CAUSAL; i++) {
        const int32_t m = i / (8 * NAME_STEPS), n = i / 4 % (2 * NAME_STEPS);
        const int32_t last = first + warp_first + 16 * m + g + 8 * (i / 2 % 2) + shift;
        if (firsts[8 * n + 2 * t + i % 2] <= last) y[m][n][i % 4] = NAN;
    }
    NAME_put(shared + warp_first * NAME_ROW, y, shares);
    AF_BARRIER();
    NAME_store(&a->y, &a->heads, head, shared, first, rows, out);
}
#endif
