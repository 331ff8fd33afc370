/* Sums and maxima of elements that lie in any way, some for each result.
 *
 * NAME_IN is the type of an element and NAME_FROM makes what is joined of one, of the type
 * NAME_TOTAL; NAME_JOIN joins two, beginning with NAME_FIRST; NAME_TO makes a result of the type
 * NAME_OUT of what is left, divided by `divisor` where that means something.
 *
 * A block has some results and shares the elements of each among as many threads, its lanes. Lanes
 * of one result are neighbours where its elements are; else neighbours have different results. Long
 * results are cut into segments, each with a place of its own in the output.
 */
#define NAME_THREADS 256
#define NAME_MAX_AXES 8

typedef struct {
    const char *x;
    char *out;
    int64_t num_results, num_elements;
    int64_t num_kept, kept[NAME_MAX_AXES], x_steps[NAME_MAX_AXES], out_steps[NAME_MAX_AXES];
    int64_t num_outer, outer[NAME_MAX_AXES], outer_steps[NAME_MAX_AXES];
    int64_t inner, inner_step; /* the fastest reduced axis; the outer ones lie around it */
    int64_t lanes, are_lanes_neighbours, num_segments, segment, segment_step;
    double divisor;
} NAME_arguments;

AF_FUNCTION int64_t NAME_offset(
    int64_t place, int64_t num_axes, const int64_t *extents, const int64_t *steps
) {
    int64_t offset = 0;
    for (int64_t axis = num_axes - 1; axis > 0; axis--) {
        offset += place % extents[axis] * steps[axis];
        place /= extents[axis];
    }
    return num_axes ? offset + place * steps[0] : 0;
}

/* Joins elements first + lane, first + lane + lanes, ... before `stop`. */
AF_FUNCTION NAME_TOTAL NAME_joined(
    const NAME_arguments *a, const char *x, int64_t first, int64_t stop
) {
    const int64_t more_outer = a->lanes / a->inner, more_inner = a->lanes % a->inner;
    int64_t outer = first / a->inner, inner = first % a->inner, seen = -1;
    const char *row = x;
    NAME_TOTAL total = NAME_FIRST;
    for (int64_t n = first; n < stop; n += a->lanes) {
        if (outer != seen) {
            row = x + NAME_offset(outer, a->num_outer, a->outer, a->outer_steps);
            seen = outer;
        }
        const NAME_TOTAL value = NAME_FROM(*(const NAME_IN *)(row + inner * a->inner_step));
        total = NAME_JOIN(total, value);
        inner += more_inner;
        outer += more_outer;
        if (inner >= a->inner) {
            inner -= a->inner;
            outer++;
        }
    }
    return total;
}

AF_KERNEL NAME(AF_ARGUMENTS(NAME) arguments) {
    AF_SHARED(NAME_TOTAL, totals, NAME_THREADS);
    const NAME_arguments *a = &arguments;
    const int64_t lanes = a->lanes, num_here = NAME_THREADS / lanes;
    const int64_t num_groups = (a->num_results + num_here - 1) / num_here;
    const int64_t segment = AF_BLOCK / num_groups;
    const int64_t lane = a->are_lanes_neighbours ? AF_THREAD % lanes : AF_THREAD / num_here;
    const int64_t here = a->are_lanes_neighbours ? AF_THREAD / lanes : AF_THREAD % num_here;
    const int64_t next = a->are_lanes_neighbours ? 1 : num_here; /* to the next lane, in threads */
    const int64_t result = AF_BLOCK % num_groups * num_here + here;
    const int64_t first = segment * a->segment, stop = af_min(first + a->segment, a->num_elements);
    NAME_TOTAL total = NAME_FIRST;
    if (result < a->num_results) {
        const char *x = a->x + NAME_offset(result, a->num_kept, a->kept, a->x_steps);
        total = NAME_joined(a, x, first + lane, stop);
    }
    totals[AF_THREAD] = total;
    AF_BARRIER();
    for (int64_t half = lanes / 2; half; half /= 2) {
        if (lane < half) {
            const NAME_TOTAL other = totals[AF_THREAD + half * next];
            total = NAME_JOIN(total, other);
            totals[AF_THREAD] = total;
        }
        AF_BARRIER();
    }
    if (lane == 0 && result < a->num_results) {
        char *out = a->out + segment * a->segment_step;
        out += NAME_offset(result, a->num_kept, a->kept, a->out_steps);
        *(NAME_OUT *)out = NAME_TO(total);
    }
}
