// Merges the partial states of a token and query head: outputs over disjoint keys, weighted by the
// exponentials of their lse. A thread block takes one token and head, a thread two dimensions.
#include "params.h"

#include "dev.cuh"

namespace {

constexpr bool BF16 = TKV_BF16;
constexpr int DIM = TKV_HEAD_DIM;
constexpr int THREADS = 128;
static_assert(DIM % 2 == 0 && DIM <= 2 * THREADS, "two dimensions for each thread");

constexpr float LOG2_E = 1.44269504088896341f;
constexpr float LN_2 = 0.693147180559945309f;
constexpr u32 MINUS_INFINITY = 0xff800000u;

// The states of one token and head.
struct States {
  u64 rows, lse, out;
  int begin, end, num_heads, head;

  TKV_DEVICE i64 line(int nth) const {
    return static_cast<i64>(dev::load_int(rows + 4ll * nth)) * num_heads + head;
  }
};

TKV_DEVICE float greatest_lse(const States &states) {
  float greatest = dev::float_of(MINUS_INFINITY);
  for (int i = states.begin + dev::thread() % 32; i < states.end; i += 32) {
    const float lse = dev::load_float(states.lse + 4 * states.line(i));
    greatest = lse > greatest ? lse : greatest;
  }
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    const float other = dev::shuffle_xor(greatest, lanes);
    greatest = other > greatest ? other : greatest;
  }
  return greatest;
}

}  // namespace

TKV_KERNEL(merge_partials, MergeParams, THREADS, 8) {
  const int nth = dev::block() / params.num_q_heads;
  const States states{params.merge_rows,
                      params.partial_lse,
                      params.partial_out,
                      dev::load_int(params.merge_indptr + 4ll * nth),
                      dev::load_int(params.merge_indptr + 4ll * nth + 4),
                      params.num_q_heads,
                      dev::block() % params.num_q_heads};
  const i64 token = dev::load_int(params.merge_tokens + 4ll * nth);
  const float greatest = greatest_lse(states);
  const float base = greatest == dev::float_of(MINUS_INFINITY) ? 0 : greatest;
  const int dim = 2 * dev::thread();
  if (dim >= DIM) return;

  float total = 0, low = 0, high = 0;
#pragma unroll 8
  for (int i = states.begin; i < states.end; ++i) {
    const i64 line = states.line(i);
    const float weight = dev::exp2((dev::load_float(states.lse + 4 * line) - base) * LOG2_E);
    const u64 pair = dev::load_u64(states.out + 4 * (line * DIM + dim));
    total += weight;
    low += weight * dev::float_of(static_cast<u32>(pair));
    high += weight * dev::float_of(static_cast<u32>(pair >> 32));
  }
  const float share = total > 0 ? 1 / total : 0;
  const i64 to = token * params.out_token_stride + states.head * params.out_head_stride + dim;
  dev::store_u32(params.out + 2 * to, dev::pack<BF16>(low * share, high * share));
  if (dim == 0 && params.lse) {
    const float none = dev::float_of(MINUS_INFINITY);
    dev::store_float(params.lse + 4 * (token * params.num_q_heads + states.head),
                     total > 0 ? base + dev::log2(total) * LN_2 : none);
  }
}
