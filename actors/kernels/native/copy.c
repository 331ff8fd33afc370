/* Moves elements between strided tensors: copies, transposes, concat, pad.
 *
 * A launch has phases, a phase has parts, a part is a strided copy cut into blocks of rows and
 * columns. Blocks are what threads share; those of one phase write different bytes. The columns
 * are the axis along which the target is dense, where it is along any; the rows are the axis along
 * which the source is dense, so that a transpose is done in tiles that the first cache holds.
 */
#include "runtime.h"

#define MAX_OUTER 6

typedef struct {
    char *target;
    const char *source;
    int64_t num_outer, extents[MAX_OUTER], target_steps[MAX_OUTER], source_steps[MAX_OUTER];
    int64_t rows, row_target, row_source;
    int64_t columns, column_target, column_source;
    int64_t block_rows, block_columns, num_blocks;
    int64_t item; /* bytes of an element */
} Part;

typedef struct {
    int64_t num_parts;
    const Part *parts;
    int64_t num_blocks, blocks_per_chunk;
} Phase;

typedef struct {
    int64_t max_workers, num_phases;
    Phase phases[];
} Arguments;

/* Targets and sources of a block, with steps in bytes. */
typedef struct {
    char *target;
    const char *source;
    int64_t rows, row_target, row_source;
    int64_t columns, column_target, column_source;
} Block;

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define HAS_SHUFFLES 1
#endif
#endif

#ifdef HAS_SHUFFLES
typedef uint32_t Eight __attribute__((vector_size(32), aligned(4), may_alias));
#define MIX(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#define LOW_1(a, b) MIX(a, b, 0, 8, 1, 9, 4, 12, 5, 13)
#define HIGH_1(a, b) MIX(a, b, 2, 10, 3, 11, 6, 14, 7, 15)
#define LOW_2(a, b) MIX(a, b, 0, 1, 8, 9, 4, 5, 12, 13)
#define HIGH_2(a, b) MIX(a, b, 2, 3, 10, 11, 6, 7, 14, 15)
#define LOW_4(a, b) MIX(a, b, 0, 1, 2, 3, 8, 9, 10, 11)
#define HIGH_4(a, b) MIX(a, b, 4, 5, 6, 7, 12, 13, 14, 15)

/* Eight source columns, each dense over eight rows, become eight dense rows of the target. */
static inline void transpose_uint32_t(const char *source, int64_t column_source, char *target,
                                      int64_t row_target) {
    Eight a[8], b[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) a[i] = *(const Eight *)(source + i * column_source);
#pragma GCC unroll 8
    for (int i = 0; i < 4; i++) {
        b[2 * i] = LOW_1(a[2 * i], a[2 * i + 1]);
        b[2 * i + 1] = HIGH_1(a[2 * i], a[2 * i + 1]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 2; i++) {
        a[4 * i] = LOW_2(b[4 * i], b[4 * i + 2]);
        a[4 * i + 1] = HIGH_2(b[4 * i], b[4 * i + 2]);
        a[4 * i + 2] = LOW_2(b[4 * i + 1], b[4 * i + 3]);
        a[4 * i + 3] = HIGH_2(b[4 * i + 1], b[4 * i + 3]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 4; i++) {
        *(Eight *)(target + i * row_target) = LOW_4(a[i], a[i + 4]);
        *(Eight *)(target + (i + 4) * row_target) = HIGH_4(a[i], a[i + 4]);
    }
}

typedef uint16_t Halves __attribute__((vector_size(16), aligned(2), may_alias));

/* The same of 16 bits: elements, pairs and fours of two columns in turns. */
static inline void transpose_uint16_t(const char *source, int64_t column_source, char *target,
                                      int64_t row_target) {
    Halves a[8], b[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) a[i] = *(const Halves *)(source + i * column_source);
#pragma GCC unroll 8
    for (int i = 0; i < 4; i++) {
        b[2 * i] = MIX(a[2 * i], a[2 * i + 1], 0, 8, 1, 9, 2, 10, 3, 11);
        b[2 * i + 1] = MIX(a[2 * i], a[2 * i + 1], 4, 12, 5, 13, 6, 14, 7, 15);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 4; i++) {
        const int from = i / 2 * 4 + i % 2, to = i / 2 * 4 + i % 2 * 2;
        a[to] = MIX(b[from], b[from + 2], 0, 1, 8, 9, 2, 3, 10, 11);
        a[to + 1] = MIX(b[from], b[from + 2], 4, 5, 12, 13, 6, 7, 14, 15);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 4; i++) {
        *(Halves *)(target + 2 * i * row_target) = LOW_4(a[i], a[i + 4]);
        *(Halves *)(target + (2 * i + 1) * row_target) = HIGH_4(a[i], a[i + 4]);
    }
}
#endif

#define MOVE(T)                                                                                   \
    static void move_##T(const Block *b, int64_t first_row, int64_t first_column) {               \
        int64_t target_step = b->column_target / (int64_t)sizeof(T);                              \
        int64_t source_step = b->column_source / (int64_t)sizeof(T);                              \
        for (int64_t row = first_row; row < b->rows; row++) {                                     \
            T *target = (T *)(b->target + row * b->row_target);                                   \
            const T *source = (const T *)(b->source + row * b->row_source);                       \
            if (target_step == 1 && source_step == 0) {                                           \
                T value = *source;                                                                \
                for (int64_t c = first_column; c < b->columns; c++) target[c] = value;            \
            } else if (target_step == 1) {                                                        \
                for (int64_t c = first_column; c < b->columns; c++)                               \
                    target[c] = source[c * source_step];                                          \
            } else {                                                                              \
                for (int64_t c = first_column; c < b->columns; c++)                               \
                    target[c * target_step] = source[c * source_step];                            \
            }                                                                                     \
        }                                                                                         \
    }
MOVE(uint8_t)
MOVE(uint16_t)
MOVE(uint32_t)
MOVE(uint64_t)

/* Where rows of the source become columns of the target, tiles of 8 x 8 go through registers. */
#ifdef HAS_SHUFFLES
#define TURN(T)                                                                                   \
    static void turn_##T(const Block *b) {                                                        \
        const int64_t item = sizeof(T), rows = b->rows & ~7, columns = b->columns & ~7;           \
        if (b->row_source != item || b->column_target != item) {                                  \
            move_##T(b, 0, 0);                                                                    \
            return;                                                                               \
        }                                                                                         \
        for (int64_t row = 0; row < rows; row += 8)                                               \
            for (int64_t column = 0; column < columns; column += 8)                               \
                transpose_##T(b->source + row * item + column * b->column_source,                 \
                              b->column_source, b->target + row * b->row_target + column * item,  \
                              b->row_target);                                                     \
        Block rest = *b;                                                                          \
        rest.rows = rows;                                                                         \
        if (columns < b->columns) move_##T(&rest, 0, columns);                                    \
        move_##T(b, rows, 0);                                                                     \
    }
#else
#define TURN(T)                                                                                   \
    static void turn_##T(const Block *b) { move_##T(b, 0, 0); }
#endif
TURN(uint16_t)
TURN(uint32_t)

static void move_runs(const Block *b, int64_t size_bytes) {
    for (int64_t row = 0; row < b->rows; row++)
        memcpy(b->target + row * b->row_target, b->source + row * b->row_source, size_bytes);
}

static void move(const Part *part, const Block *b) {
    if (b->column_target == part->item && b->column_source == part->item)
        move_runs(b, b->columns * part->item);
    else if (part->item == 1)
        move_uint8_t(b, 0, 0);
    else if (part->item == 2)
        turn_uint16_t(b);
    else if (part->item == 4)
        turn_uint32_t(b);
    else
        move_uint64_t(b, 0, 0);
}

static void move_block(const Part *part, int64_t index) {
    int64_t across = (part->columns + part->block_columns - 1) / part->block_columns;
    int64_t down = (part->rows + part->block_rows - 1) / part->block_rows;
    int64_t column = index % across * part->block_columns;
    int64_t row = index / across % down * part->block_rows;
    int64_t outer = index / across / down;
    Block b = {part->target, part->source, 0, part->row_target, part->row_source,
               0, part->column_target, part->column_source};
    b.rows = af_min(part->block_rows, part->rows - row);
    b.columns = af_min(part->block_columns, part->columns - column);
    b.target += row * part->row_target + column * part->column_target;
    b.source += row * part->row_source + column * part->column_source;
    for (int64_t axis = part->num_outer - 1; axis >= 0; axis--) {
        int64_t place = outer % part->extents[axis];
        outer /= part->extents[axis];
        b.target += place * part->target_steps[axis];
        b.source += place * part->source_steps[axis];
    }
    move(part, &b);
}

static void move_chunk(void *arguments, int64_t chunk, int32_t worker) {
    (void)worker;
    const Phase *phase = arguments;
    int64_t block = chunk * phase->blocks_per_chunk;
    int64_t end = af_min(block + phase->blocks_per_chunk, phase->num_blocks);
    const Part *part = phase->parts;
    int64_t first = 0;
    for (; block < end; block++) {
        while (block - first >= part->num_blocks) first += part++->num_blocks;
        move_block(part, block - first);
    }
}

AF_EXPORT int32_t af_move(void *arguments) {
    Arguments *a = arguments;
    for (int64_t i = 0; i < a->num_phases; i++) {
        Phase *phase = &a->phases[i];
        int64_t size = phase->blocks_per_chunk, chunks = (phase->num_blocks + size - 1) / size;
        af_parallel(move_chunk, phase, chunks, (int32_t)a->max_workers);
    }
    return 0;
}
