/* Three ranks as threads of one program, for sanitizers: the text of meet.c stands before this. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#define RANKS 3
#define LARGE 20001
#define SMALL 100
#define PART 5001 /* of each rank, in place */
#define FEW 50    /* aside */
#define ROUNDS 1000

static af_line own_lines[RANKS], pair_lines[2];
static char own_staging[RANKS][2 * 16384], pair_staging[2][2 * 16384];
static float whole[RANKS][RANKS * PART], part[RANKS][PART]; /* in place */
static float few_whole[RANKS][RANKS * FEW], few[RANKS][FEW];
static char *whole_rows[RANKS][1], *part_rows[RANKS][1];
static char *const *whole_of[RANKS], *const *part_of[RANKS];
static af_line *pair[2];
static char *pair_aside[2];
static float large[RANKS][LARGE], small[RANKS][SMALL];
static af_line *lines[RANKS];
static char *staging[RANKS], *rows[RANKS][1];
static char *const *tables[RANKS];
static const int32_t processes[RANKS] = {-1, -1, -1};
static const int32_t order[] = {0, 1, JOIN, 2, JOIN, END};

static void check(int is_right, const char *what) {
    if (is_right) return;
    puts(what);
    exit(1);
}

static af_region block(int64_t from, int64_t to, int64_t elements) {
    return (af_region){.extents = {1, 1, 1}, .from_offset = 4 * from, .to_offset = 4 * to,
                       .run_bytes = 4 * elements};
}

static void fill(float *to, int64_t count, float value) {
    for (int64_t i = 0; i < count; i++) to[i] = value;
}

/* Scatters sums and gathers them again, in place and aside; rank 0 hands rank 1 its part. */
static void move(af_group *group, af_group *two, uint64_t *firings, int64_t round) {
    const int64_t own = group->own;
    af_region places[RANKS], few_places[RANKS];
    const af_region slice = block(own * PART, 0, PART), few_slice = block(own * FEW, 0, FEW);
    for (int64_t rank = 0; rank < RANKS; rank++) {
        places[rank] = block(0, own * PART, PART);
        few_places[rank] = block(0, rank * FEW, FEW);
    }
    const af_meeting base = {.group = group, .dtype = 1, .itemsize = 4, .order = order};
    af_meeting scatter = base, gather = base, few_scatter = base, few_gather = base;
    scatter.digest = 11, scatter.firings = &firings[0], scatter.op = REDUCE_SCATTER;
    scatter.input = (char *)whole[own], scatter.output = (char *)part[own];
    scatter.inputs_of = whole_of, scatter.outputs_of = part_of, scatter.regions = &slice;
    scatter.input_bytes = sizeof whole[0];
    gather.digest = 12, gather.firings = &firings[1], gather.op = MOVE;
    gather.input = (char *)part[own], gather.output = (char *)whole[own];
    gather.inputs_of = part_of, gather.outputs_of = whole_of, gather.regions = places;
    gather.input_bytes = sizeof part[0];
    few_scatter.digest = 13, few_scatter.firings = &firings[2], few_scatter.op = REDUCE_SCATTER;
    few_scatter.is_aside = 1, few_scatter.regions = &few_slice;
    few_scatter.input = (char *)few_whole[own], few_scatter.output = (char *)few[own];
    few_scatter.input_bytes = sizeof few_whole[0];
    few_gather.digest = 14, few_gather.firings = &firings[3], few_gather.op = MOVE;
    few_gather.is_aside = 1, few_gather.regions = few_places;
    few_gather.input = (char *)few[own], few_gather.output = (char *)few_whole[own];
    few_gather.input_bytes = sizeof few[0];

    fill(whole[own], RANKS * PART, (float)(round + own));
    check(!af_meet(&scatter), "a scatter failed");
    check(part[own][0] == 3 * round + 3 && part[own][PART - 1] == 3 * round + 3, "scattered");
    fill(part[own], PART, (float)(round * own));
    check(!af_meet(&gather), "a gather failed");
    for (int64_t rank = 0; rank < RANKS; rank++)
        check(whole[own][(rank + 1) * PART - 1] == round * rank, "gathered");
    fill(few_whole[own], RANKS * FEW, (float)(round + own));
    check(!af_meet(&few_scatter), "a scatter aside failed");
    check(few[own][FEW - 1] == 3 * round + 3, "scattered aside");
    fill(few[own], FEW, (float)(round * own));
    check(!af_meet(&few_gather), "a gather aside failed");
    for (int64_t rank = 0; rank < RANKS; rank++)
        check(few_whole[own][rank * FEW] == round * rank, "gathered aside");
    if (own == 2) return;
    const af_region all = block(0, 0, PART), some = block(0, 0, FEW);
    af_meeting send = base, few_send = base;
    send.group = two, send.digest = 15, send.firings = &firings[4], send.op = TRANSFER;
    send.input = (char *)part[0], send.output = (char *)part[1], send.regions = &all;
    send.inputs_of = part_of, send.outputs_of = part_of;
    few_send.group = two, few_send.digest = 16, few_send.firings = &firings[5];
    few_send.op = TRANSFER, few_send.is_aside = 1, few_send.regions = &some;
    few_send.input = (char *)few[0], few_send.output = (char *)few[1];
    few_send.input_bytes = own ? 0 : sizeof few[0];
    if (!own) fill(part[0], PART, (float)(7 * round)), fill(few[0], FEW, (float)(5 * round));
    check(!af_meet(&send), "a transfer failed");
    check(!af_meet(&few_send), "a transfer aside failed");
    if (own) check(part[1][PART - 1] == 7 * round && few[1][FEW - 1] == 5 * round, "handed over");
}

static void *rank_of(void *number) {
    const int64_t rank = (intptr_t)number;
    af_group group = {.num_ranks = RANKS, .own = rank, .deadline_ns = 60000000000LL,
                      .staging_bytes = 16384, .lines = lines, .staging = staging,
                      .processes = processes};
    af_group two = {.num_ranks = 2, .own = rank, .deadline_ns = 60000000000LL,
                    .staging_bytes = 16384, .lines = pair, .staging = pair_aside,
                    .processes = processes};
    uint64_t firings[2] = {0, 0}, moved[6] = {0};
    af_meeting in_place = {.group = &group, .digest = 7, .firings = &firings[0], .op = ALL_REDUCE,
                           .dtype = 1, .itemsize = 4, .num_elements = LARGE,
                           .input_bytes = sizeof large[0], .input = (char *)large[rank],
                           .output = (char *)large[rank], .inputs_of = tables,
                           .outputs_of = tables, .order = order};
    af_meeting aside = {.group = &group, .digest = 9, .firings = &firings[1], .op = ALL_REDUCE,
                        .dtype = 1, .itemsize = 4, .num_elements = SMALL, .is_aside = 1,
                        .input_bytes = sizeof small[0], .input = (char *)small[rank],
                        .output = (char *)small[rank], .order = order};
    for (int64_t round = 0; round < ROUNDS; round++) {
        for (int64_t i = 0; i < LARGE; i += 37) large[rank][i] = (float)(round + rank);
        check(!af_meet(&in_place), "a meeting in place failed");
        for (int64_t i = 0; i < LARGE; i += 37) check(large[rank][i] == 3 * round + 3, "large");
        for (int64_t i = 0; i < SMALL; i++) small[rank][i] = (float)(round * rank);
        check(!af_meet(&aside), "a meeting aside failed");
        check(small[rank][SMALL - 1] == 3 * round, "small");
        check(!af_meet(&aside), "a meeting aside right after another one failed");
        check(small[rank][SMALL - 1] == 9 * round, "twice");
        move(&group, &two, moved, round);
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
        whole_rows[rank][0] = (char *)whole[rank], whole_of[rank] = whole_rows[rank];
        part_rows[rank][0] = (char *)part[rank], part_of[rank] = part_rows[rank];
    }
    for (int64_t rank = 0; rank < 2; rank++)
        pair[rank] = &pair_lines[rank], pair_aside[rank] = pair_staging[rank];
    for (int64_t rank = 0; rank < RANKS; rank++)
        pthread_create(&threads[rank], NULL, rank_of, (void *)(intptr_t)rank);
    for (int64_t rank = 0; rank < RANKS; rank++) pthread_join(threads[rank], NULL);
    puts("met");
    return 0;
}
