/* Three ranks as threads of one program, for sanitizers: the text of meet.c stands before this. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#define RANKS 3
#define LARGE 20001
#define SMALL 100
#define ROUNDS 1000

static af_line own_lines[RANKS];
static char own_staging[RANKS][2 * 16384];
static float large[RANKS][LARGE], small[RANKS][SMALL];
static af_line *lines[RANKS];
static char *staging[RANKS], *rows[RANKS][1];
static char *const *tables[RANKS];
static const int32_t processes[RANKS] = {-1, -1, -1};

static void check(int is_right, const char *what) {
    if (is_right) return;
    puts(what);
    exit(1);
}

static void *rank_of(void *number) {
    const int64_t rank = (intptr_t)number;
    af_group group = {.num_ranks = RANKS, .own = rank, .deadline_ns = 60000000000LL,
                      .staging_bytes = 16384, .lines = lines, .staging = staging,
                      .processes = processes};
    uint64_t firings[2] = {0, 0};
    af_meeting in_place = {.group = &group, .digest = 7, .firings = &firings[0], .op = ALL_REDUCE,
                           .dtype = 1, .itemsize = 4, .num_elements = LARGE,
                           .input_bytes = sizeof large[0], .input = (char *)large[rank],
                           .output = (char *)large[rank], .inputs_of = tables,
                           .outputs_of = tables};
    af_meeting aside = {.group = &group, .digest = 9, .firings = &firings[1], .op = ALL_REDUCE,
                        .dtype = 1, .itemsize = 4, .num_elements = SMALL, .is_aside = 1,
                        .input_bytes = sizeof small[0], .input = (char *)small[rank],
                        .output = (char *)small[rank]};
    for (int64_t round = 0; round < ROUNDS; round++) {
        for (int64_t i = 0; i < LARGE; i += 37) large[rank][i] = (float)(round + rank);
        check(!af_meet(&in_place), "a meeting in place failed");
        for (int64_t i = 0; i < LARGE; i += 37) check(large[rank][i] == 3 * round + 3, "large");
        for (int64_t i = 0; i < SMALL; i++) small[rank][i] = (float)(round * rank);
        check(!af_meet(&aside), "a meeting aside failed");
        check(small[rank][SMALL - 1] == 3 * round, "small");
        check(!af_meet(&aside), "a meeting aside right after another one failed");
        check(small[rank][SMALL - 1] == 9 * round, "twice");
    }
    return NULL;
}

int main(void) {
    pthread_t threads[RANKS];
    for (int64_t rank = 0; rank < RANKS; rank++) {
        lines[rank] = &own_lines[rank];
        staging[rank] = own_staging[rank];
        rows[rank][0] = (char *)large[rank];
        tables[rank] = rows[rank];
    }
    for (int64_t rank = 0; rank < RANKS; rank++)
        pthread_create(&threads[rank], NULL, rank_of, (void *)(intptr_t)rank);
    for (int64_t rank = 0; rank < RANKS; rank++) pthread_join(threads[rank], NULL);
    puts("met");
    return 0;
}
