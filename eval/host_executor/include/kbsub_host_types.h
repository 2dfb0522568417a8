// CUDA's vector types with CUDA's alignments, and dim3.
#pragma once

#define KBSUB_VECTOR(type, element, alignment2, alignment4) \
    struct __attribute__((aligned(alignment2))) type##2 { element x, y; }; \
    struct type##3 { element x, y, z; }; \
    struct __attribute__((aligned(alignment4))) type##4 { element x, y, z, w; }; \
    inline type##2 make_##type##2(element x, element y) { return type##2{x, y}; } \
    inline type##3 make_##type##3(element x, element y, element z) { return type##3{x, y, z}; } \
    inline type##4 make_##type##4(element x, element y, element z, element w) { return type##4{x, y, z, w}; }
KBSUB_VECTOR(char, signed char, 2, 4)
KBSUB_VECTOR(uchar, unsigned char, 2, 4)
KBSUB_VECTOR(short, short, 4, 8)
KBSUB_VECTOR(ushort, unsigned short, 4, 8)
KBSUB_VECTOR(int, int, 8, 16)
KBSUB_VECTOR(uint, unsigned, 8, 16)
KBSUB_VECTOR(float, float, 8, 16)
KBSUB_VECTOR(longlong, long long, 16, 16)
KBSUB_VECTOR(ulonglong, unsigned long long, 16, 16)
KBSUB_VECTOR(double, double, 16, 16)
#undef KBSUB_VECTOR

struct dim3 {
    unsigned x, y, z;
};
