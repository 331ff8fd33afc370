/* A loop over the launches of a step. Launches that can be moved are told where the entries of a step
 * lie; for others entries are copied in before them, and out after them. */
#include "runtime.h"

typedef struct {
    char *target;
    const char *source;
    int64_t target_step, source_step, bytes;
} Move;

typedef struct {
    const char **word; /* of a launch's block: where an operand is */
    const char *first; /* in entry 0 */
    int64_t step;
} Window;

typedef struct {
    af_launch step;
    void *arguments;
    af_launch begin; /* what is done once, before the first step */
    void *begin_arguments;
    int64_t num_steps, first, direction;
    int64_t num_firsts, num_in, num_out;
    const Move *moves;
    int64_t num_windows;
    const Window *windows;
} Loop;

static void move(const Move *moves, int64_t count, int64_t at) {
    for (int64_t i = 0; i < count; i++) {
        const Move *m = moves + i;
        if (m->bytes)
            memcpy(m->target + at * m->target_step, m->source + at * m->source_step,
                   (size_t)m->bytes);
    }
}

AF_EXPORT int32_t af_scan(void *arguments) {
    const Loop *loop = arguments;
    const Move *in = loop->moves + loop->num_firsts, *out = in + loop->num_in;
    int32_t failed = loop->begin(loop->begin_arguments);
    if (failed) return failed;
    move(loop->moves, loop->num_firsts, 0);
    for (int64_t i = 0; i < loop->num_steps; i++) {
        int64_t at = loop->first + i * loop->direction;
        for (int64_t w = 0; w < loop->num_windows; w++)
            *loop->windows[w].word = loop->windows[w].first + at * loop->windows[w].step;
        move(in, loop->num_in, at);
        int32_t status = loop->step(loop->arguments);
        if (status) return status;
        move(out, loop->num_out, at);
    }
    return 0;
}
