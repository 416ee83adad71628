/* What the planner does most, decided and done at once: see tierkv.core.shortcuts.
 *
 * Each function changes nothing and returns NOT_SO where the case is not the simple one. Else the
 * state is then as if the records that it wrote had been applied. NO_ROW: it was broken before, and
 * may be in part what it was and in part what it should be. */
#include <string.h>

#include "rows.h"

enum { SEQ_PUSH = 5, ALLOC = 11, SEAL = 12, DROP = 14 };
#define ROWS_PER_PUSH 12

/* The first place of the log, from ``at`` on, that is not stale. */
static uint64_t next_live(const Touches *touches, uint64_t at) {
    for (; at < touches->tail; at++) {
        if (touches->to <= at && at < touches->from) at = touches->from;
        if (at < touches->tail && touches->entry[touches->log[at]] == at + 1) return at;
    }
    return touches->tail;
}

/* Ask for all that taking the next rows out of the array will look at. */
static void prefetch_group(
    const Blocks *blocks, const Places *places, const Record *records, size_t count
) {
    if (count > GROUP) count = GROUP;
    for (size_t n = 0; n < count; n++) __builtin_prefetch(blocks->hash_lo + records[n].key, 1);
    for (size_t n = 0; n < count; n++)
        __builtin_prefetch(places->places + (blocks->hash_lo[records[n].key] & places->mask), 1);
    for (size_t n = 0; n < count; n++) {
        uint64_t at = blocks->hash_lo[records[n].key] & places->mask;
        for (int ahead = 0; ahead <= BEHIND && places->places[at]; ahead++) {
            __builtin_prefetch(blocks->hash_lo + (places->places[at] - 1));
            at = (at + 1) & places->mask;
        }
    }
}

/* ``count`` blocks leave a tier, the least recently used first. All of it is of one pool, and nobody
 * reads copies there now.
 *
 * Simple is: each of them is in all tiers of ``wanted`` (bits), and in one of ``safe`` or held by
 * nobody. Writes ``count`` DROP records, and counts into ``gone_to`` (TIERS + 1) the best tier that
 * each is left in, or none. */
EXPORT int tierkv_evict(
    Blocks *blocks, Slots *rows, Slots *slots, Touches *touches, Places *places, unsigned tier,
    unsigned wanted, unsigned safe, size_t count, Record *records, int64_t *gone_to
) {
    size_t found = 0;
    uint64_t at = next_live(touches, touches->head);
    for (; found < count && at < touches->tail; at = next_live(touches, at + 1)) {
        size_t row = touches->log[at];
        if (!may_leave(blocks, row, tier)) continue;
        uint8_t where = blocks->where[row];
        if ((where & wanted) != wanted) return NOT_SO;
        if (!(where & safe) && blocks->refs[row]) return NOT_SO;
        records[found++].key = (uint32_t)row;
    }
    if (found < count) return NOT_SO;
    /* Those that could not leave leave the order: they are touched when they can. */
    uint64_t live = next_live(touches, touches->head);
    for (; live < at; live = next_live(touches, live + 1)) {
        touches->entry[touches->log[live]] = 0;
        touches->listed--;
    }
    touches->head = at;
    for (size_t n = 0; n < count; n++) {
        if (n % GROUP == 0) prefetch_group(blocks, places, records + n, count - n);
        Record *record = records + n;
        size_t row = record->key;
        uint32_t slot = blocks->slot[tier][row];
        *record = (Record){.type = DROP, .tier = (uint8_t)tier, .key = (uint32_t)row,
                           .id = blocks->id[row], .loc = slot};
        slots->is[slot] = FREE;
        slots->stack[slots->depth++] = slot;
        blocks->slot[tier][row] = NO_SLOT;
        uint8_t where = blocks->where[row] &= (uint8_t)~bit_of(tier);
        gone_to[where ? __builtin_ctz(where) : TIERS]++;
        if (where) continue;
        if (blocks->flags[row] & INDEXED) {
            if (places_remove(places, blocks, row)) return NO_ROW;
            blocks->flags[row] &= (uint16_t)~INDEXED;
            places->count--;
        }
        if (blocks->refs[row]) continue;
        clear_row(blocks, row);
        rows->is[row] = FREE;
        rows->stack[rows->depth++] = (uint32_t)row;
        rows->used--;
    }
    slots->used -= (int64_t)count;
    return 0;
}

/* A sequence gets ``count`` fresh blocks, the first of id ``first_id``, in rows and slots of a tier
 * that are held. Writes ALLOC and PUSH records. NOT_SO: a row or a slot is not held. */
EXPORT int tierkv_extend(
    Blocks *blocks, Slots *rows, Slots *slots, const int64_t *row_numbers,
    const int64_t *slot_numbers, size_t count, unsigned tier, uint64_t first_id, uint16_t namespace,
    uint64_t sequence, Record *records
) {
    for (size_t n = 0; n < count; n++) {
        if ((uint64_t)row_numbers[n] >= blocks->length) return NO_ROW;
        if (rows->is[row_numbers[n]] != HELD || slots->is[slot_numbers[n]] != HELD) return NOT_SO;
    }
    Record *pushes = records + count;
    memset(pushes, 0, (count + ROWS_PER_PUSH - 1) / ROWS_PER_PUSH * sizeof *pushes);
    for (size_t n = 0; n < count; n++) {
        size_t row = (size_t)row_numbers[n];
        uint32_t slot = (uint32_t)slot_numbers[n];
        records[n] = (Record){.type = ALLOC, .tier = (uint8_t)tier, .aux = namespace,
                              .key = (uint32_t)row, .id = first_id + n, .loc = slot};
        blocks->id[row] = first_id + n;
        blocks->namespace[row] = namespace;
        blocks->slot[tier][row] = slot;
        blocks->where[row] = bit_of(tier);
        blocks->refs[row] = blocks->active[row] = 1;
        rows->is[row] = USED;
        slots->is[slot] = USED;
        Record *push = pushes + n / ROWS_PER_PUSH;
        push->type = SEQ_PUSH;
        push->id = sequence;
        memcpy((uint8_t *)&push->hash_hi + 4 * (size_t)push->aux++, &records[n].key, 4);
    }
    rows->held -= (int64_t)count, rows->used += (int64_t)count;
    slots->held -= (int64_t)count, slots->used += (int64_t)count;
    return 0;
}

/* Open blocks that are one chain get names that nobody has. Writes SEAL records, and the ids of the
 * blocks and of those before them. ``parent``: the id before the first. NOT_SO: one is sealed. */
EXPORT int tierkv_seal(
    Blocks *blocks, const int64_t *rows, size_t count, uint64_t parent, const uint64_t *hash_hi,
    const uint64_t *hash_lo, const uint64_t *extras, const uint64_t *sum_hi, const uint64_t *sum_lo,
    Record *records, uint64_t *ids, uint64_t *parents
) {
    for (size_t n = 0; n < count; n++) {
        if ((uint64_t)rows[n] >= blocks->length) return NO_ROW;
        if (blocks->flags[rows[n]] & SEALED) return NOT_SO;
    }
    for (size_t n = 0; n < count; n++) {
        size_t row = (size_t)rows[n];
        uint64_t id = ids[n] = blocks->id[row];
        parents[n] = parent;
        records[n] = (Record){.type = SEAL, .tier = 1, .key = (uint32_t)row, .id = id,
                              .hash_hi = hash_hi[n], .hash_lo = hash_lo[n], .loc = parent,
                              .gen = extras[n], .extra_hi = sum_hi[n], .extra_lo = sum_lo[n]};
        blocks->hash_hi[row] = hash_hi[n];
        blocks->hash_lo[row] = hash_lo[n];
        blocks->parent[row] = parent;
        blocks->sum_hi[row] = sum_hi[n];
        blocks->sum_lo[row] = sum_lo[n];
        blocks->flags[row] = SEALED | INDEXED;
        parent = id;
    }
    return 0;
}
