/* A product of few rows in float32, as a step of a recurrence has: out = a b, a [NAME_ROWS, k].
 *
 * A block has some columns, and its threads share the inner extent, four terms at a time: a thread
 * has one column of all rows. What it added up is joined by warp, and then warp by warp in their
 * order; so bits depend on shapes alone.
 */
#define NAME_WARPS 12
/* Rows that are loaded before the first is multiplied: registers hold so many. */
#define NAME_AT_ONCE (NAME_ROWS < 10 ? NAME_ROWS : 10)
#define NAME_MOST_COLUMNS 16

typedef struct {
    const float *a, *b;
    float *out;
    int64_t a_row, b_inner, b_column, out_row, inner, num_columns;
    int64_t columns;              /* of a block: a power of two */
    int64_t is_even_a, is_even_b; /* four terms lie side by side, at multiples of 16 bytes */
} NAME_arguments;

/* Four terms that lie `step` elements apart, as far as there are any; the others are 0. */
AF_FUNCTION void NAME_four(float *x, const float *place, int64_t step, int64_t left, _Bool is_even) {
    if (is_even && left >= 4) {
        uint32_t words[4];
        af_get(words, place, 16);
        AF_UNROLL
        for (int32_t i = 0; i < 4; i++) x[i] = af_float_of_bits(words[i]);
    } else {
        AF_UNROLL
        for (int32_t i = 0; i < 4; i++) x[i] = i < left ? place[i * step] : 0;
    }
}

AF_KERNEL_UP_TO(384) NAME(AF_ARGUMENTS(NAME) arguments) {
    AF_SHARED(float, parts, NAME_WARPS * NAME_ROWS * NAME_MOST_COLUMNS);
    const NAME_arguments *a = &arguments;
    const int32_t columns = (int32_t)a->columns, lane = AF_THREAD % 32, warp = AF_THREAD / 32;
    const int64_t first = AF_BLOCK * columns, column = first + lane % columns;
    /* A thread without a column has the last one again, and stores nothing. */
    const float *b = a->b + af_min(column, a->num_columns - 1) * a->b_column;
    const int64_t step = 4 * (NAME_WARPS * 32 / columns);
    float totals[NAME_ROWS] = {0};
    AF_ROLLED
    for (int64_t k = 4 * (warp * (32 / columns) + lane / columns); k < a->inner; k += step) {
        float right[4];
        NAME_four(right, b + k * a->b_inner, a->b_inner, a->inner - k, a->is_even_b != 0);
        const float *left = a->a + k;
        if (a->is_even_a && k + 4 <= a->inner) {
            AF_UNROLL
            for (int32_t begin = 0; begin < NAME_ROWS; begin += NAME_AT_ONCE) {
                uint32_t words[NAME_AT_ONCE][4];
                AF_UNROLL
                for (int32_t i = 0; i < NAME_AT_ONCE; i++) {
                    if (begin + i < NAME_ROWS) af_get(words[i], left + (begin + i) * a->a_row, 16);
                }
                AF_UNROLL
                for (int32_t i = 0; i < NAME_AT_ONCE; i++) {
                    if (begin + i >= NAME_ROWS) continue;
                    AF_UNROLL
                    for (int32_t n = 0; n < 4; n++) {
                        const float x = af_float_of_bits(words[i][n]);
                        totals[begin + i] = fmaf(x, right[n], totals[begin + i]);
                    }
                }
            }
        } else {
            AF_UNROLL
            for (int32_t row = 0; row < NAME_ROWS; row++) {
                float x[4];
                NAME_four(x, left + row * a->a_row, 1, a->inner - k, 0);
                AF_UNROLL
                for (int32_t n = 0; n < 4; n++) totals[row] = fmaf(x[n], right[n], totals[row]);
            }
        }
    }
    AF_UNROLL
    for (int32_t row = 0; row < NAME_ROWS; row++) {
        for (int32_t mask = columns; mask < 32; mask *= 2)
            totals[row] += AF_SHUFFLE_XOR_F32(totals[row], mask);
        if (lane < columns) parts[(warp * NAME_ROWS + row) * columns + lane] = totals[row];
    }
    AF_BARRIER();
    for (int32_t i = AF_THREAD; i < NAME_ROWS * columns; i += AF_NUM_THREADS) {
        double total = 0;
        for (int32_t from = 0; from < NAME_WARPS; from++)
            total += parts[from * NAME_ROWS * columns + i];
        const int64_t to = first + i % columns;
        if (to < a->num_columns) a->out[i / columns * a->out_row + to] = (float)total;
    }
}
