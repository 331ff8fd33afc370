/* Whether a tensor holds NaN or infinity: all bits of an exponent set, whatever the compiler is
 * told about floats.
 *
 * The tensor is rows and columns with any steps; a dense one is a single row.
 */
#include "runtime.h"

typedef struct {
    const char *x;
    int64_t *out;
    const int64_t *earlier; /* or NULL */
    int64_t rows, columns, row_step, column_step; /* steps in elements */
    int64_t block_columns, blocks_per_chunk, num_blocks, max_workers;
    int64_t is_wide; /* float64 */
    int64_t is_found;
} Arguments;

#define SEARCH(NAME, U, EXPONENT)                                                      \
    static int NAME(const void *first, int64_t step, int64_t n) {                      \
        const U *x = first;                                                            \
        U found = 0;                                                                   \
        if (step == 1) {                                                               \
            _Pragma("omp simd reduction(| : found)")                                   \
            for (int64_t i = 0; i < n; i++) found |= (x[i] & EXPONENT) == EXPONENT;    \
        } else {                                                                       \
            for (int64_t i = 0; i < n; i++) found |= (x[i * step] & EXPONENT) == EXPONENT; \
        }                                                                              \
        return found != 0;                                                             \
    }

SEARCH(search_single, uint32_t, UINT32_C(0x7f800000))
SEARCH(search_double, uint64_t, UINT64_C(0x7ff0000000000000))

static void search_chunk(void *arguments, int64_t chunk, int32_t worker) {
    (void)worker;
    Arguments *a = arguments;
    int64_t across = (a->columns + a->block_columns - 1) / a->block_columns;
    int64_t end = af_min((chunk + 1) * a->blocks_per_chunk, a->num_blocks);
    for (int64_t block = chunk * a->blocks_per_chunk; block < end; block++) {
        int64_t row = block / across, column = block % across * a->block_columns;
        int64_t columns = af_min(a->block_columns, a->columns - column);
        int64_t at = row * a->row_step + column * a->column_step;
        int is_found = a->is_wide
                           ? search_double((const double *)a->x + at, a->column_step, columns)
                           : search_single((const float *)a->x + at, a->column_step, columns);
        if (is_found) __atomic_store_n(&a->is_found, 1, __ATOMIC_RELAXED);
    }
}

AF_EXPORT int32_t af_non_finite(void *arguments) {
    Arguments *a = arguments;
    a->is_found = a->earlier ? *a->earlier : 0;
    if (!a->is_found && a->num_blocks) {
        int64_t chunks = (a->num_blocks + a->blocks_per_chunk - 1) / a->blocks_per_chunk;
        af_parallel(search_chunk, a, chunks, (int32_t)a->max_workers);
    }
    *a->out = a->is_found;
    return 0;
}
