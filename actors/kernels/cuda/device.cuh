/* The words of all kernel texts: one meaning for NVRTC, another where threads are emulated.
 *
 * A text is C and CUDA C++ at once: no templates, no overloads, no references; pointers are cast. A
 * kernel has one argument, an array of 64-bit words passed by value; its grid and its blocks have
 * one dimension. A warp has 32 threads, and blocks are whole warps.
 */
#ifndef AF_DEVICE_CUH
#define AF_DEVICE_CUH

#ifdef AF_EMULATED
#include "emulated.h"
#else

typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long long int64_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
#define _Bool bool
#define INT8_MIN (-128)
#define INT8_MAX 127
#define INT16_MIN (-32768)
#define INT16_MAX 32767
#define INT32_MIN (-2147483647 - 1)
#define INT32_MAX 2147483647
#define INT64_MIN (-9223372036854775807LL - 1)
#define INT64_MAX 9223372036854775807LL
#define UINT8_MAX 255
#define UINT16_MAX 65535
#define UINT32_MAX 4294967295u
#define UINT64_MAX 18446744073709551615ull
#define INFINITY __int_as_float(0x7f800000)
#define NAN __int_as_float(0x7fffffff)

#define AF_KERNEL extern "C" __global__ void
/* A kernel whose blocks have at most so many threads, which share the registers. */
#define AF_KERNEL_UP_TO(threads) extern "C" __global__ void __launch_bounds__(threads, 1)
/* One of which two blocks share them. */
#define AF_KERNEL_TWO_UP_TO(threads) extern "C" __global__ void __launch_bounds__(threads, 2)
#define AF_ARGUMENTS(name) const __grid_constant__ name##_arguments
#define AF_FUNCTION static __device__ __forceinline__
/* Not inlined, so that its callers keep no registers for it. */
#define AF_SELDOM static __device__ __noinline__

/* Where a thread is. */
#define AF_BLOCK ((int64_t)blockIdx.x)
#define AF_NUM_BLOCKS ((int64_t)gridDim.x)
#define AF_THREAD ((int32_t)threadIdx.x)
#define AF_NUM_THREADS ((int32_t)blockDim.x)

/* Threads of a block meet: all of them pass a barrier, all of a warp a shuffle. Shared memory means
 * nothing before it is written. */
#define AF_SHARED(type, name, count) __shared__ __align__(16) type name[count]
/* Shared memory of a size that a launch says, and a text only where it is emulated. */
#define AF_SHARED_OF_LAUNCH(type, name, count) extern __shared__ __align__(16) type name[]
#define AF_BARRIER() __syncthreads()
#define AF_SHUFFLE_XOR_I32(x, mask) __shfl_xor_sync(0xffffffffu, (int32_t)(x), mask)
#define AF_SHUFFLE_XOR_I64(x, mask) __shfl_xor_sync(0xffffffffu, (int64_t)(x), mask)
#define AF_SHUFFLE_XOR_F32(x, mask) __shfl_xor_sync(0xffffffffu, (float)(x), mask)
#define AF_SHUFFLE_XOR_F64(x, mask) __shfl_xor_sync(0xffffffffu, (double)(x), mask)
/* Threads of a warp meet, and see what each wrote before; the mask of those whose word is equal. */
#define AF_WARP_BARRIER() __syncwarp()
#define AF_EQUAL_IN_WARP(x) __match_any_sync(0xffffffffu, (uint32_t)(x))
#define AF_COUNT_BITS(mask) __popc(mask)

/* Atomics on integers only: what is added in whatever order is the same. Each returns what was
 * there. */
#define AF_ATOMIC_ADD_I32(place, x) atomicAdd((int32_t *)(place), (int32_t)(x))
#define AF_ATOMIC_CAS_I32(place, expected, x) atomicCAS((int32_t *)(place), expected, x)
#define AF_FENCE() __threadfence_system()

/* How far a loop is unrolled: registers are few, and more of them are fewer threads. */
#define AF_UNROLL _Pragma("unroll")
#define AF_ROLLED _Pragma("unroll 1")
#define AF_TWICE _Pragma("unroll 2")
#define AF_FOUR_TIMES _Pragma("unroll 4")
/* The compiler no longer knows this int32_t, and keeps nothing that follows from it in registers. */
#define AF_FORGET(x) asm volatile("" : "+r"(x))

#define af_bits_of_float(x) __float_as_uint(x)
#define af_float_of_bits(x) __uint_as_float(x)
#define af_bits_of_double(x) ((uint64_t)__double_as_longlong(x))
#define af_double_of_bits(x) __longlong_as_double((int64_t)(x))
#define af_mul_high(a, b) __umul64hi(a, b)

/* An address that must be a multiple of so many bytes: the emulation looks, a GPU loses all that
 * it was doing. */
#define AF_ALIGNED(place, size_bytes) (place)

/* One instruction each, where C has several and a branch: NaN where either is; a quotient within 1
 * of its last place, which C rounds; bfloat16 as C rounds it, but for the bits of a NaN. */
static __device__ __forceinline__ float AF_LARGER_F32(float a, float b) {
    float most;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(a), "f"(b));
    return most;
}
static __device__ __forceinline__ float AF_SMALLER_F32(float a, float b) {
    float least;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(least) : "f"(a), "f"(b));
    return least;
}
static __device__ __forceinline__ float af_reciprocalf(float x) {
    float y;
    asm("rcp.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
static __device__ __forceinline__ uint16_t af_to_bf16(float x) {
    uint16_t bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}

/* Products on tensor cores, from sm_80 on. A warp has them together: each thread gives and gets a
 * part, by g = lane / 4 and t = lane % 4. c[16][8] += a[16][16] b[16][8], where a thread has of c
 * c[g][2t, 2t + 1] and c[g + 8][2t, 2t + 1]; of a a[g][2t, 2t + 1], a[g + 8][2t, 2t + 1], and both 8
 * columns on; of b b[2t, 2t + 1][g] and b[2t + 8, 2t + 9][g]. Pairs of 16 bits are words. */
static __device__ __forceinline__ void AF_MULTIPLY_BF16(
    float *c, const uint32_t *a, uint32_t b0, uint32_t b1
) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
        " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
static __device__ __forceinline__ void AF_MULTIPLY_F16(
    float *c, const uint32_t *a, uint32_t b0, uint32_t b1
) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
        " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
/* Four matrices of 8 rows of 16 bytes from shared memory: lane 8m + r says where row r of matrix m
 * begins, and gets of each the two numbers 2t, 2t + 1 of row g; turned, of column g. */
static __device__ __forceinline__ void AF_MATRICES(uint32_t *x, const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"((uint32_t)__cvta_generic_to_shared(row)));
}
static __device__ __forceinline__ void AF_TURNED_MATRICES(uint32_t *x, const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"((uint32_t)__cvta_generic_to_shared(row)));
}
/* 16 bytes into shared memory, of zeros where nothing is there; they have come to the thread that
 * asked for them once its AF_COPIED() is over, and to others behind a barrier after that. */
static __device__ __forceinline__ void AF_COPY_16(void *shared, const void *from, _Bool is_there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                     (uint32_t)__cvta_generic_to_shared(shared)),
                 "l"(from), "r"(is_there ? 16 : 0)
                 : "memory");
}
#define AF_COPIED() asm volatile("cp.async.wait_all;" ::: "memory")
/* Two numbers in a word, the first one low; and 2^x, within 2 of its last place, which is 0 where it
 * is no normal number. */
static __device__ __forceinline__ uint32_t AF_PAIR_BF16(float low, float high) {
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
static __device__ __forceinline__ uint32_t AF_PAIR_F16(float low, float high) {
    uint32_t pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
static __device__ __forceinline__ float af_power_of_2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
#endif

/* What a thread moves at once, where all of it lies at multiples of its size. */
typedef struct __attribute__((aligned(16))) {
    uint64_t low, high;
} af_16_bytes;

typedef union {
    int64_t i;
    double d;
    float f;
    void *p;
} af_word;

/* Words of 32 bits from and to memory, in as few accesses as there can be: `size_bytes`, which the
 * text says, is 4, 8 or a multiple of 16, and the address one of it or of 16. */
AF_FUNCTION void af_get(uint32_t *words, const void *place, int32_t size_bytes) {
    if (size_bytes == 4) {
        words[0] = *(const uint32_t *)AF_ALIGNED(place, 4);
    } else if (size_bytes == 8) {
        const uint64_t x = *(const uint64_t *)AF_ALIGNED(place, 8);
        words[0] = (uint32_t)x, words[1] = (uint32_t)(x >> 32);
    } else {
        const af_16_bytes *from = (const af_16_bytes *)AF_ALIGNED(place, 16);
        AF_UNROLL
        for (int32_t i = 0; i < size_bytes / 16; i++) {
            const af_16_bytes x = from[i];
            words[4 * i] = (uint32_t)x.low, words[4 * i + 1] = (uint32_t)(x.low >> 32);
            words[4 * i + 2] = (uint32_t)x.high, words[4 * i + 3] = (uint32_t)(x.high >> 32);
        }
    }
}
AF_FUNCTION void af_put(void *place, const uint32_t *words, int32_t size_bytes) {
    if (size_bytes == 4) {
        *(uint32_t *)AF_ALIGNED(place, 4) = words[0];
    } else if (size_bytes == 8) {
        *(uint64_t *)AF_ALIGNED(place, 8) = (uint64_t)words[1] << 32 | words[0];
    } else {
        af_16_bytes *to = (af_16_bytes *)AF_ALIGNED(place, 16);
        AF_UNROLL
        for (int32_t i = 0; i < size_bytes / 16; i++) {
            af_16_bytes x;
            x.low = (uint64_t)words[4 * i + 1] << 32 | words[4 * i];
            x.high = (uint64_t)words[4 * i + 3] << 32 | words[4 * i + 2];
            to[i] = x;
        }
    }
}
/* A number of 64 bits in two words. */
AF_FUNCTION uint64_t af_long_of(const uint32_t *words) {
    return (uint64_t)words[1] << 32 | words[0];
}
AF_FUNCTION void af_put_long(uint32_t *words, uint64_t x) {
    words[0] = (uint32_t)x, words[1] = (uint32_t)(x >> 32);
}

AF_FUNCTION int64_t af_min(int64_t a, int64_t b) { return a < b ? a : b; }
AF_FUNCTION int64_t af_max(int64_t a, int64_t b) { return a > b ? a : b; }

/* bfloat16 by bits. */
AF_FUNCTION float af_from_bf16(uint16_t bits) { return af_float_of_bits((uint32_t)bits << 16); }

/* float16 by bits. The product with 2^112 makes normal numbers of those that are not, too; so does
 * the sum with 1/2, whose last place is that of the smallest float16. */
AF_FUNCTION float af_from_f16(uint16_t bits) {
    const uint32_t magnitude = (uint32_t)(bits & 0x7fffu) << 13;
    const uint32_t sign = (uint32_t)(bits & 0x8000u) << 16;
    if (magnitude >= 0x0f800000u) return af_float_of_bits(sign | magnitude | 0x7f800000u);
    return af_float_of_bits(sign | af_bits_of_float(af_float_of_bits(magnitude) * 0x1p112f));
}
AF_FUNCTION uint16_t af_to_f16(float x) {
    const uint32_t bits = af_bits_of_float(x), magnitude = bits & 0x7fffffffu;
    const uint32_t sign = (bits >> 16) & 0x8000u;
    if (magnitude > 0x7f800000u) return (uint16_t)(sign | 0x7e00u);
    if (magnitude >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u); /* from 65520 on */
    if (magnitude < 0x38800000u)
        return (uint16_t)(sign | (af_bits_of_float(af_float_of_bits(magnitude) + 0.5f) - 0x3f000000u));
    return (uint16_t)(sign | ((magnitude + 0xfffu + ((magnitude >> 13) & 1u) - 0x38000000u) >> 13));
}

/* Names that generated code has for functions of one float. */
AF_FUNCTION float af_expf(float x) { return expf(x); }
AF_FUNCTION float af_logf(float x) { return logf(x); }
AF_FUNCTION float af_tanhf(float x) { return tanhf(x); }
AF_FUNCTION float af_erff(float x) { return erff(x); }
AF_FUNCTION float af_sinf(float x) { return sinf(x); }
AF_FUNCTION float af_cosf(float x) { return cosf(x); }

/* Remainders with the sign of the divisor; of integers by 0: 0. */
AF_FUNCTION int64_t af_mod_int(int64_t a, int64_t b) {
    if (b == 0 || b == -1) return 0;
    const int64_t m = a % b;
    return m != 0 && (m < 0) != (b < 0) ? m + b : m;
}
AF_FUNCTION uint64_t af_mod_uint(uint64_t a, uint64_t b) { return b == 0 ? 0 : a % b; }
/* Quotients rounded down; by 0: 0. By -1 they wrap around, as numpy's do. */
AF_FUNCTION int64_t af_floordiv_int(int64_t a, int64_t b) {
    if (b == 0) return 0;
    if (b == -1) return (int64_t)(0 - (uint64_t)a);
    return a / b - (a % b != 0 && (a < 0) != (b < 0));
}
AF_FUNCTION uint64_t af_floordiv_uint(uint64_t a, uint64_t b) { return b == 0 ? 0 : a / b; }
AF_FUNCTION double af_pow(double x, double n) { return pow(x, n); }
AF_FUNCTION float af_powf(float x, float n) { return powf(x, n); }

AF_FUNCTION double af_mod_double(double a, double b) {
    const double m = fmod(a, b);
    if (m == 0.0) return copysign(0.0, b);
    return (m < 0.0) != (b < 0.0) ? m + b : m;
}
AF_FUNCTION float af_mod_float(float a, float b) {
    const float m = fmodf(a, b);
    if (m == 0.0f) return copysignf(0.0f, b);
    return (m < 0.0f) != (b < 0.0f) ? m + b : m;
}

/* Philox4x64-10 (Salmon et al. 2011): the eight 32-bit halves of counter (first, 0, step, 0). */
AF_FUNCTION void af_philox(uint32_t *u, uint64_t first, uint64_t step, uint64_t key0, uint64_t key1) {
    uint64_t c0 = first, c1 = 0, c2 = step, c3 = 0;
    AF_UNROLL
    for (int32_t round = 0; round < 10; round++) {
        const uint64_t h0 = af_mul_high(0xD2E7470EE14C6C93ull, c0), l0 = 0xD2E7470EE14C6C93ull * c0;
        const uint64_t h2 = af_mul_high(0xCA5A826395121157ull, c2), l2 = 0xCA5A826395121157ull * c2;
        c0 = h2 ^ c1 ^ key0, c1 = l2, c2 = h0 ^ c3 ^ key1, c3 = l0;
        key0 += 0x9E3779B97F4A7C15ull, key1 += 0xBB67AE8584CAA73Bull;
    }
    u[0] = (uint32_t)c0, u[1] = (uint32_t)(c0 >> 32), u[2] = (uint32_t)c1;
    u[3] = (uint32_t)(c1 >> 32), u[4] = (uint32_t)c2, u[5] = (uint32_t)(c2 >> 32);
    u[6] = (uint32_t)c3, u[7] = (uint32_t)(c3 >> 32);
}

/* The random bits of elements `first` to `first + 7`; counters begin at 1 and have eight each. Of
 * two counters the bits are moved by steps of 4, 2 and 1, so that no index depends on `first`. */
#define AF_MOVED(w, over, by, count)                                              \
    {                                                                             \
        const uint32_t moved = (over) & (by) ? UINT32_MAX : 0;                    \
        AF_UNROLL                                                                 \
        for (int32_t i = 0; i < (count); i++)                                     \
            w[i] = (w[i + (by)] & moved) | (w[i] & ~moved);                       \
    }
AF_FUNCTION void af_random8(uint32_t *u, int64_t first, uint64_t step, uint64_t seed, uint64_t key) {
    const uint64_t counter = 1u + (uint64_t)(first >> 3);
    const int32_t over = (int32_t)(first & 7);
    uint32_t w[16];
    af_philox(w, counter, step, seed, key);
    if (over) {
        af_philox(w + 8, counter + 1, step, seed, key);
        AF_MOVED(w, over, 4, 12)
        AF_MOVED(w, over, 2, 10)
        AF_MOVED(w, over, 1, 8)
    }
    AF_UNROLL
    for (int32_t i = 0; i < 8; i++) u[i] = w[i];
}

/* NaN where either is. */
#define AF_ADD(a, b) ((a) + (b))
#define AF_LARGER(a, b) ((a) > (b) || (a) != (a) ? (a) : (b))
#define AF_SMALLER(a, b) ((a) < (b) || (a) != (a) ? (a) : (b))

/* Reductions over a team, a power of two: threads of a warp whose number begins at a multiple of the
 * team, or a whole block. Every thread of the warp, of the block, comes here alike, and every one of
 * a team gets the result, which does not depend on who came when. `exchange` is shared memory for 32
 * numbers of 8 bytes; teams of a warp do without. */
#define AF_EXCHANGE(name) AF_SHARED(double, name, 32)
#ifndef AF_EMULATED
#define AF_IN_WARP(type, bits, SHUFFLE, JOIN, x, width)    \
    for (int32_t mask = (width) / 2; mask; mask >>= 1) {   \
        const type other = (type)SHUFFLE((bits)(x), mask); \
        x = JOIN(x, other);                                \
    }
#endif
#define AF_TEAM(name, type, bits, SHUFFLE, JOIN)                                          \
    AF_FUNCTION type af_team_##name##_at(                                                 \
        type x, int64_t team, void *exchange, int32_t af_site                             \
    ) {                                                                                   \
        const int32_t in_warp = team < 32 ? (int32_t)team : 32;                           \
        const int32_t num_warps = (int32_t)(team >> 5);                                   \
        AF_IN_WARP(type, bits, SHUFFLE, JOIN, x, in_warp)                                 \
        if (num_warps > 1) {                                                              \
            AF_BARRIER();                                                                 \
            if (AF_THREAD % 32 == 0) ((type *)exchange)[AF_THREAD / 32] = x;              \
            AF_BARRIER();                                                                 \
            x = ((const type *)exchange)[AF_THREAD & (num_warps - 1)];                    \
            AF_IN_WARP(type, bits, SHUFFLE, JOIN, x, num_warps)                           \
        }                                                                                 \
        return x;                                                                         \
    }
AF_TEAM(sum_f64, double, double, AF_SHUFFLE_XOR_F64, AF_ADD)
AF_TEAM(max_f64, double, double, AF_SHUFFLE_XOR_F64, AF_LARGER)
AF_TEAM(min_f64, double, double, AF_SHUFFLE_XOR_F64, AF_SMALLER)
AF_TEAM(max_f32, float, float, AF_SHUFFLE_XOR_F32, AF_LARGER_F32)
AF_TEAM(min_f32, float, float, AF_SHUFFLE_XOR_F32, AF_SMALLER_F32)
AF_TEAM(sum_i64, int64_t, int64_t, AF_SHUFFLE_XOR_I64, AF_ADD)
AF_TEAM(max_i64, int64_t, int64_t, AF_SHUFFLE_XOR_I64, AF_LARGER)
AF_TEAM(min_i64, int64_t, int64_t, AF_SHUFFLE_XOR_I64, AF_SMALLER)
AF_TEAM(max_u64, uint64_t, int64_t, AF_SHUFFLE_XOR_I64, AF_LARGER)
AF_TEAM(min_u64, uint64_t, int64_t, AF_SHUFFLE_XOR_I64, AF_SMALLER)
/* Where a text calls one is told, as two calls in two branches are not one meeting. */
#define af_team_sum_f64(x, team, exchange) af_team_sum_f64_at(x, team, exchange, __LINE__)
#define af_team_max_f64(x, team, exchange) af_team_max_f64_at(x, team, exchange, __LINE__)
#define af_team_min_f64(x, team, exchange) af_team_min_f64_at(x, team, exchange, __LINE__)
#define af_team_max_f32(x, team, exchange) af_team_max_f32_at(x, team, exchange, __LINE__)
#define af_team_min_f32(x, team, exchange) af_team_min_f32_at(x, team, exchange, __LINE__)
#define af_team_sum_i64(x, team, exchange) af_team_sum_i64_at(x, team, exchange, __LINE__)
#define af_team_max_i64(x, team, exchange) af_team_max_i64_at(x, team, exchange, __LINE__)
#define af_team_min_i64(x, team, exchange) af_team_min_i64_at(x, team, exchange, __LINE__)
#define af_team_max_u64(x, team, exchange) af_team_max_u64_at(x, team, exchange, __LINE__)
#define af_team_min_u64(x, team, exchange) af_team_min_u64_at(x, team, exchange, __LINE__)

/* Keeps the lowest place of the earliest firing at which an index was bad. The cell: a lock, the
 * firing + 1 or 0, the place, the value, the address of the number of this firing, the address of a
 * word that says whether any cell of the device has something, how many bools on the device have to
 * have a value for this to count, and of each its address and that value: both bodies of a choice
 * run, and one of them in vain. Only a bad index comes here. */
AF_SELDOM void af_report(void *where, int64_t place, int64_t value) {
    volatile af_word *cell = (volatile af_word *)where;
    for (int64_t i = 0; i < 2 * cell[6].i; i += 2)
        if (*(const uint8_t *)cell[7 + i].p != cell[8 + i].i) return;
    const int64_t firing = *(volatile int64_t *)cell[4].p + 1;
    int32_t is_done = 0;
    while (!is_done) {
        /* Most leave here, where all indices are bad: each try at the lock goes to the host's memory
         * and back. The place is read after the firing, so that it is of that or an earlier one. */
        const int64_t known = cell[1].i;
        AF_FENCE();
        if (known != 0 && (known < firing || (known == firing && cell[2].i <= place))) return;
        if (AF_ATOMIC_CAS_I32(where, 0, 1) != 0) continue;
        AF_FENCE(); /* What the one before wrote is seen. */
        const int64_t found = cell[1].i;
        if (found == 0 || firing < found || (firing == found && place < cell[2].i)) {
            cell[2].i = place;
            cell[3].i = value;
            cell[1].i = firing;
        }
        AF_FENCE(); /* Who sees the word finds the cell. */
        *(volatile int64_t *)cell[5].p = 1;
        AF_FENCE();
        *(volatile int32_t *)where = 0;
        is_done = 1;
    }
}

#endif
