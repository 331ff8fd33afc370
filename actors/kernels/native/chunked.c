/* The steps of a region that are no products: a fused program on the rows of a chunk, and sums of
 * its columns. Who runs which piece does not matter: pieces follow from the extents alone. */
#include "runtime.h"

typedef struct {
    void (*rows)(void *arguments, int64_t row0, int64_t row1, int32_t worker);
    af_word *program;
    int64_t status; /* the place of the program's status */
    int64_t row0, row1, piece_rows, max_workers;
} program_block;

static void program_piece(void *arguments, int64_t piece, int32_t worker) {
    const program_block *b = arguments;
    int64_t row0 = b->row0 + piece * b->piece_rows;
    b->rows(b->program, row0, af_min(row0 + b->piece_rows, b->row1), worker);
}

AF_EXPORT int32_t af_chunk_program(void *arguments) {
    program_block *b = arguments;
    int64_t num_pieces = (b->row1 - b->row0 + b->piece_rows - 1) / b->piece_rows;
    b->program[b->status].i = 0;
    af_parallel(program_piece, b, num_pieces, (int32_t)b->max_workers);
    return b->program[b->status].i != 0;
}

/* total[j] (+)= sum of x[r][j], in float64 and in the order of rows; `out` takes it, or is NULL. */
#define COLUMNS 512 /* of a piece: its totals stay in the first-level cache */

typedef struct {
    const void *x;
    int64_t rows, columns, row_step;
    double *total;
    void *out;
    int64_t is_first, max_workers;
} sums_block;

#define COLUMN_SUMS(NAME, TYPE)                                                                 \
    static void NAME##_piece(void *arguments, int64_t piece, int32_t worker) {                  \
        const sums_block *b = arguments;                                                        \
        const int64_t j0 = piece * COLUMNS, n = af_min(COLUMNS, b->columns - j0);               \
        double *restrict total = b->total + j0;                                                 \
        if (b->is_first) memset(total, 0, (size_t)n * sizeof *total);                           \
        for (int64_t r = 0; r < b->rows; r++) {                                                 \
            const TYPE *restrict x = (const TYPE *)b->x + r * b->row_step + j0;                 \
            for (int64_t j = 0; j < n; j++) total[j] += x[j];                                   \
        }                                                                                       \
        if (b->out)                                                                             \
            for (int64_t j = 0; j < n; j++) ((TYPE *)b->out)[j0 + j] = (TYPE)total[j];          \
        (void)worker;                                                                           \
    }                                                                                           \
    AF_EXPORT int32_t NAME(void *arguments) {                                                   \
        sums_block *b = arguments;                                                              \
        int64_t num_pieces = (b->columns + COLUMNS - 1) / COLUMNS;                              \
        af_parallel(NAME##_piece, b, num_pieces, (int32_t)b->max_workers);                      \
        return 0;                                                                               \
    }

COLUMN_SUMS(af_column_sums_float32, float)
COLUMN_SUMS(af_column_sums_float64, double)
