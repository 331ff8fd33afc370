/* Runs a kernel as CUDA might: threads of a block as fibers, meetings in any order that is legal.
 *
 * Blocks run one after the other, in an order that the seed draws. In a block any warp that can go
 * on is taken, and its threads run, in an order drawn anew each time, until each stands at a meeting
 * or has ended. A warp goes on when all its threads stand at one exchange; a block, when all stand
 * at one barrier. Whatever else they do is trouble, for on a GPU it would hang or mean nothing: a
 * thread that ended while others wait, different meetings of one warp, a barrier of one place while
 * others are at another.
 *
 * Shared memory is 0xFF when a block begins, with gaps between its arrays that nobody may write.
 *
 * A fiber has one stack for all blocks, and goes over to the next in some 20 ns. Stacks are an odd
 * number of cache lines apart, lest their tops share the few lines of one set of the cache.
 *
 * One kernel runs at a time in a process: callers hold Python's lock.
 */
#define _GNU_SOURCE
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

#include "emulated.h"

enum { WARP = 32, MAX_THREADS = 1024, MAX_WARPS = MAX_THREADS / WARP };
enum { STACK_BYTES = 48 * 1024 + 64, STACK_MARK = 0x5AFE };
enum { MAX_STATIC = 48 * 1024, MAX_SHARED = 227 * 1024, GAP = 64, MAX_ARRAYS = 32 };
enum { READY, AT_BARRIER, AT_EXCHANGE, ENDED };
enum {
    FINE, ENDED_EARLY, DIFFERENT_MEETINGS, MEETING_IN_LOOP, TOO_MUCH_SHARED, SHARED_OVERRUN,
    STACK_OVERRUN, NO_STACKS, MISALIGNED, OTHER_SHARED
};

typedef void (*kernel_t)(const void *words);
typedef struct {
    int64_t block;
    int32_t thread, line, other_line;
} trouble_t;

typedef struct {
    void *at[5];
    int32_t state, line;
    _Bool has_stack;
} fiber_t;

static af_machine machine;
static fiber_t fibers[MAX_THREADS];
static void *home[5];
static char *stacks;
static kernel_t kernel;
static const void *arguments;
static uint64_t random_state;
static int32_t status;
static uint64_t slots[MAX_WARPS][2][WARP];
static uint8_t num_exchanges[MAX_WARPS];
static _Bool is_loop;
static int32_t turns[WARP], next_turn;

static unsigned char shared[MAX_SHARED + GAP * (MAX_ARRAYS + 1)] __attribute__((aligned(256)));
static int64_t shared_used, shared_static, shared_of_launch, shared_fresh, gaps[MAX_ARRAYS];
static int32_t num_gaps, gaps_seen;

void af_swap(void **from, void **to);

static uint32_t draw(uint32_t below) {
    random_state += 0x9E3779B97F4A7C15ull;
    uint64_t z = random_state;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return (uint32_t)(((z >> 32) * below) >> 32);
}

/* Goes on with the next thread of the warp, or with the scheduler after the last one; each jump less
 * is a prediction less that the processor gets wrong. */
static inline void leave(int32_t state, int32_t line) {
    fiber_t *fiber = &fibers[machine.thread];
    void **to = home;
    fiber->state = state;
    fiber->line = line;
    if (next_turn < WARP && status == FINE && fibers[turns[next_turn]].has_stack) {
        machine.thread = turns[next_turn++];
        to = fibers[machine.thread].at;
    }
    af_swap(fiber->at, to);
}

static void run_thread(void) {
    shared_used = GAP;
    shared_static = 0;
    gaps_seen = 0;
    kernel(arguments);
}

static void end(void) { leave(ENDED, 0); }

static void fiber_main(void) {
    for (;;) {
        run_thread();
        end();
    }
}

/* -- switching --------------------------------------------------------------------------------- */

#if defined(__x86_64__) && defined(__ELF__) && !defined(AF_PORTABLE)
/* What a function must keep goes on its own stack, whose top is `from`; then the same backwards. */
__asm__(".text\n"
        ".type af_swap, @function\n"
        "af_swap:\n"
        "push %rbp\n push %rbx\n push %r12\n push %r13\n push %r14\n push %r15\n"
        "mov %rsp, (%rdi)\n"
        "mov (%rsi), %rsp\n"
        "pop %r15\n pop %r14\n pop %r13\n pop %r12\n pop %rbx\n pop %rbp\n"
        "pop %rcx\n"
        "jmp *%rcx\n"
        ".size af_swap, . - af_swap\n");

static void start(fiber_t *fiber, char *stack) {
    void **top = (void **)(stack + STACK_BYTES - 64); /* as a call would find it */
    top[-2] = (void *)fiber_main;
    fiber->at[0] = top - 8;
    af_swap(home, fiber->at);
}
#else
/* A stack is entered once by ucontext; from then on the compiler's own jumps switch. Nobody may
 * guess which registers they leave alone. */
static __attribute__((noinline, noclone, noipa)) void jump(void **to) { __builtin_longjmp(to, 1); }

__attribute__((noinline, noclone, noipa)) void af_swap(void **from, void **to) {
    if (!__builtin_setjmp(from)) jump(to);
}

static __attribute__((noinline)) void start(fiber_t *fiber, char *stack) {
    static ucontext_t context;
    (void)fiber;
    getcontext(&context);
    context.uc_stack.ss_sp = stack;
    context.uc_stack.ss_size = STACK_BYTES;
    context.uc_link = 0;
    makecontext(&context, fiber_main, 0);
    if (!__builtin_setjmp(home)) setcontext(&context);
}
#endif

static void resume(int32_t thread) {
    fiber_t *fiber = &fibers[thread];
    machine.thread = thread;
    if (fiber->has_stack) {
        af_swap(home, fiber->at);
    } else {
        char *stack = stacks + (int64_t)thread * STACK_BYTES;
        *(volatile int64_t *)stack = STACK_MARK;
        fiber->has_stack = 1;
        start(fiber, stack);
    }
}

/* -- what a text calls ------------------------------------------------------------------------- */

static void barrier(int32_t line) {
    if (is_loop) status = MEETING_IN_LOOP;
    else leave(AT_BARRIER, line);
}

static const uint64_t *exchange(uint64_t bits, int32_t line) {
    const int32_t warp = machine.thread / WARP;
    if (is_loop) {
        status = MEETING_IN_LOOP;
        return slots[0][0];
    }
    uint64_t *mine = slots[warp][num_exchanges[warp] & 1];
    mine[machine.thread % WARP] = bits;
    leave(AT_EXCHANGE, line);
    return mine;
}

static void *array_of(int64_t size_bytes) {
    const int64_t place = shared_used, end = (place + size_bytes + GAP - 1) / GAP * GAP + GAP;
    if (end > (int64_t)sizeof shared || shared_static > MAX_STATIC || gaps_seen == MAX_ARRAYS) {
        status = TOO_MUCH_SHARED;
        return shared + GAP;
    }
    if (end > shared_fresh) {
        memset(shared + shared_fresh, 0xFF, (size_t)(end - shared_fresh));
        shared_fresh = end;
    }
    if (gaps_seen == num_gaps) gaps[num_gaps++] = end - GAP;
    gaps_seen++;
    shared_used = end;
    return shared + place;
}

static void *shared_array(int64_t size_bytes) {
    shared_static += size_bytes;
    return array_of(size_bytes);
}

/* A text says how many bytes it takes of what its launch asks for: other than all are a mistake. */
static void *array_of_launch(int64_t size_bytes) {
    if (size_bytes != shared_of_launch) status = OTHER_SHARED;
    return array_of(size_bytes);
}

static void misaligned(void) { status = MISALIGNED; }

/* -- a block ----------------------------------------------------------------------------------- */

static int32_t tell(trouble_t *trouble, int32_t what, int32_t thread, int32_t other) {
    trouble->block = machine.block;
    trouble->thread = thread;
    trouble->line = fibers[thread].line;
    trouble->other_line = fibers[other].line;
    return what;
}

/* Compares a thread that waits, `one`, with another of its meeting. */
static int32_t compare(trouble_t *trouble, int32_t one, int32_t other) {
    if (fibers[other].state == ENDED || fibers[one].state == ENDED)
        return tell(trouble, ENDED_EARLY, fibers[one].state == ENDED ? one : other,
                    fibers[one].state == ENDED ? other : one);
    return tell(trouble, DIFFERENT_MEETINGS, one, other);
}

/* Runs a warp until all its threads stand at a barrier or have ended. */
static int32_t run_warp(int32_t warp, trouble_t *trouble) {
    const int32_t first = warp * WARP, times = (int32_t)draw(WARP / 2) * 2 + 1,
                  plus = (int32_t)draw(WARP), mix = (int32_t)draw(WARP);
    for (int32_t i = 0; i < WARP; i++)
        turns[i] = first + (((i * times + plus) & (WARP - 1)) ^ mix);
    for (next_turn = 0; next_turn < WARP;) {
        resume(turns[next_turn++]);
        if (status != FINE) return tell(trouble, status, machine.thread, machine.thread);
    }
    for (int32_t i = 1; i < WARP; i++) {
        const fiber_t *one = &fibers[first], *other = &fibers[first + i];
        if (one->state != other->state || one->line != other->line)
            return compare(trouble, first, first + i);
    }
    if (fibers[first].state == AT_EXCHANGE) num_exchanges[warp]++;
    return FINE;
}

static int32_t run_block(int32_t num_warps, trouble_t *trouble) {
    int32_t ready[MAX_WARPS], num_ended = 0;
    while (num_ended < num_warps) {
        int32_t num_ready = 0;
        for (int32_t warp = 0; warp < num_warps; warp++) ready[num_ready++] = warp;
        while (num_ready) {
            const int32_t pick = (int32_t)draw((uint32_t)num_ready), warp = ready[pick];
            const int32_t found = run_warp(warp, trouble);
            if (found != FINE) return found;
            if (fibers[warp * WARP].state == AT_EXCHANGE) continue;
            ready[pick] = ready[--num_ready];
            num_ended += fibers[warp * WARP].state == ENDED;
        }
        for (int32_t warp = 1; warp < num_warps; warp++) {
            const fiber_t *one = &fibers[0], *other = &fibers[warp * WARP];
            if (one->state != other->state || one->line != other->line)
                return compare(trouble, 0, warp * WARP);
        }
    }
    return FINE;
}

static void run_loop(int32_t num_threads) {
    int32_t thread = (int32_t)draw((uint32_t)num_threads);
    for (int32_t i = 0; i < num_threads && status == FINE; i++) {
        machine.thread = thread;
        thread = thread + 1 == num_threads ? 0 : thread + 1;
        run_thread();
    }
}

static int32_t check_block(int32_t num_threads, trouble_t *trouble) {
    for (int32_t gap = -1; gap < num_gaps; gap++)
        for (int64_t i = 0; i < GAP; i++)
            if (shared[(gap < 0 ? 0 : gaps[gap]) + i] != 0xFF)
                return tell(trouble, SHARED_OVERRUN, 0, 0);
    for (int32_t thread = 0; thread < num_threads && !is_loop; thread++)
        if (*(volatile int64_t *)(stacks + (int64_t)thread * STACK_BYTES) != STACK_MARK)
            return tell(trouble, STACK_OVERRUN, thread, thread);
    return FINE;
}

static int64_t common(int64_t a, int64_t b) { return b ? common(b, a % b) : a; }

/* -- what the host calls ----------------------------------------------------------------------- */

AF_VISIBLE af_machine *af_machine_address(void) { return &machine; }

AF_VISIBLE int32_t af_launch(kernel_t called, const void *words, int64_t num_blocks,
                             int32_t num_threads, int64_t shared_bytes, int32_t has_exchanges,
                             uint64_t seed, trouble_t *trouble) {
    if (!stacks && has_exchanges) {
        void *place = mmap(0, (size_t)STACK_BYTES * MAX_THREADS, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (place == MAP_FAILED) return NO_STACKS;
        stacks = place;
    }
    machine.barrier = barrier;
    machine.exchange = exchange;
    machine.shared = shared_array;
    machine.shared_of_launch = array_of_launch;
    shared_of_launch = shared_bytes;
    machine.misaligned = misaligned;
    machine.num_blocks = num_blocks;
    machine.num_threads = num_threads;
    kernel = called;
    arguments = words;
    random_state = seed;
    status = FINE;
    is_loop = !has_exchanges;
    num_gaps = 0;
    int64_t step = 1 + draw(1u << 30) % num_blocks, block = draw(1u << 30) % num_blocks;
    while (common(step, num_blocks) != 1) step++;
    for (int64_t i = 0; i < num_blocks; i++) {
        machine.block = block;
        block = (block + step) % num_blocks;
        if (shared_fresh > 0 || i == 0) memset(shared, 0xFF, GAP);
        shared_fresh = GAP;
        int32_t found = FINE;
        if (is_loop) run_loop(num_threads);
        else found = run_block(num_threads / WARP, trouble);
        if (found == FINE && status != FINE) found = tell(trouble, status, machine.thread, 0);
        if (found == FINE) found = check_block(num_threads, trouble);
        if (found != FINE) { /* the fibers stand amid the text: they begin anew */
            for (int32_t thread = 0; thread < MAX_THREADS; thread++) fibers[thread].has_stack = 0;
            return found;
        }
    }
    return FINE;
}
