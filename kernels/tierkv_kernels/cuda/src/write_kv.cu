// Stores the keys and values of new tokens in the slots of the caches. A thread block takes one token.
#include "params.h"

#include "dev.cuh"
#include "e4m3.cuh"

namespace {

constexpr bool BF16 = TKV_BF16;
constexpr bool FP8 = TKV_KV_FP8;
constexpr int DIM = TKV_HEAD_DIM;
constexpr int THREADS = 128;
constexpr int EIGHTHS = DIM / 8;  // pieces of eight dimensions
static_assert(DIM % 8 == 0, "rows are whole pieces");

// Eight values times a scale, in the form of the cache.
TKV_DEVICE void store_eight(u64 to, const Quad &eight, float scale) {
  u32 narrow[2] = {};
  Quad scaled;
  for (int i = 0; i < 4; ++i) {
    const float low = dev::unpack<BF16>(eight.word[i]) * scale;
    const float high = dev::unpack<BF16>(eight.word[i] >> 16) * scale;
    if constexpr (FP8) {
      narrow[i / 2] |= (narrow_to_e4m3(low) | narrow_to_e4m3(high) << 8) << i % 2 * 16;
    } else {
      scaled.word[i] = dev::pack<BF16>(low, high);
    }
  }
  if constexpr (FP8) {
    dev::store_pair(to, narrow[0], narrow[1]);
  } else {
    dev::store_quad(to, scaled);
  }
}

struct Row {
  u64 from, to;
  float scale;
};

TKV_DEVICE Row key_row(const WriteParams &params, int head, i64 block, i64 token) {
  const i64 from = dev::block() * params.k_token_stride + head * params.k_head_stride;
  const i64 to = block * params.k_cache_block_stride + token * params.k_cache_token_stride +
                 head * params.k_cache_head_stride;
  return {params.k + 2 * from, params.k_cache + (FP8 ? 1 : 2) * to, params.k_inverse_scale};
}

TKV_DEVICE Row value_row(const WriteParams &params, int head, i64 block, i64 token) {
  const i64 from = dev::block() * params.v_token_stride + head * params.v_head_stride;
  const i64 to = block * params.v_cache_block_stride + token * params.v_cache_token_stride +
                 head * params.v_cache_head_stride;
  return {params.v + 2 * from, params.v_cache + (FP8 ? 1 : 2) * to, params.v_inverse_scale};
}

}  // namespace

TKV_KERNEL(write_kv, WriteParams, THREADS, 8) {
  const i64 slot = static_cast<i64>(dev::load_u64(params.slots + 8ull * dev::block()));
  if (slot < 0) return;
  const i64 block = slot / params.block_size, token = slot % params.block_size;
  for (int i = dev::thread(); i < 2 * params.num_kv_heads * EIGHTHS; i += THREADS) {
    const int head = i / EIGHTHS / 2, eighth = i % EIGHTHS;
    const bool values = i / EIGHTHS % 2;
    const Row row = values ? value_row(params, head, block, token)
                           : key_row(params, head, block, token);
    store_eight(row.to + (FP8 ? 8 : 16) * eighth, dev::load_quad(row.from + 16 * eighth), row.scale);
  }
}
