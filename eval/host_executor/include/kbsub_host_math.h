// Arithmetic intrinsics. IEEE, round to nearest even, subnormals kept: compiled with -ffp-contract=off, so that what
// is not written as an fma is not one. rsqrtf is correctly rounded here; the device's may be off by an ulp or two.
#pragma once

inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.f / a; }
inline float __fsqrt_rn(float a) { return __builtin_sqrtf(a); }
inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dsub_rn(double a, double b) { return a - b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline double __drcp_rn(double a) { return 1. / a; }
inline double __dsqrt_rn(double a) { return __builtin_sqrt(a); }
inline double __fma_rn(double a, double b, double c) { return __builtin_fma(a, b, c); }
// 64 bits of significand: the second rounding, to 24 bits, cannot meet a tie that the first one made.
inline float rsqrtf(float a) { return (float)(1.L / __builtin_sqrtl((long double)a)); }
inline float __frsqrt_rn(float a) { return rsqrtf(a); }
inline double rsqrt(double a) { return (double)(1.L / __builtin_sqrtl((long double)a)); }

inline float sqrtf(float a) { return __builtin_sqrtf(a); }
inline double sqrt(double a) { return __builtin_sqrt(a); }
inline float fabsf(float a) { return __builtin_fabsf(a); }
inline double fabs(double a) { return __builtin_fabs(a); }
inline float fmaf(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline double fma(double a, double b, double c) { return __builtin_fma(a, b, c); }
inline float fminf(float a, float b) { return __builtin_fminf(a, b); }
inline float fmaxf(float a, float b) { return __builtin_fmaxf(a, b); }
inline double fmin(double a, double b) { return __builtin_fmin(a, b); }
inline double fmax(double a, double b) { return __builtin_fmax(a, b); }
inline bool isnan(float a) { return __builtin_isnan(a); }
inline bool isnan(double a) { return __builtin_isnan(a); }
inline bool isinf(float a) { return __builtin_isinf(a); }
inline bool isinf(double a) { return __builtin_isinf(a); }
inline bool isfinite(float a) { return __builtin_isfinite(a); }
inline bool isfinite(double a) { return __builtin_isfinite(a); }

#define KBSUB_MINMAX(type) \
    inline type min(type a, type b) { return b < a ? b : a; } \
    inline type max(type a, type b) { return a < b ? b : a; }
KBSUB_MINMAX(int)
KBSUB_MINMAX(unsigned)
KBSUB_MINMAX(long)
KBSUB_MINMAX(unsigned long)
KBSUB_MINMAX(long long)
KBSUB_MINMAX(unsigned long long)
#undef KBSUB_MINMAX
inline float min(float a, float b) { return __builtin_fminf(a, b); }
inline float max(float a, float b) { return __builtin_fmaxf(a, b); }
inline double min(double a, double b) { return __builtin_fmin(a, b); }
inline double max(double a, double b) { return __builtin_fmax(a, b); }

inline float __int2float_rn(int a) { return (float)a; }
inline float __uint2float_rn(unsigned a) { return (float)a; }
inline float __ll2float_rn(long long a) { return (float)a; }
inline float __double2float_rn(double a) { return (float)a; }
inline double __int2double_rn(int a) { return (double)a; }
inline double __ll2double_rn(long long a) { return (double)a; }
inline int __popc(unsigned a) { return __builtin_popcount(a); }
inline int __ffs(int a) { return __builtin_ffs(a); }
inline int __clz(int a) { return a ? __builtin_clz((unsigned)a) : 32; }

template <class To, class From>
inline To kbsub_bits(From from)
{
    static_assert(sizeof(To) == sizeof(From));
    To to;
    __builtin_memcpy(&to, &from, sizeof to);
    return to;
}
inline unsigned __float_as_uint(float a) { return kbsub_bits<unsigned>(a); }
inline int __float_as_int(float a) { return kbsub_bits<int>(a); }
inline float __uint_as_float(unsigned a) { return kbsub_bits<float>(a); }
inline float __int_as_float(int a) { return kbsub_bits<float>(a); }
inline int __double2hiint(double a) { return (int)(kbsub_bits<unsigned long long>(a) >> 32); }
inline int __double2loint(double a) { return (int)kbsub_bits<unsigned long long>(a); }
inline double __hiloint2double(int high, int low)
{
    return kbsub_bits<double>((unsigned long long)(unsigned)high << 32 | (unsigned)low);
}
inline long long __double_as_longlong(double a) { return kbsub_bits<long long>(a); }
inline double __longlong_as_double(long long a) { return kbsub_bits<double>(a); }

// ---- half and bfloat16: candidates keep them as unsigned short (NVRTC has no cuda_fp16.h of its own) ----
inline float half_to_float(unsigned short h)
{
    const unsigned sign = (unsigned)(h & 0x8000u) << 16, exponent = h >> 10 & 31u, fraction = h & 0x3ffu;
    if (exponent == 31u)
        return __uint_as_float(sign | 0x7f800000u | fraction << 13);
    if (exponent == 0u) {  // zero and subnormals: the fraction counts units of 2^-24, exact in fp32
        const float magnitude = (float)fraction * 0x1p-24f;
        return sign ? -magnitude : magnitude;
    }
    return __uint_as_float(sign | (exponent + 112u) << 23 | fraction << 13);
}

inline unsigned short float_to_half(float value)  // cvt.rn.f16.f32; a NaN becomes 0x7fff, as on the device
{
    const unsigned bits = __float_as_uint(value), magnitude = bits & 0x7fffffffu;
    const unsigned short sign = (unsigned short)(bits >> 16 & 0x8000u);
    if (magnitude > 0x7f800000u)
        return 0x7fff;
    if (magnitude >= 0x477ff000u)  // 65520 and above round to infinity
        return sign | 0x7c00;
    if (magnitude < 0x38800000u)  // below 2^-14: round to a multiple of 2^-24; adding 0.5 (ulp 2^-24) does just that
        return sign | (unsigned short)(__float_as_uint(__uint_as_float(magnitude) + 0.5f) - 0x3f000000u);
    const unsigned rounded = magnitude + 0xfffu + (magnitude >> 13 & 1u);
    return sign | (unsigned short)((rounded - 0x38000000u) >> 13);
}

inline unsigned short float_to_bfloat16(float value)  // cvt.rn.bf16.f32; a NaN becomes 0x7fff
{
    const unsigned bits = __float_as_uint(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u)
        return 0x7fff;
    return (unsigned short)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

// ---- half arithmetic: each operation rounded once, to half. fp32 has 24 >= 2 * 11 + 2 bits, so that rounding a sum, a
// difference or a product to fp32 first changes nothing. Subnormal halves are kept, as by PTX add.rn.f16 and its kin.
inline unsigned short half_add(unsigned short a, unsigned short b)
{
    return float_to_half(half_to_float(a) + half_to_float(b));
}
inline unsigned short half_sub(unsigned short a, unsigned short b)
{
    return float_to_half(half_to_float(a) - half_to_float(b));
}
inline unsigned short half_mul(unsigned short a, unsigned short b)
{
    return float_to_half(half_to_float(a) * half_to_float(b));
}
inline unsigned short half_fma(unsigned short a, unsigned short b, unsigned short c)
{
    // 64 bits of significand hold the product and the sum exactly; rounding to odd keeps fp32 from making a tie.
    const long double exact = (long double)(half_to_float(a) * half_to_float(b)) + (long double)half_to_float(c);
    const float near = (float)exact;
    unsigned bits = __float_as_uint(near);
    if ((long double)near != exact && !__builtin_isnan(near) && !__builtin_isinf(near)) {
        if (__builtin_fabsl((long double)near) > __builtin_fabsl(exact))
            --bits;
        bits |= 1u;
    }
    return float_to_half(__uint_as_float(bits));
}

// Two halves in a word, the first in the low bits.
#define KBSUB_HALF2(low, high) ((unsigned)(low) | (unsigned)(high) << 16)
inline unsigned short kbsub_low(unsigned pair) { return (unsigned short)(pair & 0xffffu); }
inline unsigned short kbsub_high(unsigned pair) { return (unsigned short)(pair >> 16); }
inline unsigned half2_add(unsigned a, unsigned b)
{
    return KBSUB_HALF2(half_add(kbsub_low(a), kbsub_low(b)), half_add(kbsub_high(a), kbsub_high(b)));
}
inline unsigned half2_sub(unsigned a, unsigned b)
{
    return KBSUB_HALF2(half_sub(kbsub_low(a), kbsub_low(b)), half_sub(kbsub_high(a), kbsub_high(b)));
}
inline unsigned half2_mul(unsigned a, unsigned b)
{
    return KBSUB_HALF2(half_mul(kbsub_low(a), kbsub_low(b)), half_mul(kbsub_high(a), kbsub_high(b)));
}
inline unsigned half2_fma(unsigned a, unsigned b, unsigned c)
{
    return KBSUB_HALF2(
        half_fma(kbsub_low(a), kbsub_low(b), kbsub_low(c)), half_fma(kbsub_high(a), kbsub_high(b), kbsub_high(c)));
}
inline unsigned floats_to_half2(float low, float high) { return KBSUB_HALF2(float_to_half(low), float_to_half(high)); }
inline unsigned floats_to_bfloat162(float low, float high)
{
    return KBSUB_HALF2(float_to_bfloat16(low), float_to_bfloat16(high));
}
#undef KBSUB_HALF2
