/* Products in chunks: calls of a library, or of the small product of this file, on our pool.
 *
 * A block begins as `head`. Every chunk makes its calls in order, each of which writes its own part
 * of the output. The epilogue wants whole rows: a chunk of them runs it while they are in cache, and
 * where chunks are cut across rows it runs on blocks of rows when all chunks have been made.
 */
#include "runtime.h"
#include "af_math.h"
#include "packing.h"
#include "tiles.h"

typedef void (*rows_body)(void *arguments, int64_t row0, int64_t row1, int32_t worker);

typedef struct {
    int64_t num_chunks, max_workers;
    const int64_t *first_call; /* num_chunks + 1 */
    const int64_t *rows;       /* for the epilogue: begin and end per chunk, or per block */
    int64_t num_blocks;        /* of rows behind all chunks; 0 where each chunk has its own */
    rows_body epilogue;        /* or NULL */
    void *epilogue_arguments;
    int64_t status;
} head;

static void finish_block(void *arguments, int64_t block, int32_t worker) {
    const head *h = arguments;
    h->epilogue(h->epilogue_arguments, h->rows[2 * block], h->rows[2 * block + 1], worker);
}

static inline void finish_rows(head *h, int64_t chunk, int32_t worker) {
    if (h->epilogue && !h->num_blocks) finish_block(h, chunk, worker);
}

static void run_chunks(af_body body, void *block) {
    head *h = block;
    af_parallel(body, block, h->num_chunks, (int32_t)h->max_workers);
    if (h->num_blocks) af_parallel(finish_block, h, h->num_blocks, (int32_t)h->max_workers);
}

/* -- oneDNN ----------------------------------------------------------------------------- */

#define MAX_ARGUMENTS 8 /* scratch included */
#define ARGUMENT_SCRATCH 80

typedef struct {
    int32_t index;
    void *memory;
} library_argument;

typedef struct {
    void *primitive;
    const library_argument *arguments;
    int64_t num_arguments;
    void *const *scratch; /* a memory object per worker, or NULL */
} library_call;

typedef struct library_block {
    head h;
    struct library_block *before; /* what is done first: b is packed; or NULL */
    const library_call *calls;
    int32_t (*execute)(void *primitive, void *stream, int32_t, const library_argument *);
    void *stream;
    int32_t (*threads)(void);
    void (*set_threads)(int32_t);
    int64_t *is_done; /* where it is noted that `before` was, and need not be again; or NULL */
} library_block;

static void library_chunk(void *arguments, int64_t chunk, int32_t worker) {
    library_block *b = arguments;
    library_argument given[MAX_ARGUMENTS];
    b->set_threads(1); /* this thread's own setting: the library opens no team of its own */
    for (int64_t i = b->h.first_call[chunk]; i < b->h.first_call[chunk + 1]; i++) {
        const library_call *call = b->calls + i;
        int32_t count = (int32_t)call->num_arguments;
        memcpy(given, call->arguments, (size_t)count * sizeof *given);
        if (call->scratch) {
            given[count].index = ARGUMENT_SCRATCH;
            given[count++].memory = call->scratch[worker];
        }
        int32_t status = b->execute(call->primitive, b->stream, count, given);
        if (status) __atomic_store_n(&b->h.status, status, __ATOMIC_RELAXED);
    }
    finish_rows(&b->h, chunk, worker);
}

static int32_t library_run(library_block *b) {
    b->h.status = 0;
    run_chunks(library_chunk, b);
    return (int32_t)b->h.status;
}

AF_EXPORT int32_t af_gemm_onednn(void *arguments) {
    library_block *b = arguments;
    int32_t threads = b->threads();
    int32_t is_done = b->is_done && *b->is_done;
    int32_t status = b->before && !is_done ? library_run(b->before) : 0;
    if (!status && b->is_done) *b->is_done = 1;
    if (!status) status = library_run(b);
    b->set_threads(threads);
    return status;
}

/* -- BLAS, and the small product -------------------------------------------------------- */

typedef struct {
    int64_t m, n, k;
    const void *a, *b;
    void *c;
} product;

typedef struct {
    head h;
    const product *calls;
    int64_t a_row, a_column, b_row, b_column, c_row;
    void *function; /* of BLAS */
    double beta;    /* 1: BLAS adds to c */
    char *scratch;  /* of the small product */
    int64_t scratch_bytes;
    int64_t item_bytes, out_bytes; /* of an element of a and b, and of c */
} product_block;

enum { ROW_MAJOR = 101, AS_IT_IS = 111, TRANSPOSED = 112 };

typedef void (*sgemm)(int, int, int, int64_t, int64_t, int64_t, float, const float *, int64_t,
                      const float *, int64_t, float, float *, int64_t);
typedef void (*dgemm)(int, int, int, int64_t, int64_t, int64_t, double, const double *, int64_t,
                      const double *, int64_t, double, double *, int64_t);
typedef void (*sgemm32)(int, int, int, int, int, int, float, const float *, int, const float *, int,
                        float, float *, int);
typedef void (*dgemm32)(int, int, int, int, int, int, double, const double *, int, const double *,
                        int, double, double *, int);

#define BLAS_CHUNK(NAME, FUNCTION, INT)                                                         \
    static void NAME##_chunk(void *arguments, int64_t chunk, int32_t worker) {                  \
        product_block *b = arguments;                                                           \
        int ta = b->a_column == 1 ? AS_IT_IS : TRANSPOSED;                                      \
        int tb = b->b_column == 1 ? AS_IT_IS : TRANSPOSED;                                      \
        INT lda = (INT)(ta == AS_IT_IS ? b->a_row : b->a_column);                               \
        INT ldb = (INT)(tb == AS_IT_IS ? b->b_row : b->b_column);                               \
        for (int64_t i = b->h.first_call[chunk]; i < b->h.first_call[chunk + 1]; i++) {         \
            const product *p = b->calls + i;                                                    \
            ((FUNCTION)b->function)(ROW_MAJOR, ta, tb, (INT)p->m, (INT)p->n, (INT)p->k, 1,      \
                                    p->a, lda, p->b, ldb, b->beta, p->c, (INT)b->c_row);        \
        }                                                                                       \
        finish_rows(&b->h, chunk, worker);                                                      \
    }                                                                                           \
    AF_EXPORT int32_t NAME(void *arguments) {                                                   \
        product_block *b = arguments;                                                           \
        run_chunks(NAME##_chunk, b);                                                            \
        return 0;                                                                               \
    }

BLAS_CHUNK(af_gemm_sgemm64, sgemm, int64_t)
BLAS_CHUNK(af_gemm_dgemm64, dgemm, int64_t)
BLAS_CHUNK(af_gemm_sgemm32, sgemm32, int)
BLAS_CHUNK(af_gemm_dgemm32, dgemm32, int)

/* The small product keeps a tile of the output in registers and walks k once. Columns of b must be
 * adjacent: where they are not, and for the last columns of a row, b is copied to scratch first, in
 * panels of LANES columns filled up with zeros. */

#define LANES VW
typedef af_vec lanes;

/* A tile is in registers only where all loops over it are unrolled, at any level of optimisation. */
#define EVERY _Pragma("GCC unroll 8")

#define TILE(R, V)                                                                              \
    __attribute__((noinline)) static void tile_##R##_##V(                                       \
        int64_t k, const float *a, int64_t a_row, int64_t a_column, const float *b,             \
        int64_t b_row, float *c, int64_t c_row) {                                               \
        lanes sum[R][V];                                                                        \
        EVERY for (int r = 0; r < R; r++)                                                       \
            EVERY for (int v = 0; v < V; v++) sum[r][v] = (lanes){0};                           \
        for (int64_t p = 0; p < k; p++) {                                                       \
            lanes row[V];                                                                       \
            const lanes *at = (const lanes *)(b + p * b_row);                                   \
            EVERY for (int v = 0; v < V; v++) row[v] = at[v];                                   \
            EVERY for (int r = 0; r < R; r++) {                                                 \
                float x = a[r * a_row + p * a_column];                                          \
                EVERY for (int v = 0; v < V; v++)                                               \
                    sum[r][v] = af_add_scaled(sum[r][v], x, row[v]);                            \
            }                                                                                   \
        }                                                                                       \
        EVERY for (int r = 0; r < R; r++)                                                       \
            EVERY for (int v = 0; v < V; v++) ((lanes *)(c + r * c_row))[v] = sum[r][v];        \
    }

TILE(8, 2)
TILE(8, 1)
TILE(4, 4)
TILE(4, 2)
TILE(4, 1)
TILE(2, 8)
TILE(2, 4)
TILE(2, 2)
TILE(2, 1)
TILE(1, 8)
TILE(1, 4)
TILE(1, 2)
TILE(1, 1)

typedef void (*tile)(int64_t, const float *, int64_t, int64_t, const float *, int64_t, float *,
                     int64_t);

static const tile TILES[4][4] = {
    {tile_1_1, tile_1_2, tile_1_4, tile_1_8},
    {tile_2_1, tile_2_2, tile_2_4, tile_2_8},
    {tile_4_1, tile_4_2, tile_4_4, NULL},
    {tile_8_1, tile_8_2, NULL, NULL},
};

/* All rows of a panel of LANES << width columns. */
static void panel(const product_block *s, const product *p, const float *b, int64_t b_row,
                  float *c, int64_t c_row, int width) {
    int height = 3;
    for (int64_t row = 0; row < p->m; row += 1 << height) {
        while (p->m - row < 1 << height || !TILES[height][width]) height--;
        TILES[height][width](p->k, (const float *)p->a + row * s->a_row, s->a_row, s->a_column, b,
                             b_row, c + row * c_row, c_row);
    }
}

static void copy_panel(const product_block *s, const product *p, int64_t column, int64_t columns,
                       float *restrict to) {
    const float *from = (const float *)p->b + column * s->b_column;
    for (int64_t i = 0; i < p->k; i++)
        for (int64_t j = 0; j < LANES; j++)
            to[i * LANES + j] = j < columns ? from[i * s->b_row + j * s->b_column] : 0.0f;
}

/* Rows of a panel whose last columns are not the output's: through a tile on the stack. */
static void last_panel(const product_block *s, const product *p, const float *b, float *c,
                       int64_t columns) {
    float whole[8 * LANES];
    for (int64_t row = 0; row < p->m; row += 8) {
        product part = *p;
        part.m = af_min(8, p->m - row);
        part.a = (const float *)p->a + row * s->a_row;
        panel(s, &part, b, LANES, whole, LANES, 0);
        for (int64_t r = 0; r < part.m; r++)
            memcpy(c + (row + r) * s->c_row, whole + r * LANES, (size_t)columns * sizeof(float));
    }
}

static void small_product(const product_block *s, const product *p, float *scratch) {
    float *c = p->c;
    int64_t column = 0;
    int most = p->m < 4 ? 3 : p->m < 8 ? 2 : 1;
    if (s->b_column == 1)
        for (int width = most; width >= 0; width--)
            for (; p->n - column >= LANES << width; column += LANES << width)
                panel(s, p, (const float *)p->b + column, s->b_row, c + column, s->c_row, width);
    for (; column < p->n; column += LANES) {
        int64_t columns = af_min(LANES, p->n - column);
        copy_panel(s, p, column, columns, scratch);
        if (columns == LANES)
            panel(s, p, scratch, LANES, c + column, s->c_row, 0);
        else
            last_panel(s, p, scratch, c + column, columns);
    }
}

typedef uint16_t half __attribute__((may_alias));

/* A matrix of bfloat16 as floats, dense in the order in which its elements lie; one stride is 1. */
static const float *as_floats(const void *from, int64_t rows, int64_t columns, int64_t *row,
                              int64_t *column, float *to) {
    const int is_turned = *column != 1;
    int64_t runs = is_turned ? columns : rows, length = is_turned ? rows : columns;
    const int64_t step = is_turned ? *column : *row;
    *row = is_turned ? 1 : columns, *column = is_turned ? rows : 1;
    if (step == length) length *= runs, runs = 1; /* no gaps: one long run */
    af_load_rows(to, length, from, step * sizeof(half), runs, length, 1);
    return to;
}

/* The same of bfloat16, whose operands are floats in scratch, and the sums before they are rounded. */
static void small_half_product(const product_block *s, const product *p, float *scratch) {
    product_block own = *s;
    product part = *p;
    float *a = scratch + p->k * LANES, *b = a + p->m * p->k, *c = b + p->k * p->n;
    part.a = as_floats(p->a, p->m, p->k, &own.a_row, &own.a_column, a);
    part.b = as_floats(p->b, p->k, p->n, &own.b_row, &own.b_column, b);
    const int is_rounded = s->out_bytes == sizeof(half);
    if (is_rounded) part.c = c, own.c_row = p->n;
    small_product(&own, &part, scratch);
    int64_t rows = p->m, columns = p->n;
    if (s->c_row == columns) columns *= rows, rows = 1;
    if (is_rounded)
        af_store_rows(p->c, s->c_row * sizeof(half), c, columns, rows, columns, 1, 1.0f);
}

static void small_chunk(void *arguments, int64_t chunk, int32_t worker) {
    product_block *s = arguments;
    float *scratch = (float *)(s->scratch + worker * s->scratch_bytes);
    for (int64_t i = s->h.first_call[chunk]; i < s->h.first_call[chunk + 1]; i++)
        if (s->item_bytes == 2) small_half_product(s, s->calls + i, scratch);
        else small_product(s, s->calls + i, scratch);
    finish_rows(&s->h, chunk, worker);
}

AF_EXPORT int32_t af_gemm_small(void *arguments) {
    product_block *s = arguments;
    run_chunks(small_chunk, s);
    return 0;
}

/* Few rows: a product that takes as long as it takes to read b, which each chunk of columns does
 * once. Where columns of b are adjacent it is the small product of the chunk, else rows meet columns
 * along k. An element is one sum, of an order that no chunk and no other row changes.
 *
 * One column after the other, UNIT elements at a time: a processor fetches one stream ahead of who
 * reads it, and does that worse with four (Zen 4, two cores, 8 MB from the third level: 55 us, 66
 * with four columns side by side, and 62 where they are asked for in advance). */

#define SUMS 4
#define UNIT (SUMS * LANES)
#if defined(__AVX512F__)
#define FEW 4 /* rows of a that meet a column at once: FEW * SUMS sums stay in registers */
#else
#define FEW 2
#endif

typedef uint32_t words __attribute__((vector_size(VW * 4), aligned(2), may_alias));

/* LANES elements of a column. Of bfloat16 the even ones of 2 * LANES, and then the odd ones. */
AF_TILED lanes elements(const char *column, int64_t i, int sum, const int is_half) {
    if (!is_half) return *(const lanes *)(column + (i + sum * LANES) * 4);
    words both = *(const words *)(column + (i + sum / 2 * 2 * LANES) * 2);
    if (sum & 1) return (lanes)(both & 0xffff0000u);
    return (lanes)(both << 16);
}

/* The sum of all lanes of SUMS vectors, halves first: subscripts become shuffles. */
AF_TILED float total(const lanes *sum) {
    typedef float four __attribute__((vector_size(16)));
    lanes all = (sum[0] + sum[1]) + (sum[2] + sum[3]);
#if VW == 16
    typedef float eight __attribute__((vector_size(32)));
    eight fold = (eight){all[0], all[1], all[2], all[3], all[4], all[5], all[6], all[7]} +
                 (eight){all[8], all[9], all[10], all[11], all[12], all[13], all[14], all[15]};
#else
    lanes fold = all;
#endif
#if VW >= 8
    four rest = (four){fold[0], fold[1], fold[2], fold[3]} +
                (four){fold[4], fold[5], fold[6], fold[7]};
#else
    four rest = fold;
#endif
    return (rest[0] + rest[2]) + (rest[1] + rest[3]);
}

/* `rows` rows of a, that are `a_row` apart and filled up to whole units, meet a column of b. */
AF_TILED void dots(const product_block *s, const product *p, const float *a, int64_t a_row,
                   int64_t row, int64_t column, const int rows, const int is_half) {
    const int64_t item = is_half ? 2 : 4;
    const char *b = (const char *)p->b + column * s->b_column * item;
    lanes sum[FEW][SUMS] = {{{0}}};
    int64_t i = 0;
    for (; i + UNIT <= p->k; i += UNIT)
#pragma GCC unroll 4
        for (int u = 0; u < SUMS; u++) {
            lanes y = elements(b, i, u, is_half);
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++)
                sum[r][u] = af_add_products(
                    sum[r][u], *(const lanes *)(a + r * a_row + i + u * LANES), y);
        }
    if (i < p->k) {
        float last[UNIT] = {0};
        memcpy(last, b + i * item, (size_t)((p->k - i) * item));
#pragma GCC unroll 4
        for (int u = 0; u < SUMS; u++) {
            lanes y = elements((const char *)last, 0, u, is_half);
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++)
                sum[r][u] = af_add_products(
                    sum[r][u], *(const lanes *)(a + r * a_row + i + u * LANES), y);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) {
        int64_t at = (row + r) * s->c_row + column;
        if (s->out_bytes == 2) ((half *)p->c)[at] = af_to_bf16(total(sum[r]));
        else ((float *)p->c)[at] = total(sum[r]);
    }
}

/* A row of a as `elements` gives columns of b, and zeros up to a whole unit. */
static void copy_row(const product_block *s, const product *p, int64_t row, float *to,
                     int64_t width) {
    const int is_half = s->item_bytes == 2;
    const char *from = (const char *)p->a + row * s->a_row * s->item_bytes;
    memset(to, 0, (size_t)width * sizeof *to);
    for (int64_t i = 0; i < p->k; i++) {
        const char *x = from + i * s->a_column * s->item_bytes;
        int64_t place = i & ~(int64_t)(2 * LANES - 1), rest = i & (2 * LANES - 1);
        if (is_half) to[place + (rest & 1) * LANES + rest / 2] = af_from_bf16(*(const half *)x);
        else to[i] = *(const float *)x;
    }
}

AF_TILED void multiply_columns(const product_block *s, const product *p, float *scratch,
                               const int is_half) {
    const float *a = p->a;
    int64_t a_row = s->a_row;
    if (is_half || s->a_column != 1 || p->k % UNIT) {
        a = scratch, a_row = (p->k + UNIT - 1) / UNIT * UNIT;
        for (int64_t r = 0; r < p->m; r++) copy_row(s, p, r, scratch + r * a_row, a_row);
    }
    for (int64_t column = 0; column < p->n; column++) {
        int64_t row = 0;
        for (; row + FEW <= p->m; row += FEW)
            dots(s, p, a + row * a_row, a_row, row, column, FEW, is_half);
        for (; FEW > 2 && row + 2 <= p->m; row += 2)
            dots(s, p, a + row * a_row, a_row, row, column, 2, is_half);
        if (row < p->m) dots(s, p, a + row * a_row, a_row, row, column, 1, is_half);
    }
}

static void few_chunk(void *arguments, int64_t chunk, int32_t worker) {
    product_block *s = arguments;
    float *scratch = (float *)(s->scratch + worker * s->scratch_bytes);
    for (int64_t i = s->h.first_call[chunk]; i < s->h.first_call[chunk + 1]; i++)
        if (s->item_bytes == 2) multiply_columns(s, s->calls + i, scratch, 1);
        else if (s->b_column == 1) small_product(s, s->calls + i, scratch);
        else multiply_columns(s, s->calls + i, scratch, 0);
}

AF_EXPORT int32_t af_gemm_few_rows(void *arguments) {
    product_block *s = arguments;
    run_chunks(few_chunk, s);
    return 0;
}
