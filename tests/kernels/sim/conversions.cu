// The conversions of e4m3.cuh, one value for each thread.
#include "dev.cuh"
#include "e4m3.cuh"

namespace {

constexpr int THREADS = 256;

struct ConversionParams {
  u64 in, out;
};

TKV_DEVICE int nth() { return dev::block() * THREADS + dev::thread(); }

// Each place of a word of four is tried: what is beside the value must not matter.
TKV_DEVICE u32 widened(u32 byte) {
  const u32 x = byte * 0x01010101u;
  const u32 pairs[4] = {unpack_e4m3<0, 1>(x ^ 0xffff0000u), unpack_e4m3<2, 3>(x ^ 0xffffu),
                        unpack_e4m3<0, 2>(x ^ 0xff00ff00u), unpack_e4m3<1, 3>(x ^ 0x00ff00ffu)};
  for (u32 pair : pairs) {
    if (pair != pairs[0] || pair >> 16 != (pair & 0xffff)) return 0x1234;
  }
  return pairs[0] & 0xffff;
}

}  // namespace

TKV_KERNEL(widen, ConversionParams, THREADS, 1) {
  const u32 wide = widened(dev::load_byte(params.in + nth()));
  dev::store_byte(params.out + 2 * nth(), wide);
  dev::store_byte(params.out + 2 * nth() + 1, wide >> 8);
}

TKV_KERNEL(narrow, ConversionParams, THREADS, 1) {
  dev::store_byte(params.out + nth(), narrow_to_e4m3(dev::load_float(params.in + 4 * nth())));
}
