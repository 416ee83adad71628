// Small kernels that do one thing wrong each, and a few that do not: what the simulator must tell.
#include "dev.cuh"

namespace {

constexpr int THREADS = 64;

struct ProbeParams {
  u64 in, out;
};

TKV_DEVICE u32 own_word() { return dev::shared_begin() + 4 * dev::thread(); }
TKV_DEVICE u32 own_quad() { return dev::shared_begin() + 16 * dev::thread(); }

}  // namespace

TKV_KERNEL(rotate, ProbeParams, THREADS, 1) {
  const int thread = dev::thread();
  dev::shared_store_float(own_word(), dev::load_float(params.in + 4 * thread));
  dev::block_sync();
  const u32 next = dev::shared_begin() + 4 * ((thread + 1) % THREADS);
  dev::store_float(params.out + 4 * (dev::block() * THREADS + thread), dev::shared_load_float(next));
}

TKV_KERNEL(rotate_without_barrier, ProbeParams, THREADS, 1) {
  const int thread = dev::thread();
  dev::shared_store_float(own_word(), dev::load_float(params.in + 4 * thread));
  const u32 next = dev::shared_begin() + 4 * ((thread + 1) % THREADS);
  dev::store_float(params.out + 4 * thread, dev::shared_load_float(next));
}

TKV_KERNEL(overwrite_without_barrier, ProbeParams, THREADS, 1) {
  dev::shared_store_float(own_word(), 1);
  dev::block_sync();
  const float x = dev::shared_load_float(dev::shared_begin() + 4 * (THREADS - 1 - dev::thread()));
  dev::shared_store_float(own_word(), x);
}

TKV_KERNEL(read_nothing, ProbeParams, THREADS, 1) {
  dev::store_float(params.out + 4 * dev::thread(), dev::shared_load_float(own_word()));
}

TKV_KERNEL(copy, ProbeParams, THREADS, 1) {
  dev::copy_async(own_quad(), params.in + 16 * dev::thread(), dev::thread() % 2 == 0);
  dev::copy_commit();
  dev::copy_wait<0>();
  dev::store_quad(params.out + 16 * dev::thread(), dev::shared_load_quad(own_quad()));
}

TKV_KERNEL(copy_and_read_at_once, ProbeParams, THREADS, 1) {
  dev::copy_async(own_quad(), params.in, true);
  dev::copy_commit();
  dev::copy_async(own_quad() + 16 * THREADS, params.in, true);
  dev::copy_commit();
  dev::copy_wait<1>();
  dev::store_quad(params.out + 16 * dev::thread(), dev::shared_load_quad(own_quad() + 16 * THREADS));
}

TKV_KERNEL(copy_and_leave, ProbeParams, THREADS, 1) {
  dev::copy_async(own_quad(), params.in, true);
  dev::copy_commit();
}

TKV_KERNEL(copy_to_odd_place, ProbeParams, THREADS, 1) {
  dev::copy_async(own_quad() + 8, params.in, true);
}

TKV_KERNEL(copy_from_odd_place, ProbeParams, THREADS, 1) {
  dev::copy_async(own_quad(), params.in + 8, true);
}

TKV_KERNEL(store_past_the_end, ProbeParams, THREADS, 1) {
  dev::shared_store_float(own_word() + 4 * THREADS, 0);
}

TKV_KERNEL(store_before_the_begin, ProbeParams, THREADS, 1) {
  dev::shared_store_float(4 * dev::thread(), 0);
}

TKV_KERNEL(shuffle_in_half_a_warp, ProbeParams, THREADS, 1) {
  if (dev::thread() % 32 < 16) dev::shuffle_xor(1, 1);
}

TKV_KERNEL(shuffle_here_and_there, ProbeParams, THREADS, 1) {
  if (dev::thread() % 32 < 16) {
    dev::shuffle_xor(1, 1);
  } else {
    dev::shuffle_xor(2, 1);
  }
}

TKV_KERNEL(vote_while_others_shuffle, ProbeParams, THREADS, 1) {
  if (dev::thread() % 32 == 5) {
    dev::any(true);
  } else {
    dev::shuffle_xor(2, 1);
  }
}

TKV_KERNEL(barrier_in_one_warp, ProbeParams, THREADS, 1) {
  if (dev::thread() < 32) dev::block_sync();
}

TKV_KERNEL(barriers_at_two_lines, ProbeParams, THREADS, 1) {
  if (dev::thread() < 32) {
    dev::block_sync();
  } else {
    dev::block_sync();
  }
}

TKV_KERNEL(barrier_while_others_shuffle, ProbeParams, THREADS, 1) {
  if (dev::thread() == 7) {
    dev::block_sync();
  } else {
    dev::shuffle_xor(1, 1);
  }
}

TKV_KERNEL(plain_rows, ProbeParams, THREADS, 1) {
  for (int i = 0; i < 4; ++i) dev::shared_store_quad(own_quad() + 16 * THREADS * i, {});
  dev::block_sync();
  u32 x[4];
  dev::matrix_load(x, dev::shared_begin() + dev::thread() % 32 * 128);
}

TKV_KERNEL(padded_rows, ProbeParams, THREADS, 1) {
  for (int i = 0; i < 5; ++i) dev::shared_store_quad(own_quad() + 16 * THREADS * i, {});
  dev::block_sync();
  u32 x[4];
  dev::matrix_load(x, dev::shared_begin() + dev::thread() % 32 * 144);
}
