/* The core's structures as the library sees them. */
#ifndef TIERKV_ROWS_H
#define TIERKV_ROWS_H

#include <stddef.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))
#define TIERS 3
#define DEVICE 0
#define NO_SLOT 0xFFFFFFFFu
#define SEALED 1
#define INDEXED 2
#define PREFETCH_AHEAD 16

/* Keys of the hash table whose cache misses overlap, and how many places behind a row are looked at
 * ahead of its removal: most runs end before. */
#define GROUP 32
#define BEHIND 3

enum { FREE, HELD, USED };
enum { NO_ROW = -1, OTHER_BLOCK = -2, NOT_SO = -3 };

/* tierkv.core.blocks.Blocks: the columns of the block table. */
typedef struct {
    uint64_t *id, *parent, *hash_hi, *hash_lo, *sum_hi, *sum_lo;
    uint16_t *namespace, *flags;
    int32_t *refs, *active;
    uint8_t *where;
    uint32_t *slot[TIERS];
    uint64_t length;
} Blocks;

/* tierkv.core.records.RECORD */
typedef struct {
    uint8_t type, tier;
    uint16_t aux;
    uint32_t key;
    uint64_t id, hash_hi, hash_lo, loc, gen, extra_hi, extra_lo;
} Record;

/* tierkv.core.slots.SlotSet: what each number is, and a stack of free ones. */
typedef struct {
    uint8_t *is;
    uint32_t *stack;
    int64_t depth, used, held;
} Slots;

/* tierkv.core.policy.Lru: entry[row] is the place of the row's latest entry in the log, plus 1. */
typedef struct {
    uint32_t *log, *entry;
    uint64_t head, tail, to, from;
    int64_t listed;
} Touches;

/* tierkv.core.table.Places */
typedef struct {
    uint32_t *places;
    uint64_t mask;
    int64_t count;
} Places;

static inline uint8_t bit_of(unsigned tier) { return (uint8_t)(1u << tier); }

/* tierkv.core.blocks.Blocks.may_leave, of one row. */
static inline int may_leave(const Blocks *blocks, size_t row, unsigned tier) {
    int mapped = tier == DEVICE && blocks->active[row] != 0;
    return (blocks->where[row] & bit_of(tier)) && !mapped;
}

/* Make a row free that has no copy and nobody holds. */
static inline void clear_row(Blocks *blocks, size_t row) {
    blocks->id[row] = blocks->parent[row] = 0;
    blocks->hash_hi[row] = blocks->hash_lo[row] = 0;
    blocks->sum_hi[row] = blocks->sum_lo[row] = 0;
    blocks->namespace[row] = blocks->flags[row] = 0;
    blocks->refs[row] = blocks->active[row] = 0;
    blocks->where[row] = 0;
}

/* Take a row that is there out of the array, which has no tombstones. -1: it is broken. */
int places_remove(const Places *places, const Blocks *blocks, size_t row);

#endif
