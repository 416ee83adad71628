// The device of dev.cuh on a CPU: included by it under TKV_SIM, implemented in cusim.cc.
//
// The kernels' own source is compiled against this. Each CUDA thread is a fiber; blocks run one after
// another. What a device would punish by wrong numbers, a hang or a fault is an error here that names
// block, thread and source line.
#ifndef CUSIM_H
#define CUSIM_H

#include <cmath>
#include <cstring>

#define TKV_DEVICE inline

// In two steps, so that a name that is itself a macro is known by what it stands for.
#define TKV_KERNEL(name, Params, threads, blocks) TKV_NAMED_KERNEL(name, Params, threads)
#define TKV_NAMED_KERNEL(name, Params, threads)                                     \
  static void name(const Params params);                                            \
  static const cusim::Kernel cusim_##name(                                          \
      #name, threads,                                                               \
      [](const void *argument) { name(*static_cast<const Params *>(argument)); }); \
  static void name([[maybe_unused]] const Params params)

namespace cusim {

using Body = void (*)(const void *argument);

// Makes a kernel known to cusim_launch by its name.
struct Kernel {
  Kernel(const char *name, int threads, Body body);
};

// A line of the kernel's source; the last parameter of what can fail.
struct Line {
  const char *file;
  int number;
  Line(const char *file = __builtin_FILE(), int number = __builtin_LINE())
      : file(file), number(number) {}
};

struct Position {
  int thread, block;
};
extern Position position;  // of the fiber that runs

const void *global_read(u64 from, int bytes, Line line);
void *global_write(u64 to, int bytes, Line line);
const void *shared_read(u32 from, int bytes, Line line);
void *shared_write(u32 to, int bytes, Line line);

void block_sync(Line line);
void copy_async(u32 to, u64 from, bool wanted, Line line);
void copy_commit();
void copy_wait(int groups);
float shuffle_xor(float x, int lanes, Line line);
bool any(bool x, Line line);
void matrix_load(u32 *x, int count, bool transposed, u32 row, Line line);
void multiply_add(bool bf16, float *c, const u32 *a, u32 b0, u32 b1, Line line);

u16 narrow(bool bf16, float x);
float widen(bool bf16, u16 x);
float widen_e4m3(u32 x);
u32 narrow_to_e4m3(float x);

template <typename T>
T get(const void *from) {
  T x;
  std::memcpy(&x, from, sizeof x);
  return x;
}
template <typename T>
void put(void *to, T x) {
  std::memcpy(to, &x, sizeof x);
}

}  // namespace cusim

namespace dev {

using cusim::Line;

TKV_DEVICE int thread() { return cusim::position.thread; }
TKV_DEVICE int block() { return cusim::position.block; }
TKV_DEVICE void block_sync(Line line = {}) { cusim::block_sync(line); }

TKV_DEVICE float float_of(u32 bits) { return cusim::get<float>(&bits); }
TKV_DEVICE u32 bits_of(float value) { return cusim::get<u32>(&value); }
TKV_DEVICE float exp2(float x) { return ::exp2f(x); }
TKV_DEVICE float log2(float x) { return ::log2f(x); }
TKV_DEVICE float reciprocal(float x) { return 1.0f / x; }

TKV_DEVICE int load_int(u64 from, Line line = {}) {
  return cusim::get<int>(cusim::global_read(from, 4, line));
}
TKV_DEVICE u64 load_u64(u64 from, Line line = {}) {
  return cusim::get<u64>(cusim::global_read(from, 8, line));
}
TKV_DEVICE float load_float(u64 from, Line line = {}) {
  return cusim::get<float>(cusim::global_read(from, 4, line));
}
TKV_DEVICE Quad load_quad(u64 from, Line line = {}) {
  return cusim::get<Quad>(cusim::global_read(from, 16, line));
}
TKV_DEVICE u32 load_byte(u64 from, Line line = {}) {
  return cusim::get<unsigned char>(cusim::global_read(from, 1, line));
}
TKV_DEVICE void store_float(u64 to, float x, Line line = {}) {
  cusim::put(cusim::global_write(to, 4, line), x);
}
TKV_DEVICE void store_u32(u64 to, u32 x, Line line = {}) {
  cusim::put(cusim::global_write(to, 4, line), x);
}
TKV_DEVICE void store_pair(u64 to, u32 x, u32 y, Line line = {}) {
  cusim::put(cusim::global_write(to, 8, line), x | static_cast<u64>(y) << 32);
}
TKV_DEVICE void store_quad(u64 to, Quad x, Line line = {}) {
  cusim::put(cusim::global_write(to, 16, line), x);
}
TKV_DEVICE void store_byte(u64 to, u32 x, Line line = {}) {
  cusim::put(cusim::global_write(to, 1, line), static_cast<unsigned char>(x));
}

// Not 0: an address that forgot to begin here is out of range.
TKV_DEVICE u32 shared_begin() { return 1024; }
TKV_DEVICE float shared_load_float(u32 from, Line line = {}) {
  return cusim::get<float>(cusim::shared_read(from, 4, line));
}
TKV_DEVICE u64 shared_load_u64(u32 from, Line line = {}) {
  return cusim::get<u64>(cusim::shared_read(from, 8, line));
}
TKV_DEVICE Quad shared_load_quad(u32 from, Line line = {}) {
  return cusim::get<Quad>(cusim::shared_read(from, 16, line));
}
TKV_DEVICE void shared_store_float(u32 to, float x, Line line = {}) {
  cusim::put(cusim::shared_write(to, 4, line), x);
}
TKV_DEVICE void shared_store_pair(u32 to, u32 x, u32 y, Line line = {}) {
  cusim::put(cusim::shared_write(to, 8, line), x | static_cast<u64>(y) << 32);
}
TKV_DEVICE void shared_store_u64(u32 to, u64 x, Line line = {}) {
  cusim::put(cusim::shared_write(to, 8, line), x);
}
TKV_DEVICE void shared_store_quad(u32 to, Quad x, Line line = {}) {
  cusim::put(cusim::shared_write(to, 16, line), x);
}

TKV_DEVICE void copy_async(u32 to, u64 from, bool wanted, Line line = {}) {
  cusim::copy_async(to, from, wanted, line);
}
TKV_DEVICE void copy_commit() { cusim::copy_commit(); }
template <int groups>
TKV_DEVICE void copy_wait() {
  cusim::copy_wait(groups);
}

TKV_DEVICE float shuffle_xor(float x, int lanes, Line line = {}) {
  return cusim::shuffle_xor(x, lanes, line);
}
TKV_DEVICE bool any(bool x, Line line = {}) { return cusim::any(x, line); }
template <int count>
TKV_DEVICE void matrix_load(u32 (&x)[count], u32 row, Line line = {}) {
  cusim::matrix_load(x, count, false, row, line);
}
template <int count>
TKV_DEVICE void matrix_load_transposed(u32 (&x)[count], u32 row, Line line = {}) {
  cusim::matrix_load(x, count, true, row, line);
}
template <bool bf16>
TKV_DEVICE void multiply_add(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, Line line = {}) {
  cusim::multiply_add(bf16, c, a, b0, b1, line);
}

template <bool bf16>
TKV_DEVICE u32 pack(float low, float high) {
  return cusim::narrow(bf16, low) | static_cast<u32>(cusim::narrow(bf16, high)) << 16;
}
template <bool bf16>
TKV_DEVICE float unpack(u32 x) {
  return cusim::widen(bf16, static_cast<u16>(x));
}
TKV_DEVICE u32 multiply_f16(u32 x, u32 y) {
  return pack<false>(unpack<false>(x) * unpack<false>(y),
                     unpack<false>(x >> 16) * unpack<false>(y >> 16));
}
TKV_DEVICE u32 permute(u32 low, u32 high, u32 selector) {
  const u64 bytes = low | static_cast<u64>(high) << 32;
  u32 picked = 0;
  for (int i = 0; i < 4; ++i) {
    picked |= static_cast<u32>(bytes >> (selector >> (4 * i) & 7) * 8 & 0xff) << 8 * i;
  }
  return picked;
}

// 0 makes the kernels do what they do before sm_89.
#ifndef TKV_HAS_E4M3
#define TKV_HAS_E4M3 1
#endif
TKV_DEVICE u32 f16_of_e4m3(u32 x) {
  return pack<false>(cusim::widen_e4m3(x & 0xff), cusim::widen_e4m3(x >> 8 & 0xff));
}
TKV_DEVICE u32 e4m3_of(float low, float high) {
  return cusim::narrow_to_e4m3(low) | cusim::narrow_to_e4m3(high) << 8;
}

}  // namespace dev

#endif
