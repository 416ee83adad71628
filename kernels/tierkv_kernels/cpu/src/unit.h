/* A unit: what one thread does in one go, and the state in which it may leave its rows. */
#ifndef TIERKV_UNIT_H
#define TIERKV_UNIT_H

#include "attention.h"
#include "vectors.h"

/* Some rows of a record, against its keys kv_begin .. kv_end, for some KV heads. Row r of a KV head is
 * the record's token r / group, and of the heads that share the KV head number r % group. */
struct unit {
    const struct record *record;
    int32_t first_row, rows, first_head, heads, kv_begin, kv_end;
    int64_t state; /* row of the states for the record's first token; -1: writes the output */
};

/* Sums of rows that several units make, each [num_q_heads][head_dim] and [num_q_heads]. Row by row
 * of them: sum of weight * v, its numbers placed as ``place`` says; largest score, in base 2; sum of
 * weights, which are 2^(score - largest). */
struct states {
    float *sum, *largest, *weight;
};

struct task {
    const struct attention *call;
    struct states states;
};

static inline float score_factor(const struct attention *call) {
    return call->score_scale * (call->kv_type == FP8 ? FP8_UNIT : 1.0f);
}

static inline const char *query_row(
    const struct attention *call, const struct record *record, int head, int row
) {
    int64_t token = record->q_tok + row / call->group;
    int64_t q_head = (int64_t)head * call->group + row % call->group;
    int64_t at = token * call->q_stride + q_head * call->q_head_stride;
    return call->q + at * bytes_of(call->q_type);
}

/* The keys lo .. hi that a row sees of the unit's. */
static inline void visible_keys(
    const struct attention *call, const struct unit *unit, int row, int32_t *lo, int32_t *hi
) {
    *lo = unit->kv_begin;
    *hi = unit->kv_end;
    if (unit->record->pos0 == NO_MASK) return;
    int64_t position = (int64_t)unit->record->pos0 + row / call->group;
    if (call->causal && position + 1 < *hi) *hi = (int32_t)(position + 1);
    if (call->window >= 0 && position - call->window > *lo) {
        *lo = (int32_t)(position - call->window);
    }
}

static inline const char *cache_row(
    const struct attention *call, const struct cache *cache, const struct record *record,
    int64_t token
) {
    int64_t block = token / call->block_size;
    int64_t slot = call->block_table[record->table_row * call->table_stride + block];
    int64_t in_block = token - block * call->block_size;
    int64_t at = slot * cache->block_stride + in_block * cache->token_stride;
    return cache->data + at * bytes_of(call->kv_type);
}

/* Write a row of the output, whose numbers are placed as ``place`` says. */
static inline void put_output(
    const struct attention *call, int64_t token, int64_t q_head, const float *sum, float largest,
    float weight
) {
    int64_t at = token * call->out_stride + q_head * call->out_head_stride;
    char *out = call->out + at * bytes_of(call->q_type);
    float v_scale = call->v_scale * (call->kv_type == FP8 ? FP8_UNIT : 1.0f);
    float factor = weight == 0 ? 0.0f : v_scale / weight;
    for (int d = 0; d < call->head_dim; d++) {
        float value = weight == 0 ? 0.0f : sum[place(call->kv_type, d, call->head_dim)] * factor;
        put_number(call->q_type, out, d, value);
    }
    if (call->lse != NULL) {
        int64_t n = token * call->kv_heads * call->group + q_head;
        call->lse[n] = weight == 0 ? -INFINITY : (largest + log2f(weight)) * LN_2;
    }
}

/* Where a unit's row goes when all of its keys are done. */
static inline void put_row(
    const struct task *task, const struct unit *unit, int head, int row, const float *sum,
    float largest, float weight
) {
    const struct attention *call = task->call;
    int64_t token = row / call->group;
    int64_t q_head = (int64_t)head * call->group + row % call->group;
    if (unit->state < 0) {
        put_output(call, unit->record->q_tok + token, q_head, sum, largest, weight);
        return;
    }
    int64_t q_heads = (int64_t)call->kv_heads * call->group;
    int64_t at = (unit->state + token) * q_heads + q_head;
    memcpy(task->states.sum + at * call->head_dim, sum, sizeof *sum * (size_t)call->head_dim);
    task->states.largest[at] = largest;
    task->states.weight[at] = weight;
}

#endif
