/* What the host hands to the kernels: one struct by value each. Plain C, for LP64 machines.
 *
 * Addresses are 64-bit device addresses, strides are in elements of the tensor they belong to. A
 * last dimension is contiguous; each row of it (q, caches, out) begins at a multiple of 16 bytes.
 *
 * A kernel is compiled for one variant, by these macros (see geometry.py for what follows
 * from them):
 *   TKV_BF16       1: q and out are bfloat16, 0: float16
 *   TKV_KV_FP8     1: the caches are float8_e4m3fn, 0: as q
 *   TKV_HEAD_DIM   a multiple of 16 up to 128, or of 32 up to 256
 *   TKV_ROW_WARPS  warps with rows of their own: 1 for decode, more for extend
 */
#ifndef TKV_PARAMS_H
#define TKV_PARAMS_H

/* As Record in work.py. */
struct WorkRecord {
  int q_tok, n_tok, table_row, kv_begin, kv_end, pos0, part;
};

#define TKV_NO_MASK (-2147483647 - 1)

/* Entry "paged_attention" of paged_attention.cu.
 *
 * block: 128 threads. grid.x: num_records * num_kv_heads * row_tiles, where row_tiles is the largest
 * ceil(n_tok * group / rows) of the records and rows is 16 * TKV_ROW_WARPS. Dynamic shared memory:
 * Geometry.shared_bytes.
 *
 * A record with part < 0 writes out and, unless it is 0, lse. Others write rows part .. part + n_tok
 * of partial_out [num_partials, num_q_heads, head_dim] and partial_lse [num_partials, num_q_heads],
 * both float32.
 */
struct AttentionParams {
  unsigned long long q;           /* [T, num_q_heads, head_dim] */
  unsigned long long k_cache;     /* [num_blocks, block_size, num_kv_heads, head_dim] */
  unsigned long long v_cache;
  unsigned long long block_table; /* [B, max_blocks] int32 */
  unsigned long long records;     /* [num_records] struct WorkRecord */
  unsigned long long out;         /* [T, num_q_heads, head_dim] */
  unsigned long long lse;         /* [T, num_q_heads] float32, contiguous; 0: not wanted */
  unsigned long long partial_out;
  unsigned long long partial_lse;
  long long q_token_stride, q_head_stride;
  long long k_block_stride, k_token_stride, k_head_stride;
  long long v_block_stride, v_token_stride, v_head_stride;
  long long table_row_stride;
  long long out_token_stride, out_head_stride;
  int num_records, num_q_heads, num_kv_heads, block_size, row_tiles;
  int causal; /* 0 or 1 */
  int window; /* -1: none */
  float score_scale, softcap, v_scale; /* softcap 0: none */
};

/* Entry "merge_partials" of merge.cu (macros TKV_BF16 and TKV_HEAD_DIM).
 *
 * block: 128 threads. grid.x: num_tokens * num_q_heads. No dynamic shared memory. Fields as in Plan.
 */
struct MergeParams {
  unsigned long long partial_out, partial_lse;
  unsigned long long merge_tokens; /* [num_tokens] int32 */
  unsigned long long merge_indptr; /* [num_tokens + 1] int32 */
  unsigned long long merge_rows;   /* int32 */
  unsigned long long out, lse;     /* as in AttentionParams */
  long long out_token_stride, out_head_stride;
  int num_tokens, num_q_heads;
};

/* Entry "move_pieces" of move.cu: copies pieces of memory that the device can reach, mapped host
 * memory included; no two pieces overlap.
 *
 * block: 256 threads. grid.x: num_pieces * spans, where spans is the largest ceil(bytes /
 * TKV_SPAN_BYTES) of the pieces. No dynamic shared memory.
 */
#define TKV_SPAN_BYTES 32768

struct MovePiece {
  unsigned long long from, to, bytes; /* fast where both addresses are multiples of 16 */
};

struct MoveParams {
  unsigned long long pieces; /* [num_pieces] struct MovePiece */
  int num_pieces, spans;
};

/* Entry "write_kv" of write_kv.cu (macros TKV_BF16, TKV_KV_FP8 and TKV_HEAD_DIM): stores new tokens
 * in the caches.
 *
 * block: 128 threads. grid.x: num_tokens. No dynamic shared memory. What is stored is the value times
 * k_inverse_scale or v_inverse_scale; float8 saturates at 448.
 */
struct WriteParams {
  unsigned long long k, v;   /* [num_tokens, num_kv_heads, head_dim], as TKV_BF16 says */
  unsigned long long slots;  /* [num_tokens] int64: block * block_size + token in it; < 0: none */
  unsigned long long k_cache, v_cache;
  long long k_token_stride, k_head_stride, v_token_stride, v_head_stride;
  long long k_cache_block_stride, k_cache_token_stride, k_cache_head_stride;
  long long v_cache_block_stride, v_cache_token_stride, v_cache_head_stride;
  int num_tokens, num_kv_heads, block_size;
  float k_inverse_scale, v_inverse_scale;
};

#endif
