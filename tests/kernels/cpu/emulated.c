/* Runs one call of the CPU kernel: see emulated.py.
 *
 * Reads its memory's size, a struct attention whose pointers are offsets into that memory (~0: NULL),
 * and the memory. Writes the kernel's result and the memory as it is then. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "attention.h"
#include "level.h"
#include "pool.h"

struct pool *tierkv_pool_new(int threads);
int OF_LEVEL(tierkv_attention)(struct pool *pool, const struct attention *call);

static void *at(char *memory, const void *offset) {
    return (uintptr_t)offset == UINTPTR_MAX ? NULL : memory + (uintptr_t)offset;
}

int main(void) {
    uint64_t size;
    struct attention call;
    if (fread(&size, sizeof size, 1, stdin) != 1) return 1;
    if (fread(&call, sizeof call, 1, stdin) != 1) return 1;
    char *memory = malloc(size);
    if (memory == NULL || fread(memory, 1, size, stdin) != size) return 1;
    call.q = at(memory, call.q);
    call.out = at(memory, call.out);
    call.lse = at(memory, call.lse);
    call.k.data = at(memory, call.k.data);
    call.v.data = at(memory, call.v.data);
    call.block_table = at(memory, call.block_table);
    call.seq_lens = at(memory, call.seq_lens);
    call.records = at(memory, call.records);
    call.merge_tokens = at(memory, call.merge_tokens);
    call.merge_indptr = at(memory, call.merge_indptr);
    call.merge_rows = at(memory, call.merge_rows);
    int32_t result = OF_LEVEL(tierkv_attention)(tierkv_pool_new(2), &call);
    return fwrite(&result, sizeof result, 1, stdout) != 1 || fwrite(memory, 1, size, stdout) != size;
}
