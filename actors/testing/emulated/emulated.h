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

#endif
