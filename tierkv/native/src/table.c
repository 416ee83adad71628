/* One array of places of tierkv.core.table: a place holds row + 1, keys lie in the columns of the
 * rows.
 *
 * Keys are handled in groups whose cache misses overlap. Every function returns -1 if a row is not
 * in the columns; then the table is broken.
 */
#include "rows.h"

#define EMPTY 0u
#define TOMBSTONE 0xFFFFFFFFu
static int is_row(int64_t row, size_t length) { return (uint64_t)row < length; }

static size_t end_of_group(size_t start, size_t count) {
    return count - start < GROUP ? count : start + GROUP;
}

static int all_rows(const int64_t *rows, size_t count, size_t length) {
    size_t outside = 0;
    for (size_t n = 0; n < count; n++) outside += !is_row(rows[n], length);
    return outside == 0;
}

/* Rows of ``count`` keys, -1 where absent. Places before ``swept`` hold nothing any more; what began
 * there lies from ``swept`` on. */
EXPORT int tierkv_places_get(
    const uint32_t *places, uint64_t mask, uint64_t swept, const uint64_t *column_hi,
    const uint64_t *column_lo, size_t length, const uint64_t *hi, const uint64_t *lo, size_t count,
    int64_t *found
) {
    uint64_t first[GROUP];
    for (size_t start = 0; start < count; start += GROUP) {
        size_t end = end_of_group(start, count);
        for (size_t n = start; n < end; n++) {
            uint64_t home = lo[n] & mask;
            first[n - start] = home < swept ? swept : home;
            __builtin_prefetch(places + first[n - start]);
        }
        for (size_t n = start; n < end; n++) {
            uint32_t value = places[first[n - start]];
            if (value == EMPTY || value == TOMBSTONE) continue;
            __builtin_prefetch(column_lo + (value - 1));
            __builtin_prefetch(column_hi + (value - 1));
        }
        for (size_t n = start; n < end; n++) {
            uint64_t at = first[n - start];
            found[n] = -1;
            for (uint32_t value; (value = places[at]) != EMPTY; at = (at + 1) & mask) {
                size_t row = value - 1;
                if (value == TOMBSTONE) continue;
                if (row >= length) return -1;
                if (column_lo[row] != lo[n] || column_hi[row] != hi[n]) continue;
                found[n] = (int64_t)row;
                break;
            }
        }
    }
    return 0;
}

/* Ask for the places that a group of rows begins at, to be written to. */
static void prefetch_homes(
    const uint32_t *places, uint64_t mask, const uint64_t *column_lo, const int64_t *rows, size_t count
) {
    for (size_t n = 0; n < count; n++) __builtin_prefetch(column_lo + rows[n]);
    for (size_t n = 0; n < count; n++)
        __builtin_prefetch(places + (column_lo[rows[n]] & mask), 1);
}

/* Add rows that are not there. */
EXPORT int tierkv_places_put(
    uint32_t *places, uint64_t mask, const uint64_t *column_lo, size_t length, const int64_t *rows,
    size_t count
) {
    if (!all_rows(rows, count, length)) return -1;
    for (size_t start = 0; start < count; start += GROUP) {
        size_t end = end_of_group(start, count);
        prefetch_homes(places, mask, column_lo, rows + start, end - start);
        for (size_t n = start; n < end; n++) {
            uint64_t at = column_lo[rows[n]] & mask;
            while (places[at] != EMPTY) at = (at + 1) & mask;
            places[at] = (uint32_t)rows[n] + 1;
        }
    }
    return 0;
}

/* Empty a place. Rows behind it that began at it or before move up, so that they are found. */
static int vacate(
    uint32_t *places, uint64_t mask, const uint64_t *column_lo, size_t length, uint64_t hole
) {
    uint32_t value;
    for (uint64_t at = (hole + 1) & mask; (value = places[at]) != EMPTY; at = (at + 1) & mask) {
        if (value == TOMBSTONE || value - 1 >= length) return -1;
        uint64_t from_home = (at - (column_lo[value - 1] & mask)) & mask;
        if (from_home < ((at - hole) & mask)) continue;
        places[hole] = value;
        hole = at;
    }
    places[hole] = EMPTY;
    return 0;
}

int places_remove(const Places *table, const Blocks *blocks, size_t row) {
    uint64_t at = blocks->hash_lo[row] & table->mask;
    for (uint32_t value; (value = table->places[at]) != row + 1; at = (at + 1) & table->mask)
        if (value == EMPTY) return -1;
    return vacate(table->places, table->mask, blocks->hash_lo, blocks->length, at);
}

/* Remove rows, and say which were there. Not for arrays with tombstones. */
EXPORT int tierkv_places_remove(
    uint32_t *places, uint64_t mask, const uint64_t *column_lo, size_t length, const int64_t *rows,
    size_t count, uint8_t *there
) {
    if (!all_rows(rows, count, length)) return -1;
    for (size_t start = 0; start < count; start += GROUP) {
        size_t end = end_of_group(start, count);
        prefetch_homes(places, mask, column_lo, rows + start, end - start);
        for (size_t n = start; n < end; n++) {
            uint64_t at = column_lo[rows[n]] & mask;
            for (int ahead = 0; ahead <= BEHIND && places[at] != EMPTY; ahead++) {
                __builtin_prefetch(column_lo + (places[at] - 1));
                at = (at + 1) & mask;
            }
        }
        for (size_t n = start; n < end; n++) {
            uint32_t wanted = (uint32_t)rows[n] + 1;
            uint64_t at = column_lo[rows[n]] & mask;
            while (places[at] != EMPTY && places[at] != wanted) at = (at + 1) & mask;
            there[n] = places[at] == wanted;
            if (there[n] && vacate(places, mask, column_lo, length, at)) return -1;
        }
    }
    return 0;
}

/* How many leading rows are blocks of the namespace whose parent is the block before them. The first
 * one's parent is ``parent``. */
EXPORT int64_t tierkv_linked(
    const int64_t *rows, size_t count, const uint64_t *ids, const uint64_t *parents,
    const uint16_t *namespaces, size_t length, uint64_t parent, uint16_t namespace
) {
    for (size_t n = 0; n < count; n++) {
        size_t ahead = n + GROUP;
        if (ahead < count && is_row(rows[ahead], length)) {
            __builtin_prefetch(ids + rows[ahead]);
            __builtin_prefetch(parents + rows[ahead]);
            __builtin_prefetch(namespaces + rows[ahead]);
        }
        if (!is_row(rows[n], length)) return -1;
        if (parents[rows[n]] != parent || namespaces[rows[n]] != namespace) return (int64_t)n;
        parent = ids[rows[n]];
    }
    return (int64_t)count;
}

static void prefetch_row(const Blocks *blocks, size_t row) {
    __builtin_prefetch(blocks->hash_lo + row);
    __builtin_prefetch(blocks->hash_hi + row);
    __builtin_prefetch(blocks->parent + row);
    __builtin_prefetch(blocks->namespace + row);
    __builtin_prefetch(blocks->id + row);
}

/* Rows of the longest chain under ``count`` keys, each a block of the namespace whose parent is the
 * one before it, the first one's ``parent``; returns how many. ``broken``: whether it ends at a block
 * that has the name but another parent or namespace. */
EXPORT int64_t tierkv_chain(
    const Places *table, const Blocks *blocks, const uint64_t *hi, const uint64_t *lo, size_t count,
    uint64_t parent, uint16_t namespace, int64_t *rows, uint8_t *broken
) {
    const uint32_t *places = table->places;
    uint64_t mask = table->mask;
    *broken = 0;
    for (size_t n = 0; n < count && n < GROUP; n++) __builtin_prefetch(places + (lo[n] & mask));
    for (size_t n = 0; n < count; n++) {
        if (n % GROUP == 0) {
            for (size_t ahead = n; ahead < end_of_group(n, count); ahead++) {
                uint32_t value = places[lo[ahead] & mask];
                if (value != EMPTY && value <= blocks->length) prefetch_row(blocks, value - 1);
                if (ahead + GROUP < count) __builtin_prefetch(places + (lo[ahead + GROUP] & mask));
            }
        }
        size_t row = blocks->length;
        uint64_t at = lo[n] & mask;
        for (uint32_t value; (value = places[at]) != EMPTY; at = (at + 1) & mask) {
            if (value > blocks->length) return -1;
            if (blocks->hash_lo[value - 1] != lo[n] || blocks->hash_hi[value - 1] != hi[n]) continue;
            row = value - 1;
            break;
        }
        if (row == blocks->length) return (int64_t)n;
        if (blocks->parent[row] != parent || blocks->namespace[row] != namespace) {
            *broken = 1;
            return (int64_t)n;
        }
        rows[n] = (int64_t)row;
        parent = blocks->id[row];
    }
    return (int64_t)count;
}
