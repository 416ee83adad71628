/* Many query rows per KV head, as in prefill: bound by arithmetic.
 *
 * A unit is a tile of rows of one KV head, and goes through its keys 64 at a time, as two matrix
 * products: scores[key][row] = K q^T, so that a lane is a row and softmax needs no sums across lanes,
 * and out[row][number] = weights^T V. Both read their first factor number by number and their second
 * in vectors, so neither K nor V is ever transposed. */
#ifndef TIERKV_MANY_ROWS_H
#define TIERKV_MANY_ROWS_H

#include "unit.h"

#define ROW_TILE 64
#define KEY_TILE 64
#define ROW_VECTORS (ROW_TILE / W)

/* Everything of a unit's, in the order of how often it is read. */
struct rows {
    Floats largest[ROW_VECTORS], weight[ROW_VECTORS];
    Ints lo[ROW_VECTORS], hi[ROW_VECTORS];
    int32_t begin, end;                  /* keys that some row sees */
    float scores[KEY_TILE * ROW_TILE] __attribute__((aligned(64)));
    float *q;      /* [head_dim][ROW_TILE], placed as K is; columns past the rows are 0 */
    float *k, *v;  /* [KEY_TILE][head_dim] */
    float *sum;    /* [ROW_TILE][head_dim] */
};

/* c[i][j] += sum over n < depth of a(i, n) * b[n][j], for ``height`` i and ``vectors`` * W j; a(i, n)
 * lies at i * a_row + n * a_step. */
INLINE void multiply_block(
    int height, int vectors, int depth, const float *a, int a_row, int a_step, const float *b,
    int b_row, float *c, int c_row
) {
    Floats sum[8][4];
    UNROLL for (int i = 0; i < height; i++)
        UNROLL for (int j = 0; j < vectors; j++) sum[i][j] = load(c + i * c_row + j * W);
    for (int n = 0; n < depth; n++) {
        Floats row[4];
        UNROLL for (int j = 0; j < vectors; j++) row[j] = load(b + n * b_row + j * W);
        UNROLL for (int i = 0; i < height; i++) {
            Floats factor = broadcast(a[i * a_row + n * a_step]);
            UNROLL for (int j = 0; j < vectors; j++) sum[i][j] += factor * row[j];
        }
    }
    UNROLL for (int i = 0; i < height; i++)
        UNROLL for (int j = 0; j < vectors; j++) store(c + i * c_row + j * W, sum[i][j]);
}

INLINE void multiply_columns(
    int vectors, int rows, int depth, const float *a, int a_row, int a_step, const float *b,
    int b_row, float *c, int c_row
) {
    enum { HEIGHT = W == 16 ? 8 : 4 };
    int i = 0;
    for (; i + HEIGHT <= rows; i += HEIGHT)
        multiply_block(
            HEIGHT, vectors, depth, a + i * a_row, a_row, a_step, b, b_row, c + i * c_row, c_row
        );
    for (; i < rows; i++)
        multiply_block(
            1, vectors, depth, a + i * a_row, a_row, a_step, b, b_row, c + i * c_row, c_row
        );
}

/* ``columns`` is a multiple of W. */
static void multiply(
    int rows, int columns, int depth, const float *a, int a_row, int a_step, const float *b,
    int b_row, float *c, int c_row
) {
    int j = 0;
    for (; j + 2 * W <= columns; j += 2 * W)
        multiply_columns(2, rows, depth, a, a_row, a_step, b + j, b_row, c + j, c_row);
    for (; j < columns; j += W)
        multiply_columns(1, rows, depth, a, a_row, a_step, b + j, b_row, c + j, c_row);
}

INLINE void to_floats(enum type type, const char *from, float *to, int dim) {
    int d = 0;
    for (; d + 2 * W <= dim; d += 2 * W) {
        Floats first, second;
        load_pair(type, from + d * bytes_of(type), &first, &second);
        store(to + d, first);
        store(to + d + W, second);
    }
    for (; d < dim; d += W) store(to + d, load_lone(type, from + d * bytes_of(type)));
}

/* The unit's keys begin .. end of one cache. */
static void take_rows(
    const struct attention *call, const struct unit *unit, const struct cache *cache, int32_t begin,
    int32_t end, float *to
) {
    int64_t head = unit->first_head * cache->head_stride * bytes_of(call->kv_type);
    for (int32_t token = begin; token < end; token++, to += call->head_dim) {
        const char *row = cache_row(call, cache, unit->record, token) + head;
        switch (call->kv_type) {
        case F32: to_floats(F32, row, to, call->head_dim); break;
        case F16: to_floats(F16, row, to, call->head_dim); break;
        case BF16: to_floats(BF16, row, to, call->head_dim); break;
        default: to_floats(FP8, row, to, call->head_dim);
        }
    }
}

/* Scores into weights, for the rows of one vector; false: no row has any. */
static void weigh(
    const struct attention *call, struct rows *rows, int vector, int32_t begin, int keys, int dim
) {
    float *scores = rows->scores + vector * W;
    Ints lo = rows->lo[vector] - begin, hi = rows->hi[vector] - begin;
    float factor = score_factor(call) * (call->softcap > 0 ? 1.0f : LOG2_E);
    Floats largest = rows->largest[vector];
    for (int n = 0; n < keys; n++) {
        Floats s = load(scores + n * ROW_TILE) * factor;
        if (call->softcap > 0) s = soft_capped(s, call->softcap) * LOG2_E;
        s = select_floats((lo <= n) & (hi > n), s, broadcast(-INFINITY));
        store(scores + n * ROW_TILE, s);
        largest = larger(largest, s);
    }
    Floats base = select_floats(largest == -INFINITY, (Floats){0}, largest);
    Floats old = exp2_floats(rows->largest[vector] - base);
    Ints grown = largest > rows->largest[vector];
    for (int lane = 0; lane < W; lane++) {
        if (!grown[lane]) continue;
        float *sum = rows->sum + (vector * W + lane) * dim;
        for (int d = 0; d < dim; d += W) store(sum + d, load(sum + d) * old[lane]);
    }
    Floats weight = rows->weight[vector] * old;
    for (int n = 0; n < keys; n++) {
        Floats w = exp2_floats(load(scores + n * ROW_TILE) - base);
        store(scores + n * ROW_TILE, w);
        weight += w;
    }
    rows->weight[vector] = weight;
    rows->largest[vector] = largest;
}

static size_t many_rows_memory(const struct attention *call) {
    return sizeof(struct rows) + sizeof(float) * (size_t)call->head_dim * (2 * ROW_TILE + 2 * KEY_TILE);
}

static void begin_rows(
    const struct attention *call, const struct unit *unit, struct rows *rows, float *memory
) {
    int dim = call->head_dim;
    rows->q = memory;
    rows->sum = rows->q + dim * ROW_TILE;
    rows->k = rows->sum + dim * ROW_TILE;
    rows->v = rows->k + dim * KEY_TILE;
    memset(rows->q, 0, sizeof(float) * 2 * ROW_TILE * (size_t)dim);
    rows->begin = unit->kv_end;
    rows->end = unit->kv_begin;
    for (int r = 0; r < ROW_TILE; r++) {
        int32_t lo = INT32_MAX, hi = INT32_MIN;
        if (r < unit->rows) {
            visible_keys(call, unit, unit->first_row + r, &lo, &hi);
            if (lo < hi && lo < rows->begin) rows->begin = lo;
            if (lo < hi && hi > rows->end) rows->end = hi;
            const char *row = query_row(call, unit->record, unit->first_head, unit->first_row + r);
            for (int d = 0; d < dim; d++)
                rows->q[place(call->kv_type, d, dim) * ROW_TILE + r] =
                    get_number(call->q_type, row, d);
        }
        rows->lo[r / W][r % W] = lo;
        rows->hi[r / W][r % W] = hi;
    }
    for (int i = 0; i < ROW_VECTORS; i++) {
        rows->largest[i] = broadcast(-INFINITY);
        rows->weight[i] = (Floats){0};
    }
}

/* Work a unit of one KV head off. ``memory``: many_rows_memory() bytes, 64-byte aligned. */
static void many_rows(const struct task *task, const struct unit *unit, char *memory) {
    const struct attention *call = task->call;
    struct rows *rows = (struct rows *)memory;
    int dim = call->head_dim, vectors = (unit->rows + W - 1) / W;
    begin_rows(call, unit, rows, (float *)(rows + 1));
    int32_t end;
    for (int32_t begin = rows->begin; begin < rows->end; begin = end) {
        end = rows->end - begin > KEY_TILE ? begin + KEY_TILE : rows->end;
        int keys = end - begin;
        take_rows(call, unit, &call->k, begin, end, rows->k);
        take_rows(call, unit, &call->v, begin, end, rows->v);
        memset(rows->scores, 0, sizeof rows->scores);
        multiply(
            keys, vectors * W, dim, rows->k, dim, 1, rows->q, ROW_TILE, rows->scores, ROW_TILE
        );
        for (int i = 0; i < vectors; i++) weigh(call, rows, i, begin, keys, dim);
        multiply(unit->rows, dim, keys, rows->scores, 1, ROW_TILE, rows->v, dim, rows->sum, dim);
    }
    for (int r = 0; r < unit->rows; r++)
        put_row(
            task, unit, unit->first_head, unit->first_row + r, rows->sum + r * dim,
            rows->largest[r / W][r % W], rows->weight[r / W][r % W]
        );
}

#endif
