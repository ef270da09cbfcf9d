/* The paths that this processor supports, and the library's ABI version. */
#include <stdint.h>

/* Changes with any signature or structure; proto/native/__init__.py refuses other versions. */
#define ABI 1

__attribute__((visibility("default"))) int32_t kvstore_loops_abi(void) { return ABI; }

/* A bit for each path: 1 portable, 2 avx2, 4 avx512. */
__attribute__((visibility("default"))) int32_t kvstore_loops_paths(void)
{
    int32_t paths = 1;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2"))
        paths |= 2;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")
        && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")
        && __builtin_cpu_supports("avx512vbmi2"))
        paths |= 4;
#endif
    return paths;
}
