/* Products in chunks: calls of a library, or of the small product of this file, on our pool.
 *
 * A block begins as `head`. Every chunk makes its calls in order, each of which writes its own part
 * of the output, and then runs the epilogue on its rows, while they are in cache.
 */
#include "runtime.h"
#include "tiles.h"

typedef void (*rows_body)(void *arguments, int64_t row0, int64_t row1, int32_t worker);

typedef struct {
    int64_t num_chunks, max_workers;
    const int64_t *first_call; /* num_chunks + 1 */
    const int64_t *rows;       /* begin and end per chunk, for the epilogue */
    rows_body epilogue;        /* or NULL */
    void *epilogue_arguments;
    int64_t status;
} head;

static inline void finish_rows(const head *h, int64_t chunk, int32_t worker) {
    if (h->epilogue)
        h->epilogue(h->epilogue_arguments, h->rows[2 * chunk], h->rows[2 * chunk + 1], worker);
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
    af_parallel(library_chunk, b, b->h.num_chunks, (int32_t)b->h.max_workers);
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
        af_parallel(NAME##_chunk, b, b->h.num_chunks, (int32_t)b->h.max_workers);               \
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

#define TILE(R, V)                                                                              \
    __attribute__((noinline)) static void tile_##R##_##V(                                       \
        int64_t k, const float *a, int64_t a_row, int64_t a_column, const float *b,             \
        int64_t b_row, float *c, int64_t c_row) {                                               \
        lanes sum[R][V];                                                                        \
        for (int r = 0; r < R; r++)                                                             \
            for (int v = 0; v < V; v++) sum[r][v] = (lanes){0};                                 \
        for (int64_t p = 0; p < k; p++) {                                                       \
            lanes row[V];                                                                       \
            for (int v = 0; v < V; v++) row[v] = *(const lanes *)(b + p * b_row + v * LANES);   \
            for (int r = 0; r < R; r++) {                                                       \
                float x = a[r * a_row + p * a_column];                                          \
                for (int v = 0; v < V; v++) sum[r][v] = af_add_scaled(sum[r][v], x, row[v]);    \
            }                                                                                   \
        }                                                                                       \
        for (int r = 0; r < R; r++)                                                             \
            for (int v = 0; v < V; v++) *(lanes *)(c + r * c_row + v * LANES) = sum[r][v];      \
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

static void small_chunk(void *arguments, int64_t chunk, int32_t worker) {
    product_block *s = arguments;
    for (int64_t i = s->h.first_call[chunk]; i < s->h.first_call[chunk + 1]; i++)
        small_product(s, s->calls + i, (float *)(s->scratch + worker * s->scratch_bytes));
    finish_rows(&s->h, chunk, worker);
}

AF_EXPORT int32_t af_gemm_small(void *arguments) {
    product_block *s = arguments;
    af_parallel(small_chunk, s, s->h.num_chunks, (int32_t)s->h.max_workers);
    return 0;
}
