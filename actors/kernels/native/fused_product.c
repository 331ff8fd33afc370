/* A product whose epilogue is a fused program: what comes before and behind its rows. */
#include "runtime.h"

enum { PRODUCT, PRODUCT_BLOCK, FINISH, PROGRAM_BLOCK, STATUS };

AF_EXPORT int32_t af_fused_product(void *arguments) {
    const af_word *a = arguments;
    af_word *program = a[PROGRAM_BLOCK].p;
    program[a[STATUS].i].i = 0;
    int32_t status = ((af_launch)a[PRODUCT].p)(a[PRODUCT_BLOCK].p);
    if (status) return status;
    ((void (*)(void *))a[FINISH].p)(program);
    return program[a[STATUS].i].i != 0;
}
