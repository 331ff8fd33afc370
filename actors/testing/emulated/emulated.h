/* The words of kernel texts for a C compiler: see `device.cuh`, which includes this.
 *
 * A thread of a block is a fiber of `fibers.c`; blocks run one after the other. The place of the
 * thread that runs is in `af_here`, which a library gets before its first kernel.
 */
#ifndef AF_EMULATED_H
#define AF_EMULATED_H

#include <math.h>
#include <stdint.h>

typedef struct {
    int64_t block, num_blocks;
    int32_t thread, num_threads;
    void (*barrier)(int32_t line);
    const uint64_t *(*exchange)(uint64_t bits, int32_t line);
    void *(*shared)(int64_t size_bytes);
    void *(*shared_of_launch)(int64_t size_bytes);
    void (*misaligned)(void);
} af_machine;

#define AF_VISIBLE __attribute__((visibility("default")))

static af_machine *af_here;
AF_VISIBLE void af_enter(af_machine *machine) { af_here = machine; }

#define AF_KERNEL static void
#define AF_KERNEL_UP_TO(threads) static void
#define AF_KERNEL_TWO_UP_TO(threads) static void
#define AF_ARGUMENTS(name) const name##_arguments
#define AF_FUNCTION static inline __attribute__((unused))
#define AF_SELDOM static __attribute__((unused))

/* After the text: how a kernel is called, and how many words it reads. */
#define AF_ENTRY(name)                                                              \
    AF_VISIBLE const int64_t af_words_of_##name = sizeof(name##_arguments) / 8;     \
    AF_VISIBLE void af_call_##name(const void *words) {                             \
        name(*(const name##_arguments *)words);                                     \
    }

#define AF_BLOCK (af_here->block)
#define AF_NUM_BLOCKS (af_here->num_blocks)
#define AF_THREAD (af_here->thread)
#define AF_NUM_THREADS (af_here->num_threads)

/* Each thread comes by all of them before it meets another: so all get the same addresses. */
#define AF_SHARED(type, name, count) \
    type *const name = (type *)af_here->shared((int64_t)sizeof(type) * (count))

#define AF_SHARED_OF_LAUNCH(type, name, count) \
    type *const name = (type *)af_here->shared_of_launch((int64_t)sizeof(type) * (count))

/* Where threads meet: the line, or in a function that has a parameter of this name, that of its
 * caller. */
enum { af_site = 0 };
#define AF_SITE (af_site ? af_site : __LINE__)
#define AF_BARRIER() af_here->barrier(AF_SITE)

typedef union {
    uint64_t bits;
    int32_t i32;
    int64_t i64;
    float f32;
    double f64;
} af_slot;

#define AF_SHUFFLE_OF(type, field)                                                              \
    AF_FUNCTION type af_shuffle_##field(type x, int32_t mask, int32_t line) {                   \
        af_slot slot = {0};                                                                     \
        slot.field = x;                                                                         \
        slot.bits = af_here->exchange(slot.bits, line)[(af_here->thread ^ mask) & 31];          \
        return slot.field;                                                                      \
    }
AF_SHUFFLE_OF(int32_t, i32)
AF_SHUFFLE_OF(int64_t, i64)
AF_SHUFFLE_OF(float, f32)
AF_SHUFFLE_OF(double, f64)
#define AF_SHUFFLE_XOR_I32(x, mask) af_shuffle_i32((int32_t)(x), mask, __LINE__)
#define AF_SHUFFLE_XOR_I64(x, mask) af_shuffle_i64((int64_t)(x), mask, __LINE__)
#define AF_SHUFFLE_XOR_F32(x, mask) af_shuffle_f32((float)(x), mask, __LINE__)
#define AF_SHUFFLE_XOR_F64(x, mask) af_shuffle_f64((double)(x), mask, __LINE__)

/* What each thread of the warp gave, in their order; it stands until two exchanges later. */
#define AF_EXCHANGE_ALL(bits) af_here->exchange(bits, AF_SITE)

#define AF_WARP_BARRIER() ((void)AF_EXCHANGE_ALL(0))
AF_FUNCTION uint32_t af_equal_in_warp(uint32_t x, int32_t line) {
    const uint64_t *all = af_here->exchange(x, line);
    uint32_t mask = 0;
    for (int32_t i = 0; i < 32; i++) mask |= (uint32_t)((uint32_t)all[i] == x) << i;
    return mask;
}
#define AF_EQUAL_IN_WARP(x) af_equal_in_warp((uint32_t)(x), AF_SITE)
#define AF_COUNT_BITS(mask) __builtin_popcount(mask)

/* The tree of shuffles by which threads of a warp reduce, from one meeting: a switch costs more than
 * a whole tree. In its own order each thread joins what shuffles would have brought. */
#define AF_IN_WARP(type, bits, SHUFFLE, JOIN, x, width)                                         \
    if ((width) > 1) {                                                                          \
        uint64_t given = 0;                                                                     \
        type tree[32];                                                                          \
        __builtin_memcpy(&given, &x, sizeof x);                                                 \
        const uint64_t *all = AF_EXCHANGE_ALL(given);                                           \
        for (int32_t i = 0; i < (width); i++)                                                   \
            __builtin_memcpy(&tree[i], &all[(AF_THREAD & 31) ^ i], sizeof x);                   \
        for (int32_t mask = (width) / 2; mask; mask >>= 1)                                      \
            for (int32_t i = 0; i < mask; i++) tree[i] = JOIN(tree[i], tree[i + mask]);         \
        x = tree[0];                                                                            \
    }

/* One thread runs at a time: nothing comes between. */
AF_FUNCTION int32_t af_atomic_add_i32(int32_t *place, int32_t x) {
    const int32_t was = *place;
    *place = (int32_t)((uint32_t)was + (uint32_t)x);
    return was;
}
AF_FUNCTION int32_t af_atomic_cas_i32(int32_t *place, int32_t expected, int32_t x) {
    const int32_t was = *place;
    if (was == expected) *place = x;
    return was;
}
#define AF_ATOMIC_ADD_I32(place, x) af_atomic_add_i32((int32_t *)(place), (int32_t)(x))
#define AF_ATOMIC_CAS_I32(place, expected, x) \
    af_atomic_cas_i32((int32_t *)(place), expected, x)
#define AF_FENCE() ((void)0)
#define AF_UNROLL
#define AF_ROLLED
#define AF_TWICE
#define AF_FOUR_TIMES
#define AF_FORGET(x) ((void)0)

/* What a processor of hosts does with an odd address depends on the instruction: it gets an even
 * one, among the same bytes, and the launch is in trouble. */
AF_FUNCTION void *af_aligned(const void *place, int64_t size_bytes) {
    const uintptr_t beside = (uintptr_t)place % (uintptr_t)size_bytes;
    if (beside) af_here->misaligned();
    return (void *)((uintptr_t)place - beside);
}
#define AF_ALIGNED(place, size_bytes) af_aligned(place, (int64_t)(size_bytes))

AF_FUNCTION uint32_t af_bits_of_float(float x) { return ((union { float f; uint32_t u; }){x}).u; }
AF_FUNCTION float af_float_of_bits(uint32_t u) { return ((union { uint32_t u; float f; }){u}).f; }
AF_FUNCTION uint64_t af_bits_of_double(double x) {
    return ((union { double d; uint64_t u; }){x}).u;
}
AF_FUNCTION double af_double_of_bits(uint64_t u) {
    return ((union { uint64_t u; double d; }){u}).d;
}
#define AF_LARGER_F32(a, b) ((a) > (b) || (a) != (a) ? (a) : (b))
#define AF_SMALLER_F32(a, b) ((a) < (b) || (a) != (a) ? (a) : (b))
AF_FUNCTION float af_reciprocalf(float x) { return 1.0f / x; }
/* Rounded to the nearest, ties to even; NaN stays NaN. */
AF_FUNCTION uint16_t af_to_bf16(float x) {
    const uint32_t bits = af_bits_of_float(x);
    const uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
    return (uint16_t)((x != x ? bits | 0x400000u : rounded) >> 16);
}
AF_FUNCTION uint64_t af_mul_high(uint64_t a, uint64_t b) {
    return (uint64_t)(((unsigned __int128)a * b) >> 64);
}

/* Tensor cores. What a thread gives lies where it stays until two meetings later. */
AF_FUNCTION float af_from_f16(uint16_t bits);
AF_FUNCTION uint16_t af_to_f16(float x);
typedef struct {
    float a[4][2], b[2][2];
} af_fragments;
static struct {
    uint32_t turn;
    af_fragments fragments[2];
} af_given[1024];

AF_FUNCTION void af_multiply(
    float *c, const uint32_t *a, uint32_t b0, uint32_t b1, _Bool is_f16, int32_t line
) {
    const int32_t lane = AF_THREAD & 31, g = lane / 4, t = lane % 4;
    af_fragments *mine = &af_given[AF_THREAD].fragments[af_given[AF_THREAD].turn++ & 1];
    for (int32_t i = 0; i < 6; i++) {
        const uint32_t word = i < 4 ? a[i] : i == 4 ? b0 : b1;
        float *pair = i < 4 ? mine->a[i] : mine->b[i - 4];
        for (int32_t j = 0; j < 2; j++) {
            const uint16_t bits = (uint16_t)(word >> 16 * j);
            pair[j] = is_f16 ? af_from_f16(bits) : af_float_of_bits((uint32_t)bits << 16);
        }
    }
    const uint64_t *all = af_here->exchange((uint64_t)(uintptr_t)mine, line);
    for (int32_t s = 0; s < 4; s++) {
        const af_fragments *left = (const af_fragments *)(uintptr_t)all[4 * g + s];
        for (int32_t column = 0; column < 2; column++) {
            const af_fragments *right =
                (const af_fragments *)(uintptr_t)all[4 * (2 * t + column) + s];
            for (int32_t row = 0; row < 2; row++) {
                const float *near = left->a[row], *far = left->a[row + 2];
                c[2 * row + column] += near[0] * right->b[0][0] + near[1] * right->b[0][1] +
                                       (far[0] * right->b[1][0] + far[1] * right->b[1][1]);
            }
        }
    }
}
#define AF_MULTIPLY_BF16(c, a, b0, b1) af_multiply(c, a, b0, b1, 0, AF_SITE)
#define AF_MULTIPLY_F16(c, a, b0, b1) af_multiply(c, a, b0, b1, 1, AF_SITE)

AF_FUNCTION void af_matrices(uint32_t *x, const void *row, _Bool is_turned, int32_t line) {
    const int32_t lane = AF_THREAD & 31, g = lane / 4, t = lane % 4;
    const void *place = af_aligned(row, 16);
    const uint64_t *all = af_here->exchange((uint64_t)(uintptr_t)place, line);
    for (int32_t m = 0; m < 4; m++) {
        uint16_t pair[2];
        for (int32_t i = 0; i < 2; i++) {
            const uintptr_t from = (uintptr_t)all[8 * m + (is_turned ? 2 * t + i : g)];
            pair[i] = ((const uint16_t *)from)[is_turned ? g : 2 * t + i];
        }
        x[m] = (uint32_t)pair[1] << 16 | pair[0];
    }
}
#define AF_MATRICES(x, row) af_matrices(x, row, 0, AF_SITE)
#define AF_TURNED_MATRICES(x, row) af_matrices(x, row, 1, AF_SITE)

/* Copies are done when their thread waits for them, and until then there is garbage. */
enum { AF_MOST_COPIES = 96 };
static struct {
    int64_t block;
    int32_t count;
    struct {
        void *to;
        const void *from;
    } copies[AF_MOST_COPIES];
} af_asked[1024];

AF_FUNCTION void af_copied(void) {
    for (int32_t i = 0; i < af_asked[AF_THREAD].count; i++) {
        void *to = af_asked[AF_THREAD].copies[i].to;
        const void *from = af_asked[AF_THREAD].copies[i].from;
        if (from) __builtin_memcpy(to, from, 16);
        else __builtin_memset(to, 0, 16);
    }
    af_asked[AF_THREAD].count = 0;
}
AF_FUNCTION void af_copy_16(void *shared, const void *from, _Bool is_there) {
    const int32_t thread = AF_THREAD;
    shared = af_aligned(shared, 16), from = af_aligned(from, 16);
    if (af_asked[thread].block != AF_BLOCK) af_asked[thread].count = 0;
    if (af_asked[thread].count == AF_MOST_COPIES) af_copied();
    const int32_t i = af_asked[thread].count++;
    af_asked[thread].block = AF_BLOCK;
    af_asked[thread].copies[i].to = shared;
    af_asked[thread].copies[i].from = is_there ? from : 0;
    __builtin_memset(shared, 0xFF, 16);
}
#define AF_COPY_16(shared, from, is_there) af_copy_16(shared, from, is_there)
#define AF_COPIED() af_copied()

AF_FUNCTION uint32_t AF_PAIR_BF16(float low, float high) {
    return (uint32_t)af_to_bf16(high) << 16 | af_to_bf16(low);
}
AF_FUNCTION uint32_t AF_PAIR_F16(float low, float high) {
    return (uint32_t)af_to_f16(high) << 16 | af_to_f16(low);
}
AF_FUNCTION float af_power_of_2(float x) {
    const float y = exp2f(x);
    return y < 0x1p-126f ? 0.0f : y;
}

#endif
