// What the kernels ask of the device: every load, store, copy and operation of a warp.
//
// Each has two bodies: PTX, here, and one for a CPU, in cusim.h, which also checks its use. The kernels
// touch memory through these alone. Shared memory is addressed by 32-bit byte addresses, global
// memory by 64-bit ones. No toolkit header is needed: 16-bit floats travel as pairs in a u32, the
// first in the lower half.
#ifndef TKV_DEV_CUH
#define TKV_DEV_CUH

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

struct alignas(16) Quad {
  u32 word[4];
};

#ifdef TKV_SIM
#include "cusim.h"
#else

#define TKV_DEVICE __device__ __forceinline__
#define TKV_KERNEL(name, Params, threads, blocks)         \
  extern "C" __global__ __launch_bounds__(threads, blocks) \
  void name(const __grid_constant__ Params params)

namespace dev {

TKV_DEVICE int thread() { return threadIdx.x; }
TKV_DEVICE int block() { return blockIdx.x; }

TKV_DEVICE void block_sync() { __syncthreads(); }

TKV_DEVICE float float_of(u32 bits) { return __uint_as_float(bits); }
TKV_DEVICE u32 bits_of(float value) { return __float_as_uint(value); }

// 2 ** x, log2(x) and 1 / x to within 2 units in the last place or so; subnormals are zero.
TKV_DEVICE float exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
TKV_DEVICE float log2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
TKV_DEVICE float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// ---- Global memory ----

TKV_DEVICE int load_int(u64 from) {
  int x;
  asm volatile("ld.global.s32 %0, [%1];" : "=r"(x) : "l"(from));
  return x;
}
TKV_DEVICE u64 load_u64(u64 from) {
  u64 x;
  asm volatile("ld.global.u64 %0, [%1];" : "=l"(x) : "l"(from));
  return x;
}
TKV_DEVICE float load_float(u64 from) {
  float x;
  asm volatile("ld.global.f32 %0, [%1];" : "=f"(x) : "l"(from));
  return x;
}
TKV_DEVICE Quad load_quad(u64 from) {
  Quad x;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.word[0]), "=r"(x.word[1]), "=r"(x.word[2]), "=r"(x.word[3])
               : "l"(from));
  return x;
}
TKV_DEVICE u32 load_byte(u64 from) {
  u32 x;
  asm volatile("ld.global.u8 %0, [%1];" : "=r"(x) : "l"(from));
  return x;
}
TKV_DEVICE void store_float(u64 to, float x) {
  asm volatile("st.global.f32 [%0], %1;" ::"l"(to), "f"(x) : "memory");
}
TKV_DEVICE void store_u32(u64 to, u32 x) {
  asm volatile("st.global.u32 [%0], %1;" ::"l"(to), "r"(x) : "memory");
}
TKV_DEVICE void store_pair(u64 to, u32 x, u32 y) {
  asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(x), "r"(y) : "memory");
}
TKV_DEVICE void store_quad(u64 to, Quad x) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(x.word[0]),
               "r"(x.word[1]), "r"(x.word[2]), "r"(x.word[3])
               : "memory");
}
TKV_DEVICE void store_byte(u64 to, u32 x) {
  asm volatile("st.global.u8 [%0], %1;" ::"l"(to), "r"(x) : "memory");
}

// ---- Shared memory ----

extern __shared__ Quad dynamic_shared[];

TKV_DEVICE u32 shared_begin() { return (u32)__cvta_generic_to_shared(dynamic_shared); }

TKV_DEVICE float shared_load_float(u32 from) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(from) : "memory");
  return x;
}
TKV_DEVICE u64 shared_load_u64(u32 from) {
  u64 x;
  asm volatile("ld.shared.u64 %0, [%1];" : "=l"(x) : "r"(from) : "memory");
  return x;
}
TKV_DEVICE Quad shared_load_quad(u32 from) {
  Quad x;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.word[0]), "=r"(x.word[1]), "=r"(x.word[2]), "=r"(x.word[3])
               : "r"(from)
               : "memory");
  return x;
}
TKV_DEVICE void shared_store_float(u32 to, float x) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(x) : "memory");
}
TKV_DEVICE void shared_store_pair(u32 to, u32 x, u32 y) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(to), "r"(x), "r"(y) : "memory");
}
TKV_DEVICE void shared_store_u64(u32 to, u64 x) {
  asm volatile("st.shared.u64 [%0], %1;" ::"r"(to), "l"(x) : "memory");
}
TKV_DEVICE void shared_store_quad(u32 to, Quad x) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x.word[0]),
               "r"(x.word[1]), "r"(x.word[2]), "r"(x.word[3])
               : "memory");
}

// ---- Asynchronous copies of 16 bytes from global to shared memory ----

// With wanted == false nothing is read and 16 zeros are written. The L2 cache is told to fetch 128 bytes,
// as other threads ask for the rest of them at once.
TKV_DEVICE void copy_async(u32 to, u64 from, bool wanted) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(wanted ? 16 : 0)
               : "memory");
}
TKV_DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most so many of this thread's groups are on their way.
template <int groups>
TKV_DEVICE void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(groups) : "memory");
}

// ---- Operations of a whole warp ----

TKV_DEVICE float shuffle_xor(float x, int lanes) { return __shfl_xor_sync(~0u, x, lanes); }
TKV_DEVICE bool any(bool x) { return __any_sync(~0u, x); }

// Matrices of 8 rows of 16 bytes. Lane l gives the address of row l % 8 of matrix l / 8 and gets, of
// each matrix, the 4 bytes l % 4 of row l / 4; transposed: of 16-bit elements, those of rows
// 2 * (l % 4) and the next in column l / 4.
TKV_DEVICE void matrix_load(u32 (&x)[4], u32 row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(row)
               : "memory");
}
TKV_DEVICE void matrix_load(u32 (&x)[2], u32 row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(x[0]), "=r"(x[1])
               : "r"(row)
               : "memory");
}
TKV_DEVICE void matrix_load_transposed(u32 (&x)[4], u32 row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(row)
               : "memory");
}
TKV_DEVICE void matrix_load_transposed(u32 (&x)[2], u32 row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(x[0]), "=r"(x[1])
               : "r"(row)
               : "memory");
}

// c += a b, for a of 16 x 16, b of 16 x 8 and c of 16 x 8, laid out over the warp as PTX has it for
// mma.m16n8k16.
template <bool bf16>
TKV_DEVICE void multiply_add(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  if constexpr (bf16)
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ---- Numbers ----

// Two floats, each rounded to the nearest 16-bit float.
template <bool bf16>
TKV_DEVICE u32 pack(float low, float high) {
  u32 x;
  if constexpr (bf16)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
  else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
  return x;
}

// One 16-bit float.
template <bool bf16>
TKV_DEVICE float unpack(u32 x) {
  float y;
  if constexpr (bf16)
    y = float_of(x << 16);
  else
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; cvt.f32.f16 %0, low; }" : "=f"(y) : "r"(x));
  return y;
}

// Products of two pairs of float16.
TKV_DEVICE u32 multiply_f16(u32 x, u32 y) {
  u32 z;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
  return z;
}

// The bytes of (low, high), numbered 0 to 7, that the digits of the selector name, lowest first.
TKV_DEVICE u32 permute(u32 low, u32 high, u32 selector) {
  return __byte_perm(low, high, selector);
}

#if __CUDA_ARCH__ >= 890
#define TKV_HAS_E4M3 1
// Two e4m3 in the lower half of x, as f16.
TKV_DEVICE u32 f16_of_e4m3(u32 x) {
  u32 y;
  asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; cvt.rn.f16x2.e4m3x2 %0, low; }"
      : "=r"(y)
      : "r"(x));
  return y;
}
// Two e4m3 in the lower half, from floats; beyond 448 is 448.
TKV_DEVICE u32 e4m3_of(float low, float high) {
  u32 x;
  asm("{ .reg .b16 x; cvt.rn.satfinite.e4m3x2.f32 x, %1, %2; cvt.u32.u16 %0, x; }"
      : "=r"(x)
      : "f"(high), "f"(low));
  return x;
}
#else
#define TKV_HAS_E4M3 0
#endif

}  // namespace dev

#endif  // TKV_SIM

#endif
