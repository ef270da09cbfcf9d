/* Shared definitions of the loops. Each file is compiled once per path: PATH is avx512, avx2 or
 * portable, and LOOP(name) is the name of an exported function of that path.
 *
 * Functions take plain addresses and sizes; the caller has checked shapes. No content of a frame
 * can move an index out of the arrays. Floats are IEEE 754: files are compiled without
 * contraction, so that all paths and the references write the same bytes.
 */
#ifndef KVSTORE_LOOPS_H
#define KVSTORE_LOOPS_H

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "frames are little-endian, and so are the loops"
#endif

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define KVSTORE_JOIN2(name, path) name##_##path
#define KVSTORE_JOIN(name, path) KVSTORE_JOIN2(name, path)
#define LOOP(name) __attribute__((visibility("default"))) KVSTORE_JOIN(name, PATH)
#define INLINE static inline __attribute__((always_inline))

/* Numbers at any address: the parts of a frame are not aligned. */
typedef uint16_t __attribute__((aligned(1), may_alias)) any16;
typedef int16_t __attribute__((aligned(1), may_alias)) anyi16;
typedef uint32_t __attribute__((aligned(1), may_alias)) any32;
typedef uint64_t __attribute__((aligned(1), may_alias)) any64;
typedef int64_t __attribute__((aligned(1), may_alias)) anyi64;
typedef float __attribute__((aligned(1), may_alias)) anyfloat;

/* Returned when scratch memory cannot be allocated. */
#define NO_MEMORY (-2)

INLINE uint64_t load64(const uint8_t *at)
{
    uint64_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

INLINE uint32_t bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

INLINE float float_of(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

#endif
