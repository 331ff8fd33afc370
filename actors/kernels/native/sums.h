/* Sums of floats in an order that is written here, not left to the compiler.
 *
 * A compiler that vectorises a sum chooses its order, and a loop that it leaves alone adds up one
 * after the other, which loses 1e-3 of a million float32. Here 256 bytes of lanes add up stretches
 * of AF_STRETCH terms, a tree joins the lanes, and stretches are added in double: the same bits
 * with any compiler, level of optimisation and width of vectors. Terms of one sign lose at most
 * (AF_STRETCH / 64 - 1 + 6 + 1) 2^-24 = 6e-7 in float32 (Higham 1993, section 3).
 */
#ifndef AF_SUMS_H
#define AF_SUMS_H
#include "runtime.h"

#define AF_STRETCH 256

/* Not 64 where there are as many: compilers write 32 at a time, and a load of what two stores have
 * just written waits for both (layer norm's gradient of rows of 16 took 4 times as long). */
#if defined(__AVX__)
#define AF_VECTOR 32
#else
#define AF_VECTOR 16
#endif
#define AF_PARTS (64 / AF_VECTOR)

typedef int64_t af_mask_part __attribute__((vector_size(AF_VECTOR), aligned(1), may_alias));
typedef float af_part_float __attribute__((vector_size(AF_VECTOR), aligned(4), may_alias));
typedef double af_part_double __attribute__((vector_size(AF_VECTOR), aligned(8), may_alias));

/* 64 bytes from byte r on keep the last r bytes of 64. */
#define AF_ONES_8 255, 255, 255, 255, 255, 255, 255, 255
static const unsigned char af_tail_mask[128] __attribute__((unused)) = {
    [64] = AF_ONES_8, AF_ONES_8, AF_ONES_8, AF_ONES_8, AF_ONES_8, AF_ONES_8, AF_ONES_8, AF_ONES_8};

/* The sum of a vector, halves first: subscripts, which all compilers have, become shuffles. */
static inline float af_across_float(af_part_float v) {
    typedef float four __attribute__((vector_size(16)));
#if AF_VECTOR == 32
    four h = (four){v[0], v[1], v[2], v[3]} + (four){v[4], v[5], v[6], v[7]};
#else
    four h = v;
#endif
    return (h[0] + h[2]) + (h[1] + h[3]);
}

static inline double af_across_double(af_part_double v) {
    typedef double two __attribute__((vector_size(16)));
#if AF_VECTOR == 32
    two h = (two){v[0], v[1]} + (two){v[2], v[3]};
#else
    two h = v;
#endif
    return h[0] + h[1];
}

/* Units of 64 bytes go round four sets of lanes. What is left of a unit is read with the elements
 * before it, which a mask makes zeros: copying it would stall. A call of its own: a program has a
 * dozen of these, and the compiler took three times as long for a dozen copies. */
#define AF_SUM(NAME, T)                                                                      \
    static __attribute__((noinline, unused)) T af_units_##T(const T *x, int64_t count) {     \
        enum { UNIT = 64 / sizeof(T), PART = AF_VECTOR / sizeof(T) };                        \
        af_part_##T s[4 * AF_PARTS];                                                         \
        _Pragma("GCC unroll 16")                                                             \
        for (int k = 0; k < 4 * AF_PARTS; k++) s[k] = (af_part_##T){0};                      \
        int64_t i = 0;                                                                       \
        for (; i + 4 * UNIT <= count; i += 4 * UNIT)                                         \
            _Pragma("GCC unroll 16")                                                         \
            for (int k = 0; k < 4 * AF_PARTS; k++)                                           \
                s[k] += *(const af_part_##T *)(x + i + k * PART);                            \
        _Pragma("GCC unroll 4")                                                              \
        for (int u = 0; u < 4; u++) {                                                        \
            if (i >= count) break;                                                           \
            int64_t first = af_min(i, count - UNIT);                                         \
            const unsigned char *mask = af_tail_mask + af_min(count - i, UNIT) * sizeof(T);  \
            _Pragma("GCC unroll 4")                                                          \
            for (int k = 0; k < AF_PARTS; k++) {                                             \
                af_mask_part bits = *(const af_mask_part *)(x + first + k * PART);           \
                bits &= *(const af_mask_part *)(mask + k * AF_VECTOR);                       \
                s[u * AF_PARTS + k] += (af_part_##T)bits;                                    \
            }                                                                                \
            i += UNIT;                                                                       \
        }                                                                                    \
        _Pragma("GCC unroll 8")                                                              \
        for (int k = 0; k < 2 * AF_PARTS; k++) s[k] += s[k + 2 * AF_PARTS];                  \
        _Pragma("GCC unroll 4")                                                              \
        for (int width = AF_PARTS; width; width /= 2)                                        \
            _Pragma("GCC unroll 4")                                                          \
            for (int k = 0; k < width; k++) s[k] += s[k + width];                            \
        return af_across_##T(s[0]);                                                          \
    }                                                                                        \
    static inline T af_stretch_##T(const T *x, int64_t count) {                              \
        if (count >= (int64_t)(64 / sizeof(T))) return af_units_##T(x, count);               \
        T few = 0;                                                                           \
        for (int64_t i = 0; i < count; i++) few += x[i];                                     \
        return few;                                                                          \
    }                                                                                        \
    static inline __attribute__((unused)) double NAME(const T *x, int64_t count) {           \
        double total = 0;                                                                    \
        for (int64_t first = 0; first < count; first += AF_STRETCH)                          \
            total += af_stretch_##T(x + first, af_min(AF_STRETCH, count - first));           \
        return total;                                                                        \
    }
AF_SUM(af_sum_float, float)
AF_SUM(af_sum_double, double)

#endif
