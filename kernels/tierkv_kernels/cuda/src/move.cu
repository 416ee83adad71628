// Copies scattered pieces of memory in one launch: blocks between the device and mapped host memory,
// or within either. A thread block takes a span of one piece.
#include "params.h"

#include "dev.cuh"

namespace {

constexpr int THREADS = 256;
constexpr int AHEAD = 8;  // loads of 16 bytes of a thread before its first store
static_assert(TKV_SPAN_BYTES % (16 * THREADS * AHEAD) == 0, "spans are whole rounds");

TKV_DEVICE void move_bytes(u64 from, u64 to, u64 begin, u64 end) {
  for (u64 at = begin + dev::thread(); at < end; at += THREADS) {
    dev::store_byte(to + at, dev::load_byte(from + at));
  }
}

TKV_DEVICE void move_quads(u64 from, u64 to, u64 begin, u64 end) {
  for (u64 round = begin; round < end; round += 16 * THREADS * AHEAD) {
    Quad quads[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      const u64 at = round + 16 * (i * THREADS + dev::thread());
      if (at < end) quads[i] = dev::load_quad(from + at);
    }
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      const u64 at = round + 16 * (i * THREADS + dev::thread());
      if (at < end) dev::store_quad(to + at, quads[i]);
    }
  }
}

}  // namespace

TKV_KERNEL(move_pieces, MoveParams, THREADS, 4) {
  const u64 piece = params.pieces + static_cast<u64>(dev::block() / params.spans) * sizeof(MovePiece);
  const u64 from = dev::load_u64(piece), to = dev::load_u64(piece + 8);
  const u64 bytes = dev::load_u64(piece + 16);
  const u64 begin = static_cast<u64>(dev::block() % params.spans) * TKV_SPAN_BYTES;
  if (begin >= bytes) return;
  const u64 end = bytes - begin < TKV_SPAN_BYTES ? bytes : begin + TKV_SPAN_BYTES;
  if ((from | to) % 16) return move_bytes(from, to, begin, end);
  const u64 whole = end - end % 16;
  move_quads(from, to, begin, whole);
  move_bytes(from, to, whole, end);
}
