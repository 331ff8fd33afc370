/* The pool of threads, and the runner of chains.
 *
 * The pool is made for a machine that is shared: a call is cut into more chunks than threads, chunks
 * are taken from counters, and a helper that the system does not run takes none, so that nobody
 * waits for it. Helpers spin for SPIN_NS after their last chunk, because the next launch is usually
 * nanoseconds away, and that of the next call of a predictor some 30 us, and then sleep on a futex.
 * The caller waits the same way for chunks in flight.
 *
 * One call has the pool at a time; a second thread that comes meanwhile runs its chunks alone. Each
 * chain that runs beside another one takes a thread from the pool, so that there are never more
 * threads at work than asked for: with two chains on two cores and a pool of two threads, three
 * threads fought for the cores, and both chains took longer than one after the other.
 *
 * A call is open between the two stores to `is_open`. A helper counts itself `inside` before it looks
 * at `is_open`, the caller closes before it looks at `inside`, both sequentially consistent: so either
 * the helper sees a closed call and leaves, or the caller sees the helper and waits for it.
 */
#define _GNU_SOURCE
#define AF_RUNTIME_C
#include "runtime.h"
#include "waiting.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <sched.h>
#endif

#define MAX_THREADS 256
#define SPIN_NS 100000

static struct {
    _Atomic int32_t num_helpers;
    _Atomic int32_t is_taken;
    _Atomic int32_t num_chains;
    _Alignas(64) _Atomic uint32_t generation;
    _Atomic int32_t num_asleep;
    _Alignas(64) _Atomic int32_t is_open;
    _Alignas(64) _Atomic uint32_t inside;
    _Atomic int32_t caller_sleeps;
    _Alignas(64) _Atomic uint64_t taken; /* from the front, and in the upper half from the back */
    _Atomic int32_t next_worker;
    af_body body;
    void *arguments;
    int64_t num_chunks;
    int32_t max_workers;
    int64_t spins;
} pool;

static void sleep_while(_Atomic uint32_t *word, uint32_t value) {
#ifdef __linux__
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
#else
    struct timespec pause = {0, 50000};
    if (atomic_load(word) == value) nanosleep(&pause, NULL);
#endif
}

static void wake(_Atomic uint32_t *word, int count) {
#ifdef __linux__
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, count, NULL, NULL, 0);
#else
    (void)word, (void)count;
#endif
}

/* Every other worker takes chunks from the back. So of two threads each has nearly the same chunks in
 * every launch that is cut alike, and finds in its own cache what it had there: a recurrent step
 * reads the same weights again and again. */
static void take_chunks(int32_t worker) {
    af_body body = pool.body;
    void *arguments = pool.arguments;
    const int is_back = worker & 1;
    const uint64_t num_chunks = (uint64_t)pool.num_chunks, one = is_back ? 1ULL << 32 : 1;
    for (;;) {
        uint64_t taken = atomic_fetch_add_explicit(&pool.taken, one, memory_order_relaxed);
        uint64_t front = taken & UINT32_MAX, back = taken >> 32;
        if (front + back >= num_chunks) return;
        body(arguments, (int64_t)(is_back ? num_chunks - 1 - back : front), worker);
    }
}

static void help(void) {
    atomic_fetch_add(&pool.inside, 1);
    if (atomic_load(&pool.is_open)) {
        int32_t worker = atomic_fetch_add(&pool.next_worker, 1);
        if (worker < pool.max_workers) take_chunks(worker);
    }
    if (atomic_fetch_sub(&pool.inside, 1) == 1 && atomic_load(&pool.caller_sleeps))
        wake(&pool.inside, 1);
}

static void *helper(void *unused) {
    (void)unused;
    uint32_t seen = 0;
    for (;;) {
        uint32_t generation = atomic_load(&pool.generation);
        for (int64_t i = 0; generation == seen && i < pool.spins; i++) {
            relax();
            generation = atomic_load_explicit(&pool.generation, memory_order_acquire);
        }
        while (generation == seen) {
            atomic_fetch_add(&pool.num_asleep, 1);
            sleep_while(&pool.generation, seen);
            atomic_fetch_sub(&pool.num_asleep, 1);
            generation = atomic_load(&pool.generation);
        }
        seen = generation;
        help();
    }
    return NULL;
}

static void wait_for_helpers(void) {
    uint32_t inside = atomic_load(&pool.inside);
    for (int64_t i = 0; inside && i < pool.spins; i++) {
        relax();
        inside = atomic_load_explicit(&pool.inside, memory_order_acquire);
    }
    if (!inside) {
        atomic_load(&pool.inside);
        return;
    }
    atomic_store(&pool.caller_sleeps, 1);
    while ((inside = atomic_load(&pool.inside)) != 0) sleep_while(&pool.inside, inside);
    atomic_store(&pool.caller_sleeps, 0);
}

/* Of this thread: chains that it is in, one within the other. A launch may be made without any. */
static _Thread_local int depth;
/* Of this thread: the most workers that a launch of its chain may have. */
static _Thread_local int32_t most_workers = INT32_MAX;

static void parallel(af_body body, void *arguments, int64_t num_chunks, int32_t max_workers) {
    int32_t is_free = 0, others = atomic_load(&pool.num_chains) - (depth > 0);
    max_workers = (int32_t)af_min(max_workers, most_workers);
    if (others > 0) max_workers = (int32_t)af_min(max_workers, pool.num_helpers + 1 - others);
    if (num_chunks <= 1 || max_workers <= 1 || atomic_load(&pool.num_helpers) == 0 ||
        !atomic_compare_exchange_strong(&pool.is_taken, &is_free, 1)) {
        for (int64_t chunk = 0; chunk < num_chunks; chunk++) body(arguments, chunk, 0);
        return;
    }
    pool.body = body;
    pool.arguments = arguments;
    pool.num_chunks = num_chunks;
    pool.max_workers = max_workers;
    atomic_store(&pool.taken, 0);
    atomic_store(&pool.next_worker, 1);
    atomic_store(&pool.is_open, 1);
    atomic_fetch_add(&pool.generation, 1);
    if (atomic_load(&pool.num_asleep)) {
        int64_t most = af_min(num_chunks, max_workers) - 1;
        wake(&pool.generation, (int)most);
    }
    take_chunks(0);
    atomic_store(&pool.is_open, 0);
    wait_for_helpers();
    atomic_store(&pool.is_taken, 0);
}

/* A forked child has no helpers; whoever held the pool is not there either. */
static void forget_helpers(void) {
    atomic_store(&pool.num_helpers, 0);
    atomic_store(&pool.inside, 0);
    atomic_store(&pool.is_open, 0);
    atomic_store(&pool.is_taken, 0);
    atomic_store(&pool.num_asleep, 0);
    atomic_store(&pool.num_chains, 0);
}

static int64_t count_spins(void) {
    int64_t spins = 1000, begin = now_ns();
    for (int64_t i = 0; i < spins; i++) relax();
    int64_t taken = af_max(now_ns() - begin, 1);
    return af_max(spins * SPIN_NS / taken, 100);
}

/* Starts helpers until there are `num_threads` - 1, and returns how many threads a call has.
 * Not for two threads at once. */
AF_EXPORT int32_t af_start(int32_t num_threads) {
    static int is_prepared;
    if (!is_prepared) {
        is_prepared = 1;
        pool.spins = count_spins();
        pthread_atfork(NULL, NULL, forget_helpers);
    }
    sigset_t all, before;
    sigfillset(&all); /* signals are for the interpreter's main thread */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (pool.num_helpers < num_threads - 1 && pool.num_helpers < MAX_THREADS - 1) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, helper, NULL)) break;
        pthread_detach(thread);
        atomic_fetch_add(&pool.num_helpers, 1);
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return pool.num_helpers + 1;
}

AF_EXPORT af_parallel_fn af_parallel_address(void) { return parallel; }

/* A chain. `where` is the launch that runs now, for whoever looks from another thread. */
typedef struct {
    af_launch function;
    void *arguments;
} af_call;

typedef struct {
    const af_call *calls;
    int64_t num_calls;
    volatile int64_t where;
    int64_t *durations_ns; /* added up per call, or NULL */
    int64_t max_workers;
} af_chain;

static int32_t run_calls(af_chain *chain) {
    const af_call *calls = chain->calls;
    int64_t num_calls = chain->num_calls;
    int64_t *durations = chain->durations_ns;
    int64_t begin = durations ? now_ns() : 0;
    for (int64_t i = 0; i < num_calls; i++) {
        chain->where = i;
        int32_t status = calls[i].function(calls[i].arguments);
        if (status) return status;
        if (durations) {
            int64_t end = now_ns();
            durations[i] += end - begin;
            begin = end;
        }
    }
    return 0;
}

/* A launch may be a chain of its own: it runs in the place of the one that it belongs to. */
AF_EXPORT int32_t af_run_chain(void *arguments) {
    af_chain *chain = arguments;
    int32_t most_before = most_workers;
    most_workers = (int32_t)af_min(most_before, chain->max_workers);
    if (!depth++) atomic_fetch_add(&pool.num_chains, 1);
    int32_t status = run_calls(chain);
    if (!--depth) atomic_fetch_sub(&pool.num_chains, 1);
    most_workers = most_before;
    return status;
}
