/* The floor under chain hashes: a loop over the system's own xxh3, in C.
 *
 *   hashes FILE BLOCK_BYTES COUNT
 *
 * FILE holds the 16 bytes before the first block, then blocks of BLOCK_BYTES. Prints u64
 * nanoseconds of each of COUNT passes over all blocks, then the last chain hash (16 bytes).
 * Exits with 3 if there is no libxxhash. */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { HASH = 16 };

typedef struct {
    uint64_t low, high;
} Hash128;

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

int main(int argc, char **argv) {
    if (argc != 4) return 2;
    void *library = dlopen("libxxhash.so.0", RTLD_NOW);
    Hash128 (*xxh3)(const void *, size_t) = 0;
    if (library) *(void **)&xxh3 = dlsym(library, "XXH3_128bits");
    if (!xxh3) return 3;
    FILE *file = fopen(argv[1], "rb");
    size_t block = strtoul(argv[2], 0, 10), count = strtoul(argv[3], 0, 10);
    if (!file || fseek(file, 0, SEEK_END)) return 1;
    size_t blocks = ((size_t)ftell(file) - HASH) / block;
    rewind(file);
    unsigned char seed[HASH], *payload = malloc(blocks * block), *hashed = malloc(HASH + block);
    if (fread(seed, 1, HASH, file) != HASH) return 1;
    if (fread(payload, block, blocks, file) != blocks) return 1;
    unsigned char *names = malloc(blocks * HASH);
    uint64_t *spent = calloc(count, sizeof *spent);
    for (size_t round = 0; round < count; round++) {
        uint64_t began = now_ns();
        memcpy(hashed, seed, HASH);
        for (size_t i = 0; i < blocks; i++) {
            memcpy(hashed + HASH, payload + i * block, block);
            Hash128 hash = xxh3(hashed, HASH + block);
            uint64_t high = __builtin_bswap64(hash.high), low = __builtin_bswap64(hash.low);
            memcpy(hashed, &high, 8);
            memcpy(hashed + 8, &low, 8);
            memcpy(names + i * HASH, hashed, HASH);
        }
        spent[round] = now_ns() - began;
    }
    fwrite(spent, sizeof *spent, count, stdout);
    fwrite(names + (blocks - 1) * HASH, 1, HASH, stdout);
    return 0;
}
