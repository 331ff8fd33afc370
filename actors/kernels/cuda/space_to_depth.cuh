/* Images of 16-bit elements, [images, channels, *places], as [images, *blocks, NAME_WIDTH]. Along an
 * axis of space element b of block p is that of place size p + b + first. The channels of each
 * element of a block are neighbours; zeros stand where there is no place, and behind all channels.
 * A thread makes the channels of one block. Axes of space: three, outermost first.
 */
typedef struct {
    char *target;
    const char *source;
    int64_t num, channels;            /* blocks of all images; of the source */
    int64_t image_step, channel_step; /* of the source, in bytes, as steps are */
    int64_t blocks[3], places[3], sizes[3], first[3], steps[3];
} NAME_arguments;

AF_KERNEL NAME(AF_ARGUMENTS(NAME) arguments) {
    const NAME_arguments *a = &arguments;
    const int64_t i = AF_BLOCK * AF_NUM_THREADS + AF_THREAD;
    if (i >= a->num) return;
    /* Tensors of the library have fewer than 2^31 elements. */
    uint32_t rest = (uint32_t)i;
    int32_t begin[3], at[3] = {0, 0, 0}, channel = 0;
    AF_UNROLL
    for (int32_t axis = 2; axis >= 0; axis--) {
        const uint32_t count = (uint32_t)a->blocks[axis], next = count == 1 ? rest : rest / count;
        const int32_t block = count == 1 ? 0 : (int32_t)(rest - next * count);
        begin[axis] = block * (int32_t)a->sizes[axis] + (int32_t)a->first[axis];
        rest = next;
    }
    const char *image = a->source + rest * a->image_step;
    uint16_t row[NAME_WIDTH];
    AF_UNROLL
    for (int32_t c = 0; c < NAME_WIDTH; c++) {
        const char *from = image + channel * a->channel_step;
        int is_inside = at[0] < (int32_t)a->sizes[0];
        AF_UNROLL
        for (int32_t axis = 0; axis < 3; axis++) {
            const int32_t place = begin[axis] + at[axis];
            is_inside &= place >= 0 && place < (int32_t)a->places[axis];
            from += place * a->steps[axis];
        }
        row[c] = is_inside ? *(const uint16_t *)from : 0;
        /* The next channel; behind the last one the next element, of the last axis first. */
        if (++channel < (int32_t)a->channels) continue;
        channel = 0;
        if (++at[2] < (int32_t)a->sizes[2]) continue;
        at[2] = 0;
        if (++at[1] < (int32_t)a->sizes[1]) continue;
        at[1] = 0, at[0]++;
    }
    uint32_t words[NAME_WIDTH / 2];
    AF_UNROLL
    for (int32_t c = 0; c < NAME_WIDTH / 2; c++)
        words[c] = (uint32_t)row[2 * c + 1] << 16 | row[2 * c];
    af_put(a->target + i * NAME_WIDTH * 2, words, NAME_WIDTH * 2);
}
