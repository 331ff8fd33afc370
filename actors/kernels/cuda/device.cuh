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
#define AF_ARGUMENTS(name) const __grid_constant__ name##_arguments
#define AF_FUNCTION static __device__ __forceinline__

/* Where a thread is. */
#define AF_BLOCK ((int64_t)blockIdx.x)
#define AF_NUM_BLOCKS ((int64_t)gridDim.x)
#define AF_THREAD ((int32_t)threadIdx.x)
#define AF_NUM_THREADS ((int32_t)blockDim.x)

/* Threads of a block meet: all of them pass a barrier, all of a warp a shuffle. Shared memory means
 * nothing before it is written. */
#define AF_SHARED(type, name, count) __shared__ type name[count]
#define AF_BARRIER() __syncthreads()
#define AF_SHUFFLE_XOR_I32(x, mask) __shfl_xor_sync(0xffffffffu, (int32_t)(x), mask)
#define AF_SHUFFLE_XOR_I64(x, mask) __shfl_xor_sync(0xffffffffu, (int64_t)(x), mask)
#define AF_SHUFFLE_XOR_F32(x, mask) __shfl_xor_sync(0xffffffffu, (float)(x), mask)
#define AF_SHUFFLE_XOR_F64(x, mask) __shfl_xor_sync(0xffffffffu, (double)(x), mask)

/* Atomics on integers only: what is added in whatever order is the same. Each returns what was
 * there. */
#define AF_ATOMIC_ADD_I32(place, x) atomicAdd((int32_t *)(place), (int32_t)(x))
#define AF_ATOMIC_CAS_I32(place, expected, x) atomicCAS((int32_t *)(place), expected, x)
#define AF_FENCE() __threadfence_system()

#define af_bits_of_float(x) __float_as_uint(x)
#define af_float_of_bits(x) __uint_as_float(x)
#define af_mul_high(a, b) __umul64hi(a, b)
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

AF_FUNCTION int64_t af_min(int64_t a, int64_t b) { return a < b ? a : b; }
AF_FUNCTION int64_t af_max(int64_t a, int64_t b) { return a > b ? a : b; }

/* bfloat16 by bits: rounded to the nearest, ties to even; NaN stays NaN. */
AF_FUNCTION float af_from_bf16(uint16_t bits) { return af_float_of_bits((uint32_t)bits << 16); }
AF_FUNCTION uint16_t af_to_bf16(float x) {
    const uint32_t bits = af_bits_of_float(x);
    if (x != x) return (uint16_t)((bits >> 16) | 0x40);
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

/* Keeps the lowest place of the earliest firing at which an index was bad. The cell: a lock, the
 * firing + 1 or 0, the place, the value, the address of the number of this firing, the address of a
 * word that says whether any cell of the device has something. Only a bad index comes here. */
AF_FUNCTION void af_report(void *where, int64_t place, int64_t value) {
    volatile af_word *cell = (volatile af_word *)where;
    const int64_t firing = *(volatile int64_t *)cell[4].p + 1;
    int32_t is_done = 0;
    while (!is_done) {
        if (AF_ATOMIC_CAS_I32(where, 0, 1) != 0) continue;
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
