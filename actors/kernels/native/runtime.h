/* What every native kernel includes: the pool of threads and the shape of a launch.
 *
 * A launch is a function of one argument block. The block is an array of 64-bit words, made once at
 * load: addresses, sizes, and floats by their bits. It returns 0, or a status that the file which
 * defines it explains.
 */
#ifndef AF_RUNTIME_H
#define AF_RUNTIME_H

#include <stdint.h>
#include <string.h>

typedef int32_t (*af_launch)(void *arguments);

/* One chunk of a launch. `worker` is below the `max_workers` of the call, and no two chunks that run
 * at once have the same: it chooses the scratch of the chunk. */
typedef void (*af_body)(void *arguments, int64_t chunk, int32_t worker);

/* Runs every chunk of 0 .. num_chunks - 1 once, on at most `max_workers` threads, and returns when
 * all are done. Which thread runs a chunk is not determined: results must not depend on it. */
typedef void (*af_parallel_fn)(af_body body, void *arguments, int64_t num_chunks,
                               int32_t max_workers);

#ifndef AF_RUNTIME_C
static af_parallel_fn af_parallel;

/* Called once when the library is loaded. */
__attribute__((visibility("default"))) void af_bind_runtime(af_parallel_fn parallel) {
    af_parallel = parallel;
}
#endif

typedef union {
    int64_t i;
    double d;
    float f;
    void *p;
} af_word;

#define AF_EXPORT __attribute__((visibility("default")))

static inline int64_t af_min(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t af_max(int64_t a, int64_t b) { return a > b ? a : b; }

#endif
