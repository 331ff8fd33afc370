/* Sine and cosine of a float, of any size, which vectorise as the functions of af_math.h do. The
 * largest errors, in units of the last place over every float32:
 *
 *   af_sinf 1.0    af_cosf 1.0
 *
 * An angle is x = m 2^e with a whole m below 2^24. A large one is first taken modulo whole turns, by
 * a table of 2^e modulo 2 pi in two parts: the upper one has 29 bits, so that its product with m is
 * exact. Then n quarters are taken away in three parts, of which the first two have 26 bits and leave
 * exact products, and exact differences wherever much cancels.
 */
#ifndef AF_ANGLES_H
#define AF_ANGLES_H

#include "af_math.h"

/* By e: 2^e modulo a turn, and 2^0 as it is; the last is of infinities and of what is no number. */
static const double AF_TURN_HIGH[] = {
    0x1p+0, 0x1p+1, -0x1.243f6a9p+1, 0x1.b7812afp+0, -0x1.6cbe3fap+1, 0x1.2b0bad5p-1,
    0x1.2b0bad5p+0, 0x1.2b0bad5p+1, -0x1.9c501fcp+0, 0x1.87ef4adp+1, -0x1.460d4edp-3,
    -0x1.460d4edp-2, -0x1.460d4edp-1, -0x1.460d4edp+0, -0x1.460d4edp+1, 0x1.304999dp+0,
    0x1.304999dp+1, -0x1.87586dep+0, -0x1.87586dep+1, 0x1.58e8ec1p-3, 0x1.58e8ec1p-2,
    0x1.58e8ec1p-1, 0x1.58e8ec1p+0, 0x1.58e8ec1p+1, -0x1.c9b6499p-1, -0x1.c9b6499p+0,
    0x1.5a8921p+1, -0x1.bcb4a24p-1, -0x1.bcb4a24p+0, 0x1.678ac85p+1, -0x1.54a767dp-1,
    -0x1.54a767dp+0, -0x1.54a767dp+1, 0x1.ebc26b9p-1, 0x1.ebc26b9p+0, -0x1.387cfefp+1,
    0x1.668ad94p+0, 0x1.668ad94p+1, -0x1.5ca6dffp-1, -0x1.5ca6dffp+0, -0x1.5ca6dffp+1,
    0x1.abc6aadp-1, 0x1.abc6aadp+0, -0x1.7878bfcp+1, 0x1.9a6f588p-2, 0x1.9a6f588p-1,
    0x1.9a6f588p+0, -0x1.89d012p+1, 0x1.09f4684p-3, 0x1.09f4684p-2, 0x1.09f4684p-1, 0x1.09f4684p+0,
    0x1.09f4684p+1, -0x1.10569a1p+1, 0x1.0392367p+1, -0x1.1d1afdbp+1, 0x1.d412de5p+0,
    -0x1.502c8c4p+1, 0x1.07cca43p+0, 0x1.07cca43p+1, -0x1.14a6223p+1, 0x1.f5e64c5p+0,
    -0x1.2e591e3p+1, 0x1.8f1a5c4p+0, 0x1.8f1a5c4p+1, -0x1.82ac837p-5, -0x1.82ac837p-4,
    -0x1.82ac837p-3, -0x1.82ac837p-2, -0x1.82ac837p-1, -0x1.82ac837p+0, -0x1.82ac837p+1,
    0x1.ee66399p-3, 0x1.ee66399p-2, 0x1.ee66399p-1, 0x1.ee66399p+0, -0x1.35d931p+1, 0x1.711a111p+0,
    0x1.711a111p+1, -0x1.082d21ap-1, -0x1.082d21ap+0, -0x1.082d21ap+1, 0x1.13e5275p+1,
    -0x1.f8ea37dp+0, 0x1.2b5532cp+1, -0x1.9b2a0a2p+0, 0x1.8915606p+1, -0x1.214a9b9p-3,
    -0x1.214a9b9p-2, -0x1.214a9b9p-1, -0x1.214a9b9p+0, -0x1.214a9b9p+1, 0x1.c35466dp+0,
    -0x1.60eb03cp+1, 0x1.89a58c4p-1, 0x1.89a58c4p+0, 0x1.89a58c4p+1, -0x1.0f45205p-3,
    -0x1.0f45205p-2, -0x1.0f45205p-1, -0x1.0f45205p+0, -0x1.0f45205p+1, 0x1.05b529fp+1,
    -0x1.18d516bp+1, 0x1.e52a7a6p+0, NAN,
};
static const double AF_TURN_LOW[] = {
    0x0p+0, 0x0p+0, 0x1.de973dcb3b39ap-29, -0x1.0b4611a626331p-32, 0x1.9bc5b961b1acep-29,
    0x1.63d0d3e0a0805p-31, 0x1.63d0d3e0a0805p-30, 0x1.63d0d3e0a0805p-29, 0x1.4c71cb18f8747p-30,
    -0x1.244ae564858a6p-30, -0x1.6ce9e652942fbp-35, -0x1.6ce9e652942fbp-34, -0x1.6ce9e652942fbp-33,
    -0x1.6ce9e652942fbp-32, -0x1.6ce9e652942fbp-31, -0x1.2a1861e90aa2fp-30, -0x1.2a1861e90aa2fp-29,
    -0x1.d666181b6831p-31, -0x1.d666181b6831p-30, 0x1.6055432b92ab6p-34, 0x1.6055432b92ab6p-33,
    0x1.6055432b92ab6p-32, 0x1.6055432b92ab6p-31, 0x1.6055432b92ab6p-30, 0x1.f76407b66f27fp-32,
    0x1.f76407b66f27fp-31, -0x1.c5ca73e0074b5p-30, 0x1.8ccc9eb33ee4bp-33, 0x1.8ccc9eb33ee4bp-32,
    -0x1.7b64161e6b807p-29, -0x1.830ee719bc742p-33, -0x1.830ee719bc742p-32, -0x1.830ee719bc742p-31,
    0x1.7f853a9f9a315p-31, 0x1.7f853a9f9a315p-30, -0x1.43c70f2a552a3p-30, 0x1.bb436614df386p-30,
    0x1.bb436614df386p-29, 0x1.547827d3e6a98p-31, 0x1.547827d3e6a98p-30, 0x1.547827d3e6a98p-29,
    -0x1.ad37711b6f34fp-32, -0x1.ad37711b6f34fp-31, 0x1.07fb853d839f2p-29, 0x1.8afe657e60255p-32,
    0x1.8afe657e60255p-31, 0x1.8afe657e60255p-30, -0x1.2cd4b96cc9422p-30, -0x1.6d7ee7008f78ap-34,
    -0x1.6d7ee7008f78ap-33, -0x1.6d7ee7008f78ap-32, -0x1.6d7ee7008f78ap-31, -0x1.6d7ee7008f78ap-30,
    0x1.c4615b2aaf041p-31, -0x1.f8cd206bc76f2p-30, -0x1.a35e2a08c3589p-33, -0x1.303030c53a4afp-33,
    0x1.b89137b293f04p-29, -0x1.b5d339984d648p-31, -0x1.b5d339984d648p-30, 0x1.462021976ea92p-32,
    0x1.cbc32a6a81c2ap-31, -0x1.3b872cff83e51p-29, -0x1.56965f290c0efp-31, -0x1.56965f290c0efp-30,
    -0x1.ffc8577435554p-35, -0x1.ffc8577435554p-34, -0x1.ffc8577435554p-33, -0x1.ffc8577435554p-32,
    -0x1.ffc8577435554p-31, -0x1.ffc8577435554p-30, -0x1.ffc8577435554p-29, -0x1.e27ecb3a5e429p-33,
    -0x1.e27ecb3a5e429p-32, -0x1.e27ecb3a5e429p-31, -0x1.e27ecb3a5e429p-30, -0x1.f3c6b791847c5p-36,
    0x1.999a7567eb471p-33, 0x1.999a7567eb471p-32, 0x1.13f76c94d82d9p-31, 0x1.13f76c94d82d9p-30,
    0x1.13f76c94d82d9p-29, 0x1.255e6d79d485fp-31, 0x1.c519d22095f25p-31, -0x1.f814a975e080fp-30,
    -0x1.97d6baaa5474cp-33, 0x1.ee6deadf7a37dp-29, -0x1.233b1d7415b3ap-35, -0x1.233b1d7415b3ap-34,
    -0x1.233b1d7415b3ap-33, -0x1.233b1d7415b3ap-32, -0x1.233b1d7415b3ap-31, -0x1.c0d33215184dcp-31,
    0x1.fc5b49815e257p-30, 0x1.dc40bb622ebdap-33, 0x1.dc40bb622ebdap-32, 0x1.dc40bb622ebdap-31,
    0x1.96f36f8a530ep-34, 0x1.96f36f8a530ep-33, 0x1.96f36f8a530ep-32, 0x1.96f36f8a530ep-31,
    0x1.96f36f8a530ep-30, -0x1.1e8f3903a0ae8p-31, 0x1.4f4fa1496ae26p-29, 0x1.8010098f35163p-30,
    NAN,
};

/* The sine of x and so many quarters of a turn. */
AF_INLINE float af_sine(float x, int32_t quarters) {
    int32_t e = (int32_t)((af_bits_of(x) & 0x7fffffffu) >> 23) - 150;
    e = e < 0 ? 0 : e;
    const double m = x * af_power_of_2(-e), p = m * AF_TURN_HIGH[e], less = m * AF_TURN_LOW[e];
    const double shifted = (p + less) * 0x1.45f306dc9c883p-1 + 0x1.8p52, n = shifted - 0x1.8p52;
    const double rest = ((p - n * 0x1.921fb58p+0) - n * -0x1.dde974p-27) - n * 0x1.1a62633145c07p-54;
    int64_t whole; /* its low bits are those of n */
    memcpy(&whole, &shifted, sizeof whole);
    const int32_t quarter = (int32_t)whole + quarters;
    const double r = rest + less;
    /* The angle in two floats, and 1 - z / 2 as well: what each rounds off is added last. */
    const float f = (float)r, low = (float)(r - f), z = f * f, one = af_fmaf(-0.5f, z, 1.0f);
    float s = -0x1.994386p-13f;
    s = af_fmaf(s, z, 0x1.11073ap-7f);
    s = af_fmaf(s, z, -0x1.555546p-3f);
    s = x == 0.0f ? x : af_fmaf(s, f * z, low) + f;
    float c = 0x1.99eb4ap-16f;
    c = af_fmaf(c, z, -0x1.6c0c32p-10f);
    c = af_fmaf(c, z, 0x1.55554ap-5f);
    c = one + af_fmaf(c, z * z, af_fmaf(-0.5f, z, 1.0f - one) - f * low);
    const float y = quarter & 1 ? c : s;
    return quarter & 2 ? -y : y;
}

AF_INLINE float af_sinf(float x) { return af_sine(x, 0); }

AF_INLINE float af_cosf(float x) { return af_sine(x, 1); }

#endif
