/* What attention.c takes: mirrored by tierkv_kernels.cpu.library. */
#ifndef TIERKV_ATTENTION_H
#define TIERKV_ATTENTION_H

#include <stdint.h>

/* tierkv_kernels.work.RECORD_DTYPE. */
struct record {
    int32_t q_tok, n_tok, table_row, kv_begin, kv_end, pos0, part;
};
#define NO_MASK INT32_MIN

/* Rows of [.., .., dim], the last dimension contiguous. Strides are in elements. */
struct cache {
    const char *data;
    int64_t block_stride, token_stride, head_stride;
};

/* Fields as in tierkv_kernels.call.Call and tierkv_kernels.work.Plan. */
struct attention {
    const char *q;
    char *out;
    float *lse; /* may be NULL */
    struct cache k, v;
    const int32_t *block_table;
    const int32_t *seq_lens;
    const struct record *records;
    const int32_t *merge_tokens, *merge_indptr, *merge_rows;
    int64_t q_stride, q_head_stride, out_stride, out_head_stride, table_stride;
    int64_t num_blocks, num_sequences, num_records, num_merges, num_partials;
    int32_t q_type, kv_type; /* enum type */
    int32_t kv_heads, group, head_dim, block_size;
    int32_t causal, window;
    float score_scale, softcap, v_scale;
};

enum result { DONE, BAD_TABLE, NO_MEMORY };

#endif
