/* The floor under a lookup of chain hashes: an open-addressing table, and nothing else.
 *
 *   table HASHES CHAIN COUNT        u64 nanoseconds of each lookup of CHAIN hashes on stdout
 *
 * HASHES is a file of 16-byte hashes; each is put into the table with its number. Looked up are
 * COUNT runs of CHAIN hashes, other ones each time, as they lie in the file. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { AHEAD = 16 };

typedef struct {
    uint64_t a, b;
} Hash;

typedef struct {
    Hash hash;
    uint32_t row; /* + 1; 0 = free */
} Place;

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static Place *find(Place *table, uint64_t mask, const Hash *hash) {
    uint64_t at = hash->a & mask;
    while (table[at].row && (table[at].hash.a != hash->a || table[at].hash.b != hash->b))
        at = (at + 1) & mask;
    return &table[at];
}

int main(int argc, char **argv) {
    if (argc != 4) return 2;
    FILE *file = fopen(argv[1], "rb");
    size_t chain = strtoul(argv[2], 0, 10), count = strtoul(argv[3], 0, 10);
    if (!file || fseek(file, 0, SEEK_END)) return 1;
    size_t hashes = (size_t)ftell(file) / sizeof(Hash);
    rewind(file);
    Hash *all = malloc(hashes * sizeof *all);
    if (chain == 0 || hashes < chain || fread(all, sizeof *all, hashes, file) != hashes) return 1;
    uint64_t size = 1;
    while (size * 2 < hashes * 5) size *= 2; /* load 0.2 to 0.4 */
    Place *table = calloc(size, sizeof *table);
    for (size_t i = 0; i < hashes; i++) {
        Place *place = find(table, size - 1, &all[i]);
        place->hash = all[i];
        place->row = (uint32_t)i + 1;
    }
    uint64_t *spent = calloc(count, sizeof *spent);
    uint32_t *rows = malloc(chain * sizeof *rows);
    size_t chains = hashes / chain;
    for (size_t round = 0; round < count; round++) {
        const size_t first = round % chains * chain;
        const Hash *asked = all + first;
        uint64_t began = now_ns();
        for (size_t i = 0; i < chain; i++) {
            if (i + AHEAD < chain) __builtin_prefetch(&table[asked[i + AHEAD].a & (size - 1)]);
            rows[i] = find(table, size - 1, &asked[i])->row;
        }
        spent[round] = now_ns() - began;
        for (size_t i = 0; i < chain; i++)
            if (rows[i] != first + i + 1) return 1;
    }
    fwrite(spent, sizeof *spent, count, stdout);
    return 0;
}
