/* Which levels this machine can run. */
#include <string.h>

#include "level.h"

/* Not 0 if the machine has what the level of this name needs. */
EXPORT int tierkv_can_run(const char *level) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    int v2 = __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("popcnt");
    int v3 = v2 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
             __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
    int v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
             __builtin_cpu_supports("avx512vl");
    if (strcmp(level, "v2") == 0) return v2;
    if (strcmp(level, "v3") == 0) return v3;
    if (strcmp(level, "v4") == 0) return v4;
    if (strcmp(level, "v4-bf16") == 0) return v4 && __builtin_cpu_supports("avx512bf16");
    return 0;
#else
    return strcmp(level, "neon") == 0;
#endif
}

/* The digest of the sources that this library was made from. */
EXPORT const char *tierkv_sources(void) { return TIERKV_SOURCES; }
