/* Attention of 16-bit floats by tensor cores, and its gradient, whose scores stay in registers
 * (Dao, FlashAttention-2, 2023).
 *
 * The text says NAME_WIDTH, what queries, keys and values are wide, filled up with zeros to a
 * multiple of 16; NAME_ROWS of a block, of which each of its 4 warps has 16 or 32; NAME_COLUMNS, how
 * many rows of the other side it meets at a time; NAME_CAUSAL; and of the type of elements
 * NAME_MULTIPLY, NAME_PAIR and NAME_FROM.
 *
 * Rows lie in shared memory 16 bytes further apart than they are long: so the 8 rows of a matrix
 * that tensor cores load lie in different banks. While a block works on one tile, the next is on its
 * way into the other of two places. A barrier ends each tile: behind it the next one is there, and
 * nobody reads the last one, whose place is then filled.
 *
 * Every sum is added up by one warp in a fixed order: nothing depends on when a block runs. For that
 * the gradient computes scores and their gradients twice: `queries` adds up over keys, `keys` over
 * queries.
 */
#define NAME_MAX_AXES 6
enum {
    NAME_STEPS = NAME_WIDTH / 16,
    NAME_TILES = NAME_ROWS / 64, /* tiles of 16 rows of a warp */
    NAME_WARP_ROWS = 16 * NAME_TILES,
    NAME_ROW = NAME_WIDTH + 8,
    NAME_CHUNKS = NAME_WIDTH / 8, /* of 16 bytes in a row */
    NAME_KEYS = 32,               /* that a warp of `queries` meets at once */
    NAME_QUERIES = 16             /* and one of `keys`, which has twice the sums */
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
/* `factor` is the scale times log2(e); a query sees `shift` keys more than its number and 1. */
typedef struct {
    int64_t rows, columns, width, out, num_blocks, shift;
    int64_t scale, factor; /* by their bits: a double becomes a float in each use of it */
} NAME_extents;
/* What the gradient knows of a query: log2(e) lse, infinite where there is no weight, and the sum of
 * dy y. */
typedef struct {
    float lse, delta;
} NAME_sums;

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
    for (int32_t i = 0; i < count * NAME_CHUNKS; i += 128) {
        if (128 % NAME_CHUNKS) {
            row = (i + AF_THREAD) / NAME_CHUNKS, chunk = (i + AF_THREAD) % NAME_CHUNKS;
            if (count * NAME_CHUNKS % 128 && row >= count) break;
            from = matrix + (first + row) * row_step + chunk * 16;
        }
        const _Bool is_there = first + row < end && chunk * 8 < width;
        AF_COPY_16(tile + row * NAME_ROW + chunk * 8, is_there ? from : matrix, is_there);
        row += 128 / NAME_CHUNKS;
        from += 128 / NAME_CHUNKS * row_step;
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

/* The same, whose left factor stays in shared memory: registers are few. */
AF_FUNCTION void NAME_scores_of_rows(
    float (*sums)[2][4], const uint16_t *left, const uint16_t *rows, int32_t stride
) {
    AF_UNROLL
    for (int32_t k = 0; k < NAME_STEPS; k++) {
        uint32_t b[4];
        AF_MATRICES(b, rows + k * 16 + NAME_across());
        AF_UNROLL
        for (int32_t m = 0; m < NAME_TILES; m++) {
            uint32_t x[4];
            AF_MATRICES(x, left + m * 16 * NAME_ROW + k * 16 + NAME_along());
            NAME_MULTIPLY(sums[m * stride][0], x, b[0], b[1]);
            NAME_MULTIPLY(sums[m * stride][1], x, b[2], b[3]);
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

/* Stores a tile of a block's rows; behind a barrier. */
AF_FUNCTION void NAME_store(
    char *matrix, int64_t row_step, const uint16_t *tile, int32_t first, int32_t end, int32_t width
) {
    AF_UNROLL
    for (int32_t i = 0; i < NAME_ROWS * NAME_CHUNKS; i += 128) {
        const int32_t row = (i + AF_THREAD) / NAME_CHUNKS, chunk = (i + AF_THREAD) % NAME_CHUNKS;
        if (first + row < end && chunk * 8 < width)
            *(af_16_bytes *)AF_ALIGNED(matrix + (first + row) * row_step + chunk * 16, 16) =
                *(const af_16_bytes *)(tile + row * NAME_ROW + chunk * 8);
    }
}

/* y and lse. */
typedef struct {
    NAME_heads heads;
    NAME_tensor q, k, v, y, lse;
    NAME_extents e;
} NAME_attend_arguments;

AF_KERNEL_UP_TO(128) NAME_attend(AF_ARGUMENTS(NAME_attend) arguments) {
    AF_SHARED_OF_LAUNCH(uint16_t, shared, (NAME_ROWS + 4 * NAME_COLUMNS) * NAME_ROW);
    const NAME_attend_arguments *a = &arguments;
    const int32_t rows = (int32_t)a->e.rows, columns = (int32_t)a->e.columns;
    const int32_t width = (int32_t)a->e.width, out = (int32_t)a->e.out;
    const int32_t shift = (int32_t)a->e.shift, num_blocks = (int32_t)a->e.num_blocks;
    const float factor = af_float_of_bits((uint32_t)a->e.factor);
    const int32_t head = (int32_t)AF_BLOCK / num_blocks;
    /* Those that see most keys first: they take longest. */
    const int32_t first = (num_blocks - 1 - (int32_t)AF_BLOCK % num_blocks) * NAME_ROWS;
    const int32_t end = NAME_CAUSAL ? (int32_t)af_min(columns, first + NAME_ROWS + shift) : columns;
    const int32_t num_tiles = (end + NAME_COLUMNS - 1) / NAME_COLUMNS;
    const int32_t g = (AF_THREAD & 31) / 4, t = AF_THREAD % 4;
    const int32_t warp_first = AF_THREAD / 32 * NAME_WARP_ROWS;
    const char *k = NAME_matrix(&a->k, &a->heads, head), *v = NAME_matrix(&a->v, &a->heads, head);
    uint16_t *stages = shared + NAME_ROWS * NAME_ROW;

    NAME_fetch(
        shared, NAME_matrix(&a->q, &a->heads, head), a->q.row_step, first, rows, width, NAME_ROWS
    );
    NAME_fetch(stages, k, a->k.row_step, 0, columns, width, NAME_COLUMNS);
    NAME_fetch(
        stages + NAME_COLUMNS * NAME_ROW, v, a->v.row_step, 0, columns, out, NAME_COLUMNS
    );
    AF_COPIED();
    AF_BARRIER();
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
        if (tile + 1 < num_tiles) {
            uint16_t *next = stages + (~tile & 1) * 2 * NAME_COLUMNS * NAME_ROW;
            const int32_t from = column + NAME_COLUMNS;
            NAME_fetch(next, k, a->k.row_step, from, columns, width, NAME_COLUMNS);
            next += NAME_COLUMNS * NAME_ROW;
            NAME_fetch(next, v, a->v.row_step, from, columns, out, NAME_COLUMNS);
        }
        /* The first keys that the warp's first query does not see, and those that none does. */
        const int32_t hidden = first + warp_first + shift + 1;
        if (!NAME_CAUSAL || column < hidden + NAME_WARP_ROWS - 1) {
            float s[NAME_TILES][NAME_COLUMNS / 16][2][4];
            NAME_clear(&s[0][0][0][0], NAME_TILES * NAME_COLUMNS / 2);
            AF_UNROLL
            for (int32_t n = 0; n < NAME_COLUMNS / 16; n++)
                NAME_scores(&s[0][n], q, keys + n * 16 * NAME_ROW, NAME_COLUMNS / 16);
            if (column + NAME_COLUMNS > columns ||
                (NAME_CAUSAL && column + NAME_COLUMNS > hidden)) {
                AF_UNROLL
                for (int32_t i = 0; i < NAME_TILES * NAME_COLUMNS / 2; i++) {
                    const int32_t m = i / (NAME_COLUMNS / 2), n = i / 4 % (NAME_COLUMNS / 8);
                    const int32_t at = column + 8 * n + 2 * t + i % 2;
                    const int32_t seen = hidden + 16 * m + g + 8 * (i / 2 % 2);
                    if (at >= columns || (NAME_CAUSAL && at >= seen))
                        s[m][n / 2][n % 2][i % 4] = -INFINITY;
                }
            }
            AF_UNROLL
            for (int32_t m = 0; m < NAME_TILES; m++) {
                AF_UNROLL
                for (int32_t h = 0; h < 2; h++) {
                    float largest = most[m][h];
                    AF_UNROLL
                    for (int32_t n = 0; n < NAME_COLUMNS / 8; n++) {
                        const float *x = &s[m][n / 2][n % 2][2 * h];
                        largest = fmaxf(largest, fmaxf(x[0], x[1]));
                    }
                    largest = fmaxf(largest, AF_SHUFFLE_XOR_F32(largest, 1));
                    largest = fmaxf(largest, AF_SHUFFLE_XOR_F32(largest, 2));
                    /* Of nothing but -inf all weights are 0. */
                    const float base = largest == -INFINITY ? 0.0f : largest * factor;
                    const float shrink = af_power_of_2(fmaf(most[m][h], factor, -base));
                    float sum = 0;
                    AF_UNROLL
                    for (int32_t n = 0; n < NAME_COLUMNS / 8; n++) {
                        float *x = &s[m][n / 2][n % 2][2 * h];
                        x[0] = af_power_of_2(fmaf(x[0], factor, -base));
                        x[1] = af_power_of_2(fmaf(x[1], factor, -base));
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
        AF_BARRIER();
    }

    float shares[NAME_TILES][2];
    const NAME_tensor *lse = &a->lse;
    char *logs = NAME_matrix(lse, &a->heads, head);
    AF_UNROLL
    for (int32_t m = 0; m < NAME_TILES; m++) {
        AF_UNROLL
        for (int32_t h = 0; h < 2; h++) {
            float sum = total[m][h];
            sum += AF_SHUFFLE_XOR_F32(sum, 1);
            sum += AF_SHUFFLE_XOR_F32(sum, 2);
            shares[m][h] = sum == 0 ? 0.0f : 1.0f / sum;
            const int32_t row = first + warp_first + 16 * m + 8 * h + g;
            const float log = fmaf(most[m][h], factor, log2f(sum)) * NAME_LN_2;
            if (t == 0 && row < rows)
                *(float *)(logs + row * lse->row_step) = sum == 0 ? NAME_NOTHING : log;
        }
    }
    NAME_put(shared + warp_first * NAME_ROW, y, shares);
    AF_BARRIER();
    NAME_store(NAME_matrix(&a->y, &a->heads, head), a->y.row_step, shared, first, rows, out);
}

/* dq, and what `keys` needs of each query: [heads, rows filled up to whole blocks]. */
typedef struct {
    NAME_heads heads;
    NAME_tensor dy, q, k, v, y, lse, dq;
    NAME_sums *sums;
    NAME_extents e;
} NAME_queries_arguments;

AF_KERNEL_UP_TO(128) NAME_queries(AF_ARGUMENTS(NAME_queries) arguments) {
    AF_SHARED_OF_LAUNCH(uint16_t, shared, (2 * NAME_ROWS + 4 * NAME_COLUMNS) * NAME_ROW);
    AF_SHARED(NAME_sums, own_sums, NAME_ROWS);
    const NAME_queries_arguments *a = &arguments;
    const int32_t rows = (int32_t)a->e.rows, columns = (int32_t)a->e.columns;
    const int32_t width = (int32_t)a->e.width, out = (int32_t)a->e.out;
    const int32_t shift = (int32_t)a->e.shift, num_blocks = (int32_t)a->e.num_blocks;
    const float factor = af_float_of_bits((uint32_t)a->e.factor);
    const int32_t head = (int32_t)AF_BLOCK / num_blocks;
    const int32_t first = (num_blocks - 1 - (int32_t)AF_BLOCK % num_blocks) * NAME_ROWS;
    const int32_t end = NAME_CAUSAL ? (int32_t)af_min(columns, first + NAME_ROWS + shift) : columns;
    const int32_t num_tiles = (end + NAME_COLUMNS - 1) / NAME_COLUMNS;
    const int32_t g = (AF_THREAD & 31) / 4, t = AF_THREAD % 4;
    const int32_t warp_first = AF_THREAD / 32 * NAME_WARP_ROWS;
    const char *k = NAME_matrix(&a->k, &a->heads, head), *v = NAME_matrix(&a->v, &a->heads, head);
    uint16_t *slopes = shared + NAME_ROWS * NAME_ROW, *stages = slopes + NAME_ROWS * NAME_ROW;
    /* y lies where the second tile will; it is twice as many rows at most. */
    uint16_t *results = stages + 2 * NAME_COLUMNS * NAME_ROW;

    const char *q_rows = NAME_matrix(&a->q, &a->heads, head);
    const char *dy_rows = NAME_matrix(&a->dy, &a->heads, head);
    const char *y_rows = NAME_matrix(&a->y, &a->heads, head);
    NAME_fetch(shared, q_rows, a->q.row_step, first, rows, width, NAME_ROWS);
    NAME_fetch(slopes, dy_rows, a->dy.row_step, first, rows, out, NAME_ROWS);
    NAME_fetch(results, y_rows, a->y.row_step, first, rows, out, NAME_ROWS);
    NAME_fetch(stages, k, a->k.row_step, 0, columns, width, NAME_COLUMNS);
    NAME_fetch(
        stages + NAME_COLUMNS * NAME_ROW, v, a->v.row_step, 0, columns, out, NAME_COLUMNS
    );
    AF_COPIED();
    AF_BARRIER();
    if (NAME_ROWS == 128 || AF_THREAD < NAME_ROWS) {
        const int32_t row = first + AF_THREAD;
        NAME_sums sums = {INFINITY, 0};
        AF_ROLLED
        for (int32_t i = 0; i < NAME_CHUNKS; i++) {
            uint32_t left[4], right[4];
            af_get(left, slopes + AF_THREAD * NAME_ROW + 8 * i, 16);
            af_get(right, results + AF_THREAD * NAME_ROW + 8 * i, 16);
            AF_UNROLL
            for (int32_t j = 0; j < 8; j++) {
                const uint16_t dy = (uint16_t)(left[j / 2] >> 16 * (j % 2));
                const uint16_t y = (uint16_t)(right[j / 2] >> 16 * (j % 2));
                sums.delta = fmaf(NAME_FROM(dy), NAME_FROM(y), sums.delta);
            }
        }
        if (row < rows) {
            const char *logs = NAME_matrix(&a->lse, &a->heads, head);
            const float lse = *(const float *)(logs + row * a->lse.row_step);
            sums.lse = lse < -1e30f ? INFINITY : lse * NAME_LOG2_E;
        }
        own_sums[AF_THREAD] = sums;
        a->sums[(int64_t)head * num_blocks * NAME_ROWS + row] = sums;
    }
    uint32_t q[NAME_TILES][NAME_STEPS][4], dy[NAME_TILES][NAME_STEPS][4];
    NAME_left(q, shared + warp_first * NAME_ROW);
    NAME_left(dy, slopes + warp_first * NAME_ROW);
    AF_BARRIER();
    NAME_sums sums[NAME_TILES][2];
    float dq[NAME_TILES][2 * NAME_STEPS][4], scales[NAME_TILES][2];
    NAME_clear(&dq[0][0][0], NAME_TILES * NAME_STEPS * 8);
    AF_UNROLL
    for (int32_t i = 0; i < 2 * NAME_TILES; i++) {
        sums[i / 2][i % 2] = own_sums[warp_first + 8 * i + g];
        scales[i / 2][i % 2] = af_float_of_bits((uint32_t)a->e.scale);
    }

    AF_ROLLED
    for (int32_t tile = 0; tile < num_tiles; tile++) {
        const uint16_t *keys = stages + (tile & 1) * 2 * NAME_COLUMNS * NAME_ROW;
        const uint16_t *values = keys + NAME_COLUMNS * NAME_ROW;
        if (tile + 1 < num_tiles) {
            uint16_t *next = stages + (~tile & 1) * 2 * NAME_COLUMNS * NAME_ROW;
            const int32_t from = (tile + 1) * NAME_COLUMNS;
            NAME_fetch(next, k, a->k.row_step, from, columns, width, NAME_COLUMNS);
            next += NAME_COLUMNS * NAME_ROW;
            NAME_fetch(next, v, a->v.row_step, from, columns, out, NAME_COLUMNS);
        }
        const int32_t hidden = first + warp_first + shift + 1;
        AF_ROLLED
        for (int32_t part = 0; part < NAME_COLUMNS; part += NAME_KEYS) {
            const int32_t column = tile * NAME_COLUMNS + part;
            if (column >= columns || (NAME_CAUSAL && column >= hidden + NAME_WARP_ROWS - 1)) break;
            float s[NAME_TILES][NAME_KEYS / 16][2][4], ds[NAME_TILES][NAME_KEYS / 16][2][4];
            NAME_clear(&s[0][0][0][0], NAME_TILES * NAME_KEYS / 2);
            NAME_clear(&ds[0][0][0][0], NAME_TILES * NAME_KEYS / 2);
            AF_UNROLL
            for (int32_t n = 0; n < NAME_KEYS / 16; n++) {
                const int32_t place = (part + 16 * n) * NAME_ROW;
                NAME_scores(&s[0][n], q, keys + place, NAME_KEYS / 16);
                NAME_scores(&ds[0][n], dy, values + place, NAME_KEYS / 16);
            }
            AF_UNROLL
            for (int32_t i = 0; i < NAME_TILES * NAME_KEYS / 2; i++) {
                const int32_t m = i / (NAME_KEYS / 2), n = i / 4 % (NAME_KEYS / 8);
                const NAME_sums own = sums[m][i / 2 % 2];
                float *x = &ds[m][n / 2][n % 2][i % 4];
                const float p = af_power_of_2(fmaf(s[m][n / 2][n % 2][i % 4], factor, -own.lse));
                *x = p * (*x - own.delta);
            }
            if (column + NAME_KEYS > columns || (NAME_CAUSAL && column + NAME_KEYS > hidden)) {
                AF_UNROLL
                for (int32_t i = 0; i < NAME_TILES * NAME_KEYS / 2; i++) {
                    const int32_t m = i / (NAME_KEYS / 2), n = i / 4 % (NAME_KEYS / 8);
                    const int32_t at = column + 8 * n + 2 * t + i % 2;
                    const int32_t seen = hidden + 16 * m + g + 8 * (i / 2 % 2);
                    if (at >= columns || (NAME_CAUSAL && at >= seen))
                        ds[m][n / 2][n % 2][i % 4] = 0;
                }
            }
            AF_UNROLL
            for (int32_t n = 0; n < NAME_KEYS / 16; n++) {
                uint32_t x[NAME_TILES][4];
                AF_UNROLL
                for (int32_t m = 0; m < NAME_TILES; m++) NAME_narrowed(x[m], ds[m][n]);
                NAME_add(dq, x, keys + (part + 16 * n) * NAME_ROW);
            }
        }
        AF_COPIED();
        AF_BARRIER();
    }
    NAME_put(shared + warp_first * NAME_ROW, dq, scales);
    AF_BARRIER();
    NAME_store(NAME_matrix(&a->dq, &a->heads, head), a->dq.row_step, shared, first, rows, width);
}

/* dk and dv, behind `queries`. */
typedef struct {
    NAME_heads heads;
    NAME_tensor dy, q, k, v, dk, dv;
    const NAME_sums *sums;
    int64_t sums_of_head;
    NAME_extents e;
} NAME_keys_arguments;

/* Asks for the queries from one on, what they are a factor of, and their sums. */
AF_FUNCTION void NAME_fetch_queries(
    const NAME_keys_arguments *a, const char *q, const char *dy, const NAME_sums *sums,
    int32_t from, uint16_t *stage, NAME_sums *stage_sums
) {
    const int32_t rows = (int32_t)a->e.rows;
    NAME_fetch(stage, q, a->q.row_step, from, rows, (int32_t)a->e.width, NAME_COLUMNS);
    stage += NAME_COLUMNS * NAME_ROW;
    NAME_fetch(stage, dy, a->dy.row_step, from, rows, (int32_t)a->e.out, NAME_COLUMNS);
    if (AF_THREAD < NAME_COLUMNS / 2)
        AF_COPY_16(stage_sums + 2 * AF_THREAD, sums + from + 2 * AF_THREAD, 1);
}

AF_KERNEL_UP_TO(128) NAME_keys(AF_ARGUMENTS(NAME_keys) arguments) {
    AF_SHARED_OF_LAUNCH(uint16_t, shared, (2 * NAME_ROWS + 4 * NAME_COLUMNS) * NAME_ROW);
    AF_SHARED(NAME_sums, all_sums, 2 * NAME_COLUMNS);
    const NAME_keys_arguments *a = &arguments;
    const int32_t rows = (int32_t)a->e.rows, columns = (int32_t)a->e.columns;
    const int32_t width = (int32_t)a->e.width, out = (int32_t)a->e.out;
    const int32_t shift = (int32_t)a->e.shift, num_blocks = (int32_t)a->e.num_blocks;
    const float factor = af_float_of_bits((uint32_t)a->e.factor);
    const int32_t head = (int32_t)AF_BLOCK / num_blocks;
    const int32_t first = (int32_t)AF_BLOCK % num_blocks * NAME_ROWS;
    const int32_t begin = NAME_CAUSAL ? (int32_t)af_max(0, first - shift) / NAME_COLUMNS : 0;
    const int32_t num_tiles = (rows + NAME_COLUMNS - 1) / NAME_COLUMNS;
    const int32_t g = (AF_THREAD & 31) / 4, t = AF_THREAD % 4;
    const int32_t warp_first = AF_THREAD / 32 * NAME_WARP_ROWS;
    uint16_t *values = shared + NAME_ROWS * NAME_ROW, *stages = values + NAME_ROWS * NAME_ROW;

    NAME_fetch(
        shared, NAME_matrix(&a->k, &a->heads, head), a->k.row_step, first, columns, width, NAME_ROWS
    );
    NAME_fetch(
        values, NAME_matrix(&a->v, &a->heads, head), a->v.row_step, first, columns, out, NAME_ROWS
    );
    const char *q = NAME_matrix(&a->q, &a->heads, head), *dy = NAME_matrix(&a->dy, &a->heads, head);
    const NAME_sums *sums = a->sums + head * a->sums_of_head;
    const int32_t parity = begin & 1;
    NAME_fetch_queries(
        a, q, dy, sums, begin * NAME_COLUMNS, stages + parity * 2 * NAME_COLUMNS * NAME_ROW,
        all_sums + parity * NAME_COLUMNS
    );
    AF_COPIED();
    AF_BARRIER();
    uint32_t k[NAME_TILES][NAME_STEPS][4];
    NAME_left(k, shared + warp_first * NAME_ROW);
    float dk[NAME_TILES][2 * NAME_STEPS][4], dv[NAME_TILES][2 * NAME_STEPS][4];
    NAME_clear(&dk[0][0][0], NAME_TILES * NAME_STEPS * 8);
    NAME_clear(&dv[0][0][0], NAME_TILES * NAME_STEPS * 8);

    AF_ROLLED
    for (int32_t tile = begin; tile < num_tiles; tile++) {
        const int32_t next = ~tile & 1;
        if (tile + 1 < num_tiles)
            NAME_fetch_queries(
                a, q, dy, sums, (tile + 1) * NAME_COLUMNS,
                stages + next * 2 * NAME_COLUMNS * NAME_ROW, all_sums + next * NAME_COLUMNS
            );
        const uint16_t *queries = stages + (tile & 1) * 2 * NAME_COLUMNS * NAME_ROW;
        const uint16_t *slopes = queries + NAME_COLUMNS * NAME_ROW;
        const NAME_sums *tile_sums = all_sums + (tile & 1) * NAME_COLUMNS;
        AF_ROLLED
        for (int32_t part = 0; part < NAME_COLUMNS; part += NAME_QUERIES) {
            /* The first of these queries, and the first key that it does not see. */
            const int32_t row = tile * NAME_COLUMNS + part, hidden = row + shift + 1;
            if (row >= rows) break;
            if (NAME_CAUSAL && hidden + NAME_QUERIES - 1 <= first + warp_first) continue;
            float s[NAME_TILES][1][2][4], ds[NAME_TILES][1][2][4];
            NAME_clear(&s[0][0][0][0], NAME_TILES * 8);
            NAME_clear(&ds[0][0][0][0], NAME_TILES * 8);
            NAME_scores(&s[0][0], k, queries + part * NAME_ROW, 1);
            NAME_scores_of_rows(
                &ds[0][0], values + warp_first * NAME_ROW, slopes + part * NAME_ROW, 1
            );
            AF_UNROLL
            for (int32_t n = 0; n < 2; n++) {
                uint32_t words[4];
                af_get(words, tile_sums + part + 8 * n + 2 * t, 16);
                AF_UNROLL
                for (int32_t i = 0; i < NAME_TILES * 4; i++) {
                    const float lse = af_float_of_bits(words[2 * (i % 2)]);
                    const float delta = af_float_of_bits(words[2 * (i % 2) + 1]);
                    float *p = &s[i / 4][0][n][i % 4], *x = &ds[i / 4][0][n][i % 4];
                    *p = af_power_of_2(fmaf(*p, factor, -lse));
                    *x = *p * (*x - delta);
                }
            }
            /* A key that is infinite meets the zeros behind the last query, too. */
            if (row + NAME_QUERIES > rows ||
                (NAME_CAUSAL && hidden < first + warp_first + NAME_WARP_ROWS)) {
                AF_UNROLL
                for (int32_t i = 0; i < NAME_TILES * 8; i++) {
                    const int32_t m = i / 8, n = i / 4 % 2, query = 8 * n + 2 * t + i % 2;
                    const int32_t at = first + warp_first + 16 * m + g + 8 * (i / 2 % 2);
                    if (row + query >= rows || (NAME_CAUSAL && at >= hidden + query))
                        s[m][0][n][i % 4] = ds[m][0][n][i % 4] = 0;
                }
            }
            uint32_t x[NAME_TILES][4];
            AF_UNROLL
            for (int32_t m = 0; m < NAME_TILES; m++) NAME_narrowed(x[m], s[m][0]);
            NAME_add(dv, x, slopes + part * NAME_ROW);
            AF_UNROLL
            for (int32_t m = 0; m < NAME_TILES; m++) NAME_narrowed(x[m], ds[m][0]);
            NAME_add(dk, x, queries + part * NAME_ROW);
        }
        AF_COPIED();
        AF_BARRIER();
    }
    float ones[NAME_TILES][2], scales[NAME_TILES][2];
    AF_UNROLL
    for (int32_t i = 0; i < 2 * NAME_TILES; i++)
        ones[i / 2][i % 2] = 1, scales[i / 2][i % 2] = af_float_of_bits((uint32_t)a->e.scale);
    NAME_put(shared + warp_first * NAME_ROW, dk, scales);
    NAME_put(values + warp_first * NAME_ROW, dv, ones);
    AF_BARRIER();
    NAME_store(NAME_matrix(&a->dk, &a->heads, head), a->dk.row_step, shared, first, columns, width);
    NAME_store(NAME_matrix(&a->dv, &a->heads, head), a->dv.row_step, values, first, columns, out);
}
