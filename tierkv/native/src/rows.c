/* What records do to the rows of tierkv.core.blocks, to tierkv.core.slots and to tierkv.core.policy.
 *
 * Every function looks at all it was given before it changes anything, and returns a negative number
 * if that contradicts what is there. */
#include "rows.h"

/* Each record's row is there, and holds the record's block. */
static int check_blocks(const Blocks *blocks, const Record *records, size_t count) {
    for (size_t n = 0; n < count; n++) {
        size_t ahead = n + PREFETCH_AHEAD;
        if (ahead < count && records[ahead].key < blocks->length) {
            __builtin_prefetch(blocks->id + records[ahead].key);
            __builtin_prefetch(blocks->flags + records[ahead].key);
        }
        if (records[n].key >= blocks->length) return NO_ROW;
        if (blocks->id[records[n].key] != records[n].id) return OTHER_BLOCK;
    }
    return 0;
}

/* Enter new blocks with their first copies. NOT_SO: a row has a copy in that tier, or gets two. */
EXPORT int tierkv_rows_alloc(Blocks *blocks, const Record *records, size_t count) {
    for (size_t n = 0; n < count; n++) {
        const Record *record = records + n;
        if (record->key >= blocks->length || record->tier >= TIERS) return NO_ROW;
        if (blocks->slot[record->tier][record->key] != NO_SLOT) return NOT_SO;
    }
    for (size_t n = 0; n < count; n++) {
        const Record *record = records + n;
        if (blocks->slot[record->tier][record->key] != NO_SLOT) return NOT_SO;
        blocks->id[record->key] = record->id;
        blocks->namespace[record->key] = record->aux;
        blocks->slot[record->tier][record->key] = (uint32_t)record->loc;
        blocks->where[record->key] |= bit_of(record->tier);
    }
    return 0;
}

/* Whether the blocks may be sealed as the records say, whose rows and hashes are taken out. NOT_SO: a
 * block is sealed already. */
EXPORT int tierkv_rows_may_seal(
    const Blocks *blocks, const Record *records, size_t count, int64_t *rows, uint64_t *hash_hi,
    uint64_t *hash_lo
) {
    int wrong = check_blocks(blocks, records, count);
    if (wrong) return wrong;
    for (size_t n = 0; n < count; n++) {
        if (blocks->flags[records[n].key] & SEALED) return NOT_SO;
        rows[n] = records[n].key;
        hash_hi[n] = records[n].hash_hi;
        hash_lo[n] = records[n].hash_lo;
    }
    return 0;
}

/* Give blocks their names. They were found to be there by tierkv_rows_may_seal. */
EXPORT void tierkv_rows_seal(Blocks *blocks, const Record *records, size_t count) {
    for (size_t n = 0; n < count; n++) {
        const Record *record = records + n;
        size_t row = record->key;
        blocks->hash_hi[row] = record->hash_hi;
        blocks->hash_lo[row] = record->hash_lo;
        blocks->parent[row] = record->loc;
        blocks->sum_hi[row] = record->extra_hi;
        blocks->sum_lo[row] = record->extra_lo;
        blocks->flags[row] = record->tier == 1 ? SEALED | INDEXED : SEALED;
    }
}

/* Copies are gone. Puts the rows that have none left into ``gone``; returns how many those are.
 * NOT_SO: a copy is not where a record says. */
EXPORT int64_t tierkv_rows_drop(
    Blocks *blocks, const Record *records, size_t count, int64_t *gone
) {
    int wrong = check_blocks(blocks, records, count);
    if (wrong) return wrong;
    for (size_t n = 0; n < count; n++) {
        const Record *record = records + n;
        if (record->tier >= TIERS) return NO_ROW;
        if (blocks->slot[record->tier][record->key] != record->loc) return NOT_SO;
    }
    int64_t none_left = 0;
    for (size_t n = 0; n < count; n++) {
        size_t row = records[n].key;
        blocks->slot[records[n].tier][row] = NO_SLOT;
        blocks->where[row] &= (uint8_t)~bit_of(records[n].tier);
        if (!blocks->where[row]) gone[none_left++] = (int64_t)row;
    }
    return none_left;
}

static int all_rows(const Blocks *blocks, const int64_t *rows, size_t count) {
    size_t outside = 0;
    for (size_t n = 0; n < count; n++) outside += (uint64_t)rows[n] >= blocks->length;
    return outside == 0;
}

/* One more sequence has each of the rows; ``active``: and maps it. */
EXPORT int tierkv_rows_ref(Blocks *blocks, const uint32_t *rows, size_t count, int active) {
    for (size_t n = 0; n < count; n++)
        if (rows[n] >= blocks->length) return NO_ROW;
    for (size_t n = 0; n < count; n++) {
        blocks->refs[rows[n]]++;
        blocks->active[rows[n]] += active;
    }
    return 0;
}

/* One sequence less. Puts the rows that nobody has any more and nobody can find into ``idle``;
 * returns how many those are. */
EXPORT int64_t tierkv_rows_unref(
    Blocks *blocks, const int64_t *rows, size_t count, int active, int64_t *idle
) {
    if (!all_rows(blocks, rows, count)) return NO_ROW;
    int64_t found = 0;
    for (size_t n = 0; n < count; n++) {
        size_t row = (size_t)rows[n];
        blocks->active[row] -= active;
        if (!--blocks->refs[row] && !(blocks->flags[row] & INDEXED)) idle[found++] = rows[n];
    }
    return found;
}

/* Free the rows. Their slots in each tier go into ``slots`` (TIERS x ``count``), how many into
 * ``counts``. */
EXPORT int tierkv_rows_free(
    Blocks *blocks, const int64_t *rows, size_t count, int64_t *slots, int64_t *counts
) {
    if (!all_rows(blocks, rows, count)) return NO_ROW;
    for (size_t tier = 0; tier < TIERS; tier++) {
        counts[tier] = 0;
        for (size_t n = 0; n < count; n++) {
            uint32_t slot = blocks->slot[tier][rows[n]];
            if (slot == NO_SLOT) continue;
            slots[tier * count + (size_t)counts[tier]++] = slot;
            blocks->slot[tier][rows[n]] = NO_SLOT;
        }
    }
    for (size_t n = 0; n < count; n++) clear_row(blocks, (size_t)rows[n]);
    return 0;
}

/* Which rows have a copy in the tier that no worker maps. */
EXPORT int tierkv_rows_may_leave(
    const Blocks *blocks, const int64_t *rows, size_t count, unsigned tier, uint8_t *may
) {
    if (!all_rows(blocks, rows, count)) return NO_ROW;
    for (size_t n = 0; n < count; n++) may[n] = (uint8_t)may_leave(blocks, (size_t)rows[n], tier);
    return 0;
}

/* For how many rows each tier is the fastest that has a copy; those without any come last. */
EXPORT int tierkv_rows_count(
    const Blocks *blocks, const int64_t *rows, size_t count, int64_t *in_tier
) {
    if (!all_rows(blocks, rows, count)) return NO_ROW;
    int64_t as[1 << TIERS] = {0};
    for (size_t n = 0; n < count; n++) as[blocks->where[rows[n]]]++;
    in_tier[TIERS] = as[0];
    for (unsigned where = 1; where < 1 << TIERS; where++) in_tier[__builtin_ctz(where)] += as[where];
    return 0;
}

/* Whether a value is there twice. ``seen`` has room for ``mask`` + 1 zeroes, at least 2 x ``count``. */
EXPORT int tierkv_repeats(const uint64_t *values, size_t count, uint32_t *seen, uint64_t mask) {
    for (size_t n = 0; n < count; n++) {
        uint64_t at = values[n] & mask;
        for (; seen[at]; at = (at + 1) & mask)
            if (values[seen[at] - 1] == values[n]) return 1;
        seen[at] = (uint32_t)n + 1;
    }
    return 0;
}

/* --- slots: what each number is, and a stack of free ones ------------------------------------- */

/* Pop numbers that are free, and hold them, until there are ``count``; returns how many. */
EXPORT int64_t tierkv_slots_hold(
    uint8_t *is, const uint32_t *stack, int64_t *depth, size_t count, int64_t *held
) {
    size_t found = 0;
    while (found < count && *depth > 0) {
        uint32_t number = stack[--*depth];
        if (is[number] != FREE) continue;
        is[number] = HELD;
        held[found++] = number;
    }
    return (int64_t)found;
}

/* Use numbers; returns how many of them were held. NOT_SO: one is used already. */
EXPORT int64_t tierkv_slots_take(uint8_t *is, size_t length, const int64_t *numbers, size_t count) {
    for (size_t n = 0; n < count; n++) {
        if ((uint64_t)numbers[n] >= length) return NO_ROW;
        if (is[numbers[n]] == USED) return NOT_SO;
    }
    int64_t held = 0;
    for (size_t n = 0; n < count; n++) {
        held += is[numbers[n]] == HELD;
        is[numbers[n]] = USED;
    }
    return held;
}

/* Free those of the numbers that are as ``were`` says, and put them onto the stack; returns how many.
 * With ``were`` USED all must be: else NOT_SO. */
EXPORT int64_t tierkv_slots_free(
    uint8_t *is, size_t length, const int64_t *numbers, size_t count, uint8_t were, uint32_t *top
) {
    for (size_t n = 0; n < count; n++) {
        if ((uint64_t)numbers[n] >= length) return NO_ROW;
        if (were == USED && is[numbers[n]] != USED) return NOT_SO;
    }
    int64_t freed = 0;
    for (size_t n = 0; n < count; n++) {
        if (is[numbers[n]] != were) continue;
        is[numbers[n]] = FREE;
        top[freed++] = (uint32_t)numbers[n];
    }
    return freed;
}

/* --- the log of touches: entry[row] is the place of the row's latest entry, plus 1 ------------ */

/* Append rows; returns how many of them were not listed. */
EXPORT int64_t tierkv_touches_enter(
    uint32_t *log, size_t tail, uint32_t *entry, const int64_t *rows, size_t count
) {
    int64_t fresh = 0;
    for (size_t n = 0; n < count; n++) {
        log[tail + n] = (uint32_t)rows[n];
        fresh += entry[rows[n]] == 0;
        entry[rows[n]] = (uint32_t)(tail + n + 1);
    }
    return fresh;
}

/* Strike rows off; returns how many of them were listed. */
EXPORT int64_t tierkv_touches_forget(
    uint32_t *entry, size_t length, const int64_t *rows, size_t count
) {
    int64_t listed = 0;
    for (size_t n = 0; n < count; n++) {
        if ((uint64_t)rows[n] >= length) continue;
        listed += entry[rows[n]] != 0;
        entry[rows[n]] = 0;
    }
    return listed;
}

/* The rows whose latest entries lie in this part of the log; returns how many. */
EXPORT int64_t tierkv_touches_live(
    const uint32_t *log, size_t start, size_t stop, const uint32_t *entry, int64_t *rows
) {
    int64_t live = 0;
    for (size_t at = start; at < stop; at++) {
        if (at + PREFETCH_AHEAD < stop) __builtin_prefetch(entry + log[at + PREFETCH_AHEAD]);
        if (entry[log[at]] == at + 1) rows[live++] = log[at];
    }
    return live;
}

/* Move the entries of this part of the log that are alive to ``to`` and behind; returns how many. */
EXPORT int64_t tierkv_touches_move(
    uint32_t *log, size_t start, size_t stop, size_t to, uint32_t *entry
) {
    size_t end = to;
    for (size_t at = start; at < stop; at++) {
        uint32_t row = log[at];
        if (entry[row] != at + 1) continue;
        log[end++] = row;
        entry[row] = (uint32_t)end;
    }
    return (int64_t)(end - to);
}
