/* Few query rows per KV head, as in decode: bound by how fast K and V come from memory.
 *
 * A unit goes through its keys in tiles of 16 tokens. All KV heads of a tile come one after another,
 * so a tile is read in about the order in which it lies in memory, and the lines of the next tile are
 * asked for meanwhile (see struct stream). Rows go in groups of 4, 2 or 1. Scores of
 * a group are W at a time, token-major: lane i is row i % rows of token i / rows. */
#ifndef TIERKV_FEW_ROWS_H
#define TIERKV_FEW_ROWS_H

#include <stdbool.h>

#include "unit.h"

#define TILE 16
/* Tokens. */
#define GROUP_ROWS 4
#define FEW_ROWS_MAX 16
/* Rows of a KV head. */
#define HEAD_DIM_MAX 256
#define LINE 64

#if defined(__AVX512BF16__)
#define HAS_DOT 1
#else
#define HAS_DOT 0
#endif

/* Base-2 logarithm of how large a weight may become before the rows are rescaled. */
#define HEADROOM 8.0f

/* Rows of one KV head that go together. */
struct group {
    Floats largest, weight; /* a lane's row is lane % rows; lanes of weight are to be added up */
    Ints lo, hi;            /* the keys it sees */
    int32_t lo_max, hi_min;
    int32_t head; /* of the unit's */
    int32_t first_row, rows, real_rows;
    float *q;   /* [rows][q_stride], placed as K is; or bfloat16 for the dot product */
    float *sum; /* [rows][head_dim] */
    float weights[TILE * GROUP_ROWS] __attribute__((aligned(64))); /* scores until they are weights */
};

/* Where the rows of some tokens lie, those of the first KV head of the unit. */
struct rows_at {
    const char *k[TILE], *v[TILE]; /* past the last token: that one again */
    int32_t tokens, heads;
};

/* The next tile, asked for ahead of time: in the order in which it lies in memory, and spread evenly
 * over the work on this one. A core drops most requests that come in a burst, hence a position that
 * goes through memory and so takes a few cycles from one line to the next. It also drops what comes
 * while too many are on their way, hence each line is asked for again shortly before it is read (see
 * ask_again()). */
struct stream {
    const char *volatile at;
    int64_t lines; /* left in this run */
    int32_t cache, head, token; /* where the next run begins: K or V, and which row of it */
};

/* Lines asked for while two lines of K or two of V are read; together they are 4. Found by measuring.
 * Vectors that are shorter ask for no fractions of a line. */
INLINE int stream_per_keys(enum type type) { return type == F32 && W == 16 ? 1 : 2; }
INLINE int stream_per_values(enum type type) { return 4 - stream_per_keys(type); }

struct tile {
    const struct attention *call;
    int32_t begin;
    float factor; /* of a score before the soft cap */
    struct rows_at now, next;
    struct stream stream;
    const struct rows_at *soon; /* what is read after this group's rows: those of the next KV head */
    int64_t k_soon, v_soon;
} __attribute__((aligned(64))); /* groups follow it */

/* Rows that lie one after another are one run. 0: there is none left. */
static __attribute__((noinline)) int next_run(struct tile *tile) {
    struct stream *stream = &tile->stream;
    const struct attention *call = tile->call;
    int32_t tokens = tile->next.tokens, heads = tile->next.heads;
    if (tokens == 0 || stream->cache > 1) return 0;
    int64_t row_bytes = call->head_dim * bytes_of(call->kv_type);
    const struct cache *cache = stream->cache ? &call->v : &call->k;
    const char *const *rows = stream->cache ? tile->next.v : tile->next.k;
    int64_t head_bytes = cache->head_stride * bytes_of(call->kv_type);
    int all_heads = head_bytes == row_bytes; /* of a token, one after another */
    if (all_heads) row_bytes *= heads;
    const char *begin = rows[stream->token] + stream->head * head_bytes;
    int64_t bytes = 0;
    do bytes += row_bytes;
    while (++stream->token < tokens && rows[stream->token] == rows[stream->token - 1] + row_bytes);
    if (stream->token == tokens) {
        stream->token = 0;
        if (all_heads || ++stream->head == heads) {
            stream->head = 0;
            stream->cache++;
        }
    }
    int64_t past_line = (int64_t)((uintptr_t)begin % LINE);
    stream->at = begin - past_line;
    stream->lines = (bytes + past_line + LINE - 1) / LINE;
    return 1;
}

INLINE void ask_again(const char *at, int64_t bytes) {
    UNROLL for (int64_t i = 0; i < bytes; i += LINE) __builtin_prefetch(at + i);
}

/* Ask for as many lines as ``bytes`` are; some may lie past the end of a run. */
INLINE void ask_ahead(struct tile *tile, int64_t bytes) {
    struct stream *stream = &tile->stream;
    if (stream->lines <= 0 && !next_run(tile)) return;
    const int lines = bytes < LINE ? 1 : (int)(bytes / LINE);
    UNROLL for (int i = 0; i < lines; i++) {
        const char *at = stream->at;
        __builtin_prefetch(at);
        stream->at = at + LINE;
    }
    stream->lines -= lines;
}

/* Scores of W / rows tokens. */
INLINE Floats scores(
    enum type type, int rows, struct tile *tile, const struct group *group, int first,
    int64_t offset, int dim
) {
    int tokens = W / rows;
    const char *const *k = tile->now.k + first, *const *soon = tile->soon->k + first;
    Floats sum[W];
    UNROLL for (int i = 0; i < W; i++) sum[i] = (Floats){0};
    int d = 0;
    for (; d + 2 * W <= dim; d += 2 * W) {
        UNROLL for (int t = 0; t < tokens; t++) {
            Floats one, two;
            load_pair(type, k[t] + offset + d * bytes_of(type), &one, &two);
            ask_again(soon[t] + tile->k_soon + d * bytes_of(type), 2 * W * bytes_of(type));
            UNROLL for (int r = 0; r < rows; r++) {
                const float *q = group->q + r * dim + d;
                sum[t * rows + r] += one * load(q);
                sum[t * rows + r] += two * load(q + W);
            }
        }
        ask_ahead(tile, stream_per_keys(type) * tokens * W * bytes_of(type));
    }
    for (; d < dim; d += W) {
        UNROLL for (int t = 0; t < tokens; t++) {
            Floats lone = load_lone(type, k[t] + offset + d * bytes_of(type));
            UNROLL for (int r = 0; r < rows; r++)
                sum[t * rows + r] += lone * load(group->q + r * dim + d);
        }
    }
    return sums(sum);
}

#if HAS_DOT
#define DOT_NUMBERS 32

/* The same for K and q in bfloat16. */
INLINE Floats scores_by_dot(
    int rows, struct tile *tile, const struct group *group, int first, int64_t offset,
    int dim
) {
    int tokens = W / rows;
    const char *const *k = tile->now.k + first, *const *soon = tile->soon->k + first;
    int padded = (dim + DOT_NUMBERS - 1) / DOT_NUMBERS * DOT_NUMBERS;
    const uint16_t *q = (const uint16_t *)group->q;
    __m512 sum[W];
    UNROLL for (int i = 0; i < W; i++) sum[i] = _mm512_setzero_ps();
    int d = 0;
    for (; d + DOT_NUMBERS <= dim; d += DOT_NUMBERS) {
        UNROLL for (int t = 0; t < tokens; t++) {
            __m512bh key = (__m512bh)_mm512_loadu_si512(k[t] + offset + 2 * d);
            ask_again(soon[t] + tile->k_soon + 2 * d, LINE);
            UNROLL for (int r = 0; r < rows; r++) {
                __m512bh query = (__m512bh)_mm512_load_si512(q + r * padded + d);
                sum[t * rows + r] = _mm512_dpbf16_ps(sum[t * rows + r], key, query);
            }
        }
        ask_ahead(tile, stream_per_keys(BF16) * tokens * LINE / 2);
    }
    if (d < dim) { /* 16 are left; q is padded with zeros */
        UNROLL for (int t = 0; t < tokens; t++) {
            __m256i half = _mm256_loadu_si256((const void *)(k[t] + offset + 2 * d));
            __m512bh key = (__m512bh)_mm512_zextsi256_si512(half);
            UNROLL for (int r = 0; r < rows; r++) {
                __m512bh query = (__m512bh)_mm512_load_si512(q + r * padded + d);
                sum[t * rows + r] = _mm512_dpbf16_ps(sum[t * rows + r], key, query);
            }
        }
    }
    return sums((Floats *)sum);
}
#endif

/* The running largest score has grown from group->largest to ``largest``. */
INLINE void rescale(int rows, struct group *group, Floats largest, int dim) {
    Floats factor = exp2_floats(group->largest - largest);
    /* Nothing was seen before: 0, whether something is seen now or not. */
    factor = select_floats(group->largest == -INFINITY, (Floats){0}, factor);
    group->largest = largest;
    group->weight *= factor;
    UNROLL for (int r = 0; r < rows; r++)
        for (int d = 0; d < dim; d += W)
            store(group->sum + r * dim + d, load(group->sum + r * dim + d) * factor[r]);
}

/* Add the weighted values of ``vectors`` * W numbers from ``d`` on. */
INLINE void add_values(
    enum type type, int rows, int vectors, struct tile *tile, struct group *group, int64_t offset,
    int dim, int d
) {
    Floats sum[GROUP_ROWS][8];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int i = 0; i < vectors; i++) sum[r][i] = load(group->sum + r * dim + d + i * W);
    for (int t = 0; t < tile->now.tokens; t++) {
        int64_t at = d * bytes_of(type);
        const char *row = tile->now.v[t] + offset + at;
        ask_again(tile->soon->v[t] + tile->v_soon + at, vectors * W * bytes_of(type));
        Floats values[8];
        if (vectors == 1) values[0] = load_lone(type, row);
        else
            UNROLL for (int i = 0; i < vectors; i += 2)
                load_pair(type, row + i * W * bytes_of(type), &values[i], &values[i + 1]);
        UNROLL for (int r = 0; r < rows; r++) {
            Floats weight = broadcast(group->weights[t * rows + r]);
            UNROLL for (int i = 0; i < vectors; i++) sum[r][i] += weight * values[i];
        }
        ask_ahead(tile, stream_per_values(type) * vectors * W * bytes_of(type) / 2);
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int i = 0; i < vectors; i++)
            store(group->sum + r * dim + d + i * W, sum[r][i]);
}

INLINE void group_scores(
    enum type type, int dot, int rows, struct tile *tile, struct group *group
) {
    const struct attention *call = tile->call;
    const int tokens = W / rows, dim = call->head_dim;
    int64_t offset = group->head * call->k.head_stride * bytes_of(type);
    (void)dot;
    for (int t = 0; t < tile->now.tokens; t += tokens) {
        Floats s;
#if HAS_DOT
        if (dot) s = scores_by_dot(rows, tile, group, t, offset, dim);
        else
#endif
            s = scores(type, rows, tile, group, t, offset, dim);
        store(group->weights + t * rows, s);
    }
}

INLINE void group_weights(int rows, struct tile *tile, struct group *group) {
    const struct attention *call = tile->call;
    const int vectors = TILE * rows / W, tokens = W / rows;
    Floats score[TILE * GROUP_ROWS / W];
    Floats largest = broadcast(-INFINITY);
    int32_t end = tile->begin + tile->now.tokens;
    int masked = tile->now.tokens < TILE || tile->begin < group->lo_max || end > group->hi_min;
    for (int i = 0; i < vectors; i++) {
        Floats s = load(group->weights + i * W) * tile->factor;
        if (call->softcap > 0) s = soft_capped(s, call->softcap) * LOG2_E;
        if (masked) {
            Ints key = tile->begin + i * tokens + lane_over(rows);
            Ints seen = (key >= group->lo) & (key < group->hi) & (key < end);
            s = select_floats(seen, s, broadcast(-INFINITY));
        }
        score[i] = s;
        largest = larger(largest, s);
    }
    largest = largest_of_rows(larger(group->largest, largest), rows);
    Ints grown = largest > group->largest + HEADROOM;
    int any = 0;
    UNROLL for (int r = 0; r < rows; r++) any |= grown[r];
    if (any) rescale(rows, group, largest, call->head_dim);
    /* Where nothing was seen yet, all weights must be 0. */
    Floats base = select_floats(group->largest == -INFINITY, (Floats){0}, group->largest);
    for (int i = 0; i < vectors; i++) {
        Floats weight = exp2_floats(score[i] - base);
        group->weight += weight;
        store(group->weights + i * W, weight);
    }
}

INLINE void group_values(enum type type, int rows, struct tile *tile, struct group *group) {
    const struct attention *call = tile->call;
    const int dim = call->head_dim, step = rows == 4 ? (W == 16 ? 4 : 2) : (W == 16 ? 8 : 4);
    int64_t offset = group->head * call->v.head_stride * bytes_of(type);
    int d = 0;
    for (; d + step * W <= dim; d += step * W)
        add_values(type, rows, step, tile, group, offset, dim, d);
    for (; d + 2 * W <= dim; d += 2 * W) add_values(type, rows, 2, tile, group, offset, dim, d);
    for (; d < dim; d += W) add_values(type, rows, 1, tile, group, offset, dim, d);
}

/* What is done for each group of a tile, in this order. */
enum step { SCORES, WEIGHTS, VALUES, STEPS };

INLINE void group_step(
    enum step step, enum type type, int dot, int rows, struct tile *tile, struct group *group
) {
    if (step == SCORES) group_scores(type, dot, rows, tile, group);
    else if (step == WEIGHTS) group_weights(rows, tile, group);
    else group_values(type, rows, tile, group);
}

typedef void group_function(enum step step, struct tile *tile, struct group *group);

#define GROUP_FUNCTION(name, type, dot, rows)                                 \
    static void name##_##rows(enum step s, struct tile *t, struct group *g) { \
        group_step(s, type, dot, rows, t, g);                                 \
    }
#define GROUP_FUNCTIONS(name, type, dot) \
    GROUP_FUNCTION(name, type, dot, 1)   \
    GROUP_FUNCTION(name, type, dot, 2)   \
    GROUP_FUNCTION(name, type, dot, 4)

GROUP_FUNCTIONS(group_f32, F32, 0)
GROUP_FUNCTIONS(group_f16, F16, 0)
GROUP_FUNCTIONS(group_bf16, BF16, HAS_DOT)
GROUP_FUNCTIONS(group_fp8, FP8, 0)

static group_function *group_function_of(enum type type, int rows) {
    static group_function *const all[TYPES][GROUP_ROWS + 1] = {
        [F32] = {0, group_f32_1, group_f32_2, 0, group_f32_4},
        [F16] = {0, group_f16_1, group_f16_2, 0, group_f16_4},
        [BF16] = {0, group_bf16_1, group_bf16_2, 0, group_bf16_4},
        [FP8] = {0, group_fp8_1, group_fp8_2, 0, group_fp8_4},
    };
    return all[type][rows];
}

/* How many rows go together, of ``left``. */
static int rows_together(int left) { return left > 2 ? GROUP_ROWS : left; }

static int groups_of(int rows) {
    int count = 0;
    for (int left = rows; left > 0; left -= rows_together(left)) count++;
    return count;
}

/* Bytes of a group's q or sums. */
static size_t group_bytes(int dim) {
    return sizeof(float) * GROUP_ROWS * (size_t)((dim + 31) / 32 * 32);
}

static size_t few_rows_memory(const struct attention *call, const struct unit *unit) {
    size_t groups = (size_t)groups_of(unit->rows) * (size_t)unit->heads;
    return sizeof(struct tile) + groups * (sizeof(struct group) + 2 * group_bytes(call->head_dim));
}

static void take_queries(const struct attention *call, const struct unit *unit, struct group *g) {
    int dim = call->head_dim, dot = HAS_DOT && call->kv_type == BF16;
    memset(g->q, 0, group_bytes(dim));
    for (int r = 0; r < g->real_rows; r++) {
        const char *row = query_row(call, unit->record, unit->first_head + g->head, g->first_row + r);
        if (dot) {
            int padded = (dim + 31) / 32 * 32;
            memcpy((uint16_t *)g->q + r * padded, row, sizeof(uint16_t) * (size_t)dim);
        } else {
            float *to = g->q + r * dim;
            for (int d = 0; d < dim; d++)
                to[place(call->kv_type, d, dim)] = get_number(call->q_type, row, d);
        }
    }
}

static void begin_group(const struct attention *call, const struct unit *unit, struct group *g) {
    g->largest = broadcast(-INFINITY);
    g->weight = (Floats){0};
    g->lo_max = INT32_MIN;
    g->hi_min = INT32_MAX;
    for (int lane = 0; lane < W; lane++) {
        int r = lane % g->rows;
        int32_t lo, hi;
        visible_keys(call, unit, g->first_row + (r < g->real_rows ? r : 0), &lo, &hi);
        g->lo[lane] = lo;
        g->hi[lane] = hi;
        if (lo > g->lo_max) g->lo_max = lo;
        if (hi < g->hi_min) g->hi_min = hi;
    }
    memset(g->sum, 0, group_bytes(call->head_dim));
    take_queries(call, unit, g);
}

static int begin_groups(
    const struct attention *call, const struct unit *unit, struct group *groups, char *memory
) {
    int count = 0;
    for (int head = 0; head < unit->heads; head++) {
        int end = unit->first_row + unit->rows;
        for (int row = unit->first_row; row < end; count++) {
            struct group *g = groups + count;
            g->head = head;
            g->first_row = row;
            g->rows = rows_together(end - row);
            g->real_rows = end - row < g->rows ? end - row : g->rows;
            g->q = (float *)memory;
            g->sum = (float *)(memory + group_bytes(call->head_dim));
            memory += 2 * group_bytes(call->head_dim);
            begin_group(call, unit, g);
            row += g->real_rows;
        }
    }
    return count;
}

static void end_group(const struct task *task, const struct unit *unit, const struct group *g) {
    for (int r = 0; r < g->real_rows; r++) {
        float weight = 0;
        for (int lane = r; lane < W; lane += g->rows) weight += g->weight[lane];
        const float *sum = g->sum + r * task->call->head_dim;
        put_row(task, unit, unit->first_head + g->head, g->first_row + r, sum, g->largest[r], weight);
    }
}

/* First token after ``token`` that belongs to another tile: tiles lie at multiples of their size, so
 * that a sum does not depend on where its unit begins. */
static int32_t tile_end(const struct unit *unit, int32_t token) {
    int64_t end = ((int64_t)token / TILE + 1) * TILE;
    return end < unit->kv_end ? (int32_t)end : unit->kv_end;
}

static void find_rows(
    const struct attention *call, const struct unit *unit, int32_t begin, struct rows_at *rows
) {
    int64_t size = bytes_of(call->kv_type);
    int64_t k_offset = unit->first_head * call->k.head_stride * size;
    int64_t v_offset = unit->first_head * call->v.head_stride * size;
    rows->heads = unit->heads;
    rows->tokens = begin < unit->kv_end ? tile_end(unit, begin) - begin : 0;
    for (int i = 0; i < rows->tokens; i++) {
        rows->k[i] = cache_row(call, &call->k, unit->record, begin + i) + k_offset;
        rows->v[i] = cache_row(call, &call->v, unit->record, begin + i) + v_offset;
    }
    for (int i = rows->tokens; i < TILE && rows->tokens > 0; i++) {
        rows->k[i] = rows->k[rows->tokens - 1];
        rows->v[i] = rows->v[rows->tokens - 1];
    }
}

static void find_soon(struct tile *tile, int32_t head) {
    const struct attention *call = tile->call;
    bool in_tile = head < tile->now.heads;
    tile->soon = in_tile || tile->next.tokens == 0 ? &tile->now : &tile->next;
    int64_t head_bytes = in_tile ? head * bytes_of(call->kv_type) : 0;
    tile->k_soon = head_bytes * call->k.head_stride;
    tile->v_soon = head_bytes * call->v.head_stride;
}

/* Work a unit off, and ask for the first tile of ``after``, which may be NULL. ``memory``:
 * few_rows_memory() bytes, 64-byte aligned. */
static void few_rows(
    const struct task *task, const struct unit *unit, const struct unit *after, char *memory
) {
    const struct attention *call = task->call;
    struct tile *tile = (struct tile *)memory;
    struct group *groups = (struct group *)(tile + 1);
    int per_head = groups_of(unit->rows);
    int count = begin_groups(call, unit, groups, (char *)(groups + per_head * unit->heads));
    tile->call = call;
    tile->factor = score_factor(call) * (call->softcap > 0 ? 1.0f : LOG2_E);
    /* A step of many groups at once hides what each waits for, sums across lanes and exp2. But bfloat16
     * takes so little arithmetic that K and V in turn, and so requests at an even pace, are worth more. */
    int together = call->kv_type == BF16 ? 1 : count;
    find_rows(call, unit, unit->kv_begin, &tile->now);
    for (tile->begin = unit->kv_begin; tile->begin < unit->kv_end;) {
        int32_t end = tile->begin + tile->now.tokens;
        if (end < unit->kv_end) find_rows(call, unit, end, &tile->next);
        else if (after != NULL) find_rows(call, after, after->kv_begin, &tile->next);
        else tile->next.tokens = 0;
        tile->stream = (struct stream){0};
        for (int i = 0; i < count; i += together)
            for (enum step step = 0; step < STEPS; step++)
                for (int n = i; n < i + together; n++) {
                    find_soon(tile, groups[n].head + 1);
                    group_function_of(call->kv_type, groups[n].rows)(step, tile, groups + n);
                }
        tile->begin = end;
        tile->now = tile->next;
    }
    for (int i = 0; i < count; i++) end_group(task, unit, groups + i);
}

#endif
