/* Blocks that an engine keeps in pages: each of several arrays has a part of every block. */
#ifndef TIERKV_PAGES_H
#define TIERKV_PAGES_H

#include "copy.h"

/* Part ``id`` of it, ``bytes`` long, begins at ``data + id * stride``. */
typedef struct {
    uint8_t *data;
    size_t stride, bytes;
} Array;

/* Block ``id`` is part ``id`` of each of the ``count`` arrays, in order. ``bytes``: of a block. */
typedef struct {
    const Array *arrays;
    size_t count, bytes;
} Pages;

static inline uint8_t *part_of(const Array *array, uint32_t id) {
    return array->data + id * array->stride;
}

/* Copy block ``id`` between its pages and ``block``, where it lies in one piece: out of the pages, or
 * into them. Returns the hash of what was copied, also if somebody writes there meanwhile.
 * STORES_DONE() comes after the last copy of a call. */
Hash128 copied_pages(const Pages *pages, uint32_t id, uint8_t *block, int into_pages, int much);

#endif
