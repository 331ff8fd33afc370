/* Ranks of one host meet in shared memory, and move tensors while all are there.
 *
 * A rank arrives by writing what it came to into its own line, and by counting itself in a word of the
 * group. The last one wakes all others, which look at that word for a while and then sleep on it. The
 * lowest bit of the word says that the run is given up, so that who is about to sleep does not: the
 * word is no longer what it was.
 *
 * An operand of few bytes is copied aside before the arrival, and read there by all afterwards: one
 * arrival is enough. The place aside is one of two in turn. Who writes it again has come to a later
 * arrival than the one between, and all have read by then. Larger operands are worked on where they
 * lie, between an arrival that says that they are there and one that says that all is done.
 *
 * Every element of a sum is added in one order, a binary tree over the places of a group, halves in
 * float32. So all ranks have the same bits whoever adds; and a host can add what its own ranks have
 * below one node of the tree before anything crosses to another host, with these bits, too.
 */
#define _GNU_SOURCE
#include "af_math.h"
#include "waiting.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define SLICE_NS 50000000LL /* how often a sleeper looks whether the others live */
#define LOOK_NS 20000       /* about as long as a sleeping thread takes to wake */
#define MAX_BLIND 64        /* arrivals at which who looked in vain sleeps at once */

enum { DONE, ABORTED, TIMED_OUT, PEER_EXITED, WRONG_COLLECTIVE, WRONG_FIRING, WAITING }; /* with the rank in the upper bits */

/* What a rank says of itself, in a lane. `arrivals` is used of a group's first rank. */
typedef struct {
    _Alignas(64) _Atomic uint32_t arrivals; /* twice the number; 1 more where the run is given up */
    _Alignas(64) _Atomic uint64_t arrived;
    struct {
        uint64_t digest, firing, row;
    } came_to[2]; /* in turn: others may be at the next arrival while someone looks at this one */
} af_line;

typedef struct {
    int64_t num_ranks, own, deadline_ns, staging_bytes;
    uint64_t num_arrivals, num_blind, next_look; /* see `comes_soon` */
    af_line *const *lines;
    char *const *staging;     /* of each rank: two places aside */
    const int32_t *processes; /* a pidfd of each rank, -1 for one in this process */
    uint64_t waited_ns;       /* for others so far; looks that were not in vain left out */
} af_group;

/* Blocks of bytes in two arrays: three loops around a run. */
typedef struct {
    int64_t extents[3], from_strides[3], to_strides[3];
    int64_t from_offset, to_offset, run_bytes;
} af_region;

enum { ALL_REDUCE, REDUCE_SCATTER, MOVE, TRANSFER }; /* the last from the first rank to the other */
enum { BY_SUM, BY_MAX, BY_MIN };

typedef struct {
    af_group *group;
    uint64_t digest, *firings;
    int64_t op, dtype, by, itemsize, num_elements, is_aside, input_bytes, row;
    char *input, *output;
    char *const *const *inputs_of;  /* of each rank, by row: the operand that others read */
    char *const *const *outputs_of; /* and what they write */
    const af_region *regions;       /* of MOVE one per rank, else one */
    const int32_t *order;           /* of a sum: see `af_reduce` */
} af_meeting;

/* -- arriving ---------------------------------------------------------------------------------- */

static void wake_all(_Atomic uint32_t *word) {
    syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

static int32_t status_of(int32_t kind, int64_t rank) { return kind | (int32_t)(rank << 8); }

static int is_there(uint32_t arrivals, uint32_t wanted) {
    return (int32_t)((arrivals & ~1u) - wanted) >= 0;
}

/* Who has not come, of those that ended (PEER_EXITED), else the first (TIMED_OUT); WAITING for one that may
 * still come. DONE where all have: one that ended, or was stopped, before it was counted has come, too. */
static int32_t missing(const af_group *g, int is_late) {
    int64_t first = -1;
    for (int64_t i = 0; i < g->num_ranks; i++) {
        if (atomic_load(&g->lines[i]->arrived) >= g->num_arrivals) continue;
        struct pollfd process = {.fd = g->processes[i], .events = POLLIN};
        if (process.fd >= 0 && poll(&process, 1, 0) > 0) return status_of(PEER_EXITED, i);
        if (first < 0) first = i;
    }
    if (first < 0) return DONE;
    return is_late ? status_of(TIMED_OUT, first) : WAITING;
}

/* Looks for the others before the caller sleeps: ranks that share the work come to within less than
 * sleeping and being woken take, and so the looks cost no more than sleep would. Who looked in vain
 * sleeps at once at the next arrivals, at twice as many each time: with more ranks than cores it may
 * be the looks that keep the others from coming. */
static int comes_soon(af_group *g, _Atomic uint32_t *word, uint32_t wanted) {
    if (g->num_arrivals < g->next_look) return 0;
    const int64_t end_ns = now_ns() + LOOK_NS;
    do {
        for (int i = 0; i < 16; i++, relax()) {
            const uint32_t seen = atomic_load(word);
            if (is_there(seen, wanted)) {
                g->num_blind = 0;
                return 1;
            }
            if (seen & 1) return 0;
        }
    } while (now_ns() < end_ns);
    g->num_blind = g->num_blind ? 2 * g->num_blind : 1;
    if (g->num_blind > MAX_BLIND) g->num_blind = MAX_BLIND;
    g->next_look = g->num_arrivals + 1 + g->num_blind;
    g->waited_ns += LOOK_NS;
    return 0;
}

static int32_t sleep_until(af_group *g, _Atomic uint32_t *word, uint32_t wanted) {
    int64_t waited_ns = 0, looked_ns = 0;
    for (;;) {
        const uint32_t seen = atomic_load(word);
        /* First: who comes to it late has met whom the others have met, whatever came of them since. */
        if (is_there(seen, wanted)) return DONE;
        if (seen & 1) return ABORTED;
        if (waited_ns - looked_ns >= SLICE_NS || waited_ns >= g->deadline_ns) {
            const int32_t status = missing(g, waited_ns >= g->deadline_ns);
            const uint32_t now = atomic_load(word);
            if (is_there(now, wanted)) return DONE;
            if (now & 1) return ABORTED;
            if (status != WAITING) return status;
            looked_ns = waited_ns;
        }
        const int64_t begin = now_ns(), left_ns = g->deadline_ns - waited_ns;
        const struct timespec slice = {0, (long)(left_ns < SLICE_NS ? left_ns : SLICE_NS)};
        syscall(SYS_futex, word, FUTEX_WAIT, seen, &slice, NULL, 0);
        /* Who was stopped itself has waited no longer than it was awake. */
        int64_t slept_ns = now_ns() - begin;
        if (slept_ns > 2 * SLICE_NS) slept_ns = 2 * SLICE_NS;
        waited_ns += slept_ns;
        g->waited_ns += (uint64_t)slept_ns;
    }
}

/* Waits for all ranks of the group, and checks that they came for the same. */
static int32_t arrive(const af_meeting *m) {
    af_group *g = m->group;
    af_line *own = g->lines[g->own];
    _Atomic uint32_t *word = &g->lines[0]->arrivals;
    const int turn = (int)(++g->num_arrivals & 1);
    own->came_to[turn].digest = m->digest;
    own->came_to[turn].firing = *m->firings;
    own->came_to[turn].row = (uint64_t)m->row;
    atomic_store_explicit(&own->arrived, g->num_arrivals, memory_order_release);
    const uint32_t wanted = (uint32_t)(2 * g->num_arrivals * (uint64_t)g->num_ranks);
    /* Nobody is counted once the run is given up: what is complete was so for all ranks, before. */
    uint32_t seen = atomic_load(word);
    do {
        if (seen & 1) return ABORTED;
    } while (!atomic_compare_exchange_weak(word, &seen, seen + 2));
    if (is_there(seen + 2, wanted)) {
        wake_all(word);
    } else if (!comes_soon(g, word, wanted)) {
        const int32_t status = sleep_until(g, word, wanted);
        if (status) return status;
    }
    for (int64_t rank = 0; rank < g->num_ranks; rank++) {
        const af_line *line = g->lines[rank];
        if (line->came_to[turn].digest != m->digest) return status_of(WRONG_COLLECTIVE, rank);
        if (line->came_to[turn].firing != *m->firings) return status_of(WRONG_FIRING, rank);
    }
    return DONE;
}

/* -- reducing ---------------------------------------------------------------------------------- */

/* Elements: what has been added so far stays in the nearest cache. Copies of more than 2 KB are made by
 * another instruction, which takes half as long again. */
#define BLOCK 512

/* `order` is a sum over `from` as the steps of a stack of blocks: a number puts that operand on top, with
 * AS_SUM one that is a sum already, not rounded yet; JOIN adds the top to what lies below it; END ends it.
 * It leaves the sum in all of `to`; with `num_to` 0 in the first, in the type that is added. */
enum { END = -2, JOIN = -1, AS_SUM = 1 << 16 };
#define MAX_DEPTH 19 /* of a tree over 2^16 places, and two */

typedef void (*af_reduce)(char *const *to, int64_t num_to, char *const *from, const int32_t *order,
                          int64_t count, int64_t by);

#define EVERY(EXPRESSION)                                     \
    _Pragma("omp simd") for (int64_t i = 0; i < count; i++) { \
        EXPRESSION;                                           \
    }

/* As numpy's maximum: NaN where one is NaN. */
#define LARGER(a, b) ((a) >= (b) || (a) != (a) ? (a) : (b))
#define SMALLER(a, b) ((a) <= (b) || (a) != (a) ? (a) : (b))
#define SAME(x) (x)

#define LINE 64    /* bytes */
#define AHEAD 4096 /* bytes that are fetched before they are added */

/* The sum of two ranks, for one of them or both: one pass takes half as long as a sum by blocks. */
#define SUM_OF_TWO(NAME, T, READ, WRITE, ADD)                                                  \
    static void NAME(char *const *to, int64_t num_to, char *const *from,                       \
                     int64_t num_elements) {                                                   \
        enum { COUNT = LINE / sizeof(T) };                                                     \
        const T *x = (const T *)from[0], *y = (const T *)from[1];                              \
        T *first = (T *)to[0], *second = (T *)to[num_to - 1], line[COUNT];                     \
        int64_t start = 0;                                                                     \
        for (; start + COUNT <= num_elements; start += COUNT) {                                \
            __builtin_prefetch((const char *)(x + start) + AHEAD);                             \
            __builtin_prefetch((const char *)(y + start) + AHEAD);                             \
            _Pragma("omp simd") for (int64_t i = 0; i < COUNT; i++)                            \
                line[i] = WRITE(ADD(READ(x[start + i]), READ(y[start + i])));                  \
            memcpy(first + start, line, LINE);                                                 \
            if (num_to > 1) memcpy(second + start, line, LINE);                                \
        }                                                                                      \
        for (; start < num_elements; start++)                                                  \
            first[start] = second[start] = WRITE(ADD(READ(x[start]), READ(y[start])));         \
    }

static int is_of_two(const int32_t *order) {
    return order[0] == 0 && order[1] == 1 && order[2] == JOIN && order[3] == END;
}

/* Two operands that meet first are added as they are read, and so is one that joins what is there; of
 * extremes, which are rare, each is put on top first. */
#define REDUCE(NAME, T, SUM_T, READ, WRITE, ADD, MAX, MIN)                                       \
    SUM_OF_TWO(NAME##_of_two, T, READ, WRITE, ADD)                                               \
    static void NAME(char *const *to, int64_t num_to, char *const *from, const int32_t *order,   \
                     int64_t num_elements, int64_t by) {                                         \
        if ((num_to == 1 || num_to == 2) && by == BY_SUM && is_of_two(order)) {                  \
            NAME##_of_two(to, num_to, from, num_elements);                                       \
            return;                                                                              \
        }                                                                                        \
        SUM_T sums[MAX_DEPTH][BLOCK];                                                            \
        for (int64_t start = 0; start < num_elements; start += BLOCK) {                          \
            const int64_t left = num_elements - start, count = left < BLOCK ? left : BLOCK;      \
            SUM_T *top = sums[0]; /* an operand goes above it */                                 \
            for (const int32_t *step = order; *step != END; step++) {                            \
                const SUM_T *joins = top;                                                        \
                const int is_last = step[1] == JOIN, is_sum = by == BY_SUM;                      \
                if (*step == JOIN) {                                                             \
                    top -= BLOCK;                                                                \
                } else if (*step & AS_SUM) {                                                     \
                    joins = (const SUM_T *)from[*step & (AS_SUM - 1)] + start;                   \
                    if (!is_last) {                                                              \
                        top += BLOCK;                                                            \
                        memcpy(top, joins, (size_t)count * sizeof(SUM_T));                       \
                        continue;                                                                \
                    }                                                                            \
                    step++;                                                                      \
                } else {                                                                         \
                    const T *x = (const T *)from[*step] + start;                                 \
                    if (is_sum && is_last) {                                                     \
                        EVERY(top[i] = ADD(top[i], READ(x[i])))                                  \
                        step++;                                                                  \
                    } else if (is_sum && step[1] >= 0 && step[1] < AS_SUM && step[2] == JOIN) {  \
                        const T *y = (const T *)from[step[1]] + start;                           \
                        top += BLOCK;                                                            \
                        EVERY(top[i] = ADD(READ(x[i]), READ(y[i])))                              \
                        step += 2;                                                               \
                    } else {                                                                     \
                        top += BLOCK;                                                            \
                        EVERY(top[i] = READ(x[i]))                                               \
                    }                                                                            \
                    continue;                                                                    \
                }                                                                                \
                switch (by) {                                                                    \
                case BY_MAX: EVERY(SUM_T y = joins[i]; top[i] = MAX(top[i], y)) break;           \
                case BY_MIN: EVERY(SUM_T y = joins[i]; top[i] = MIN(top[i], y)) break;           \
                default: EVERY(top[i] = ADD(top[i], joins[i]))                                   \
                }                                                                                \
            }                                                                                    \
            if (!num_to) {                                                                       \
                memcpy((SUM_T *)to[0] + start, top, (size_t)count * sizeof(SUM_T));              \
                continue;                                                                        \
            }                                                                                    \
            T *first = (T *)to[0] + start;                                                       \
            EVERY(first[i] = WRITE(top[i]))                                                      \
            for (int64_t rank = 1; rank < num_to; rank++)                                        \
                memcpy((T *)to[rank] + start, first, (size_t)count * sizeof(T));                 \
        }                                                                                        \
    }

#define ADD(a, b) ((a) + (b))
#define OR(a, b) ((a) | (b))
#define AND(a, b) ((a) & (b))

REDUCE(reduce_f64, double, double, SAME, SAME, ADD, LARGER, SMALLER)
REDUCE(reduce_f32, float, float, SAME, SAME, ADD, LARGER, SMALLER)
REDUCE(reduce_f16, uint16_t, float, af_from_f16, af_to_f16, ADD, LARGER, SMALLER)
REDUCE(reduce_bf16, uint16_t, float, af_from_bf16, af_to_bf16, ADD, LARGER, SMALLER)
REDUCE(reduce_bool, uint8_t, uint8_t, SAME, SAME, OR, OR, AND)

/* Sums of integers wrap around; in C only those of unsigned ones may. */
#define INTEGERS(BITS)                                                                           \
    static inline int##BITS##_t add_##BITS(int##BITS##_t a, int##BITS##_t b) {                   \
        return (int##BITS##_t)((uint##BITS##_t)a + (uint##BITS##_t)b);                           \
    }                                                                                            \
    REDUCE(reduce_i##BITS, int##BITS##_t, int##BITS##_t, SAME, SAME, add_##BITS, LARGER, SMALLER) \
    REDUCE(reduce_u##BITS, uint##BITS##_t, uint##BITS##_t, SAME, SAME, ADD, LARGER, SMALLER)

INTEGERS(64)
INTEGERS(32)
INTEGERS(16)
INTEGERS(8)

/* In the order of `DTYPES` in segments.py. */
static const af_reduce reductions[] = {
    reduce_f64, reduce_f32, reduce_f16, reduce_bf16, reduce_i64, reduce_i32, reduce_i16,
    reduce_i8,  reduce_u64, reduce_u32, reduce_u16,  reduce_u8,  reduce_bool,
};

/* -- moving ------------------------------------------------------------------------------------ */

#define MAX_RANKS 256

static void copy_region(char *to, const char *from, const af_region *r) {
    to += r->to_offset, from += r->from_offset;
    if (to == from || !r->run_bytes) return;
    for (int64_t i = 0; i < r->extents[0]; i++)
        for (int64_t j = 0; j < r->extents[1]; j++)
            for (int64_t k = 0; k < r->extents[2]; k++)
                memcpy(to + i * r->to_strides[0] + j * r->to_strides[1] + k * r->to_strides[2],
                       from + i * r->from_strides[0] + j * r->from_strides[1] +
                           k * r->from_strides[2],
                       (size_t)r->run_bytes);
}

static void reduce_region(const af_meeting *m, char *const *from, const af_region *r) {
    const int64_t num_ranks = m->group->num_ranks;
    char *rows[MAX_RANKS];
    for (int64_t i = 0; i < r->extents[0]; i++) {
        for (int64_t rank = 0; rank < num_ranks; rank++)
            rows[rank] = from[rank] + r->from_offset + i * r->from_strides[0];
        char *to = m->output + r->to_offset + i * r->to_strides[0];
        reductions[m->dtype](&to, 1, rows, m->order, r->run_bytes / m->itemsize, m->by);
    }
}

/* Waits until the operands of all are there, and returns where: `from` is what each rank gives, `to` what
 * it is left; of operands aside only the own place in `to`. */
EXPORT int32_t af_begin(const af_meeting *m, char **from, char **to) {
    af_group *g = m->group;
    if (m->is_aside) {
        for (int64_t rank = 0; rank < g->num_ranks; rank++)
            from[rank] = g->staging[rank] + ((g->num_arrivals + 1) & 1) * g->staging_bytes;
        to[g->own] = m->output;
        if (m->input_bytes) memcpy(from[g->own], m->input, (size_t)m->input_bytes);
        return arrive(m);
    }
    const int32_t status = arrive(m);
    if (status) return status;
    const int turn = (int)(g->num_arrivals & 1);
    for (int64_t rank = 0; rank < g->num_ranks; rank++) {
        const uint64_t row = g->lines[rank]->came_to[turn].row;
        from[rank] = m->inputs_of[rank][row];
        to[rank] = m->outputs_of[rank][row];
    }
    /* What others do not work on may lie in private memory, where they have no address of it. */
    from[g->own] = m->input;
    to[g->own] = m->output;
    return DONE;
}

/* Waits until all have done what they do between the two; from then on this firing is over. */
EXPORT int32_t af_end(const af_meeting *m) {
    const int32_t status = m->is_aside ? DONE : arrive(m);
    if (!status) ++*m->firings;
    return status;
}

static void work_aside(const af_meeting *m, char *const *from, char *to) {
    const af_group *g = m->group;
    if (m->op == ALL_REDUCE)
        reductions[m->dtype](&to, 1, from, m->order, m->num_elements, m->by);
    else if (m->op == REDUCE_SCATTER)
        reduce_region(m, from, m->regions);
    else if (m->op == TRANSFER) {
        if (g->own) copy_region(to, from[0], m->regions);
    } else
        for (int64_t rank = 0; rank < g->num_ranks; rank++)
            copy_region(to, from[rank], &m->regions[rank]);
}

/* Each rank has reduced a part of all elements, and writes it to all. */
static void reduce_share(const af_meeting *m, char **from, char **to) {
    const af_group *g = m->group;
    const int64_t n = m->num_elements, begin = n * g->own / g->num_ranks,
                  end = n * (g->own + 1) / g->num_ranks;
    for (int64_t rank = 0; rank < g->num_ranks; rank++) {
        from[rank] += begin * m->itemsize;
        to[rank] += begin * m->itemsize;
    }
    reductions[m->dtype](to, g->num_ranks, from, m->order, end - begin, m->by);
}

static void work_in_place(const af_meeting *m, char **from, char **to) {
    const af_group *g = m->group;
    if (m->op == ALL_REDUCE)
        reduce_share(m, from, to);
    else if (m->op == REDUCE_SCATTER)
        reduce_region(m, from, m->regions);
    else if (m->op == TRANSFER) {
        if (!g->own) copy_region(to[1], m->input, m->regions);
    } else
        for (int64_t step = 0; step < g->num_ranks; step++) {
            const int64_t rank = (g->own + step) % g->num_ranks; /* not all write to one first */
            copy_region(to[rank], m->input, &m->regions[rank]);
        }
}

/* One firing of a collective. Returns 0, or what went wrong with the rank that is at fault. */
EXPORT int32_t af_meet(const af_meeting *m) {
    char *from[MAX_RANKS], *to[MAX_RANKS];
    const int32_t status = af_begin(m, from, to);
    if (status) return status;
    if (m->is_aside)
        work_aside(m, from, m->output);
    else
        work_in_place(m, from, to);
    return af_end(m);
}

/* -- between hosts ------------------------------------------------------------------------------- */

#define MAX_SOURCES 1024

/* A sum that is made piece by piece, of rows that lie apart: elements are numbered as if they did not. */
typedef struct {
    int64_t dtype, by, itemsize, sum_size, num_sources, num_to; /* no `num_to`: see `af_reduce` */
    int64_t run, from_offset, from_stride, to_offset, to_stride; /* elements of a row, then bytes */
    int64_t is_packed; /* what is made of a piece begins where `to` is */
    const int32_t *order;
    const int64_t *packed; /* by source: bytes of an element where a piece begins at `from`, else 0 */
} af_part;

EXPORT void af_sum(const af_part *p, char *const *from, char *const *to, int64_t begin,
                   int64_t end) {
    char *sources[MAX_SOURCES], *targets[MAX_RANKS];
    for (int64_t i = begin; i < end;) {
        const int64_t row = i / p->run, column = i % p->run;
        const int64_t left = p->run - column, count = left < end - i ? left : end - i;
        const int64_t in_row = column * p->itemsize;
        for (int64_t n = 0; n < p->num_sources; n++)
            sources[n] = from[n] + (p->packed[n] ? (i - begin) * p->packed[n]
                                                 : p->from_offset + row * p->from_stride + in_row);
        for (int64_t n = 0; n < (p->num_to ? p->num_to : 1); n++)
            targets[n] = to[n] + (p->is_packed
                                      ? (i - begin) * (p->num_to ? p->itemsize : p->sum_size)
                                      : p->to_offset + row * p->to_stride + in_row);
        reductions[p->dtype](targets, p->num_to, sources, p->order, count, p->by);
        i += count;
    }
}

EXPORT void af_copy(char *to, const char *from, const af_region *r) { copy_region(to, from, r); }

/* Wakes who sleeps at a line of a first rank, for good. */
EXPORT void af_give_up(af_line *line) {
    atomic_fetch_or(&line->arrivals, 1);
    wake_all(&line->arrivals);
}

/* Leaves a mark where there is none; returns the one that is there. */
EXPORT uint32_t af_mark(_Atomic uint32_t *word, uint32_t mark) {
    uint32_t none = 0;
    return atomic_compare_exchange_strong(word, &none, mark) ? mark : none;
}
