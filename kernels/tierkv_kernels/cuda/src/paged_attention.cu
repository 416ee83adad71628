// Attention of one work record's queries over keys and values kept in blocks.
//
// Split-KV flash decoding ("Flash-Decoding", Dao et al. 2023; the running softmax is that of
// FlashAttention, arXiv:2205.14135). A thread block takes one KV head and a tile of query rows, a row
// being one token under one query head of the group, so that decode, too, fills the rows of the
// tensor cores. It walks the record's keys tile by tile; copies of the next tiles are on their way
// meanwhile. Of its four warps some share the rows, some the keys, and for wide heads some the
// dimensions of the values.
#include "params.h"

#include "dev.cuh"
#include "e4m3.cuh"

namespace {

constexpr bool BF16 = TKV_BF16;  // queries and outputs; else float16
constexpr bool FP8 = TKV_KV_FP8;
constexpr bool BF16_MATH = BF16 && !FP8;  // float16 holds every float8, and weights better
constexpr int DIM = TKV_HEAD_DIM;
constexpr int KV_BYTES = FP8 ? 1 : 2;

constexpr int THREADS = 128;
constexpr int WARPS = THREADS / 32;
constexpr int ROW_WARPS = TKV_ROW_WARPS;
constexpr int DIM_WARPS = DIM > 128 ? 2 : 1;
constexpr int KEY_WARPS = WARPS / (ROW_WARPS * DIM_WARPS);
static_assert(ROW_WARPS * DIM_WARPS * KEY_WARPS == WARPS, "each warp has its work");

constexpr int ROWS = 16 * ROW_WARPS;
constexpr int TILE = DIM > 128 ? 32 : 64;         // keys
constexpr int STEPS = TILE / (16 * KEY_WARPS);    // of 16 keys of a warp in a tile
constexpr int STAGES = FP8 ? 3 : 2;               // as much on its way as with 16-bit caches
constexpr int GROUPS = DIM / 16;                  // of 16 dimensions in a row
constexpr int OWN_GROUPS = GROUPS / DIM_WARPS;    // of the output dimensions of a warp
constexpr bool KEEPS_QUERIES = DIM <= 128;        // in registers
static_assert(DIM % 16 == 0 && OWN_GROUPS * DIM_WARPS == GROUPS, "rows are whole groups");

// Shared memory: queries; addresses of the keys and values of two tiles; the stages, each keys and then
// values of a tile. A row is an odd number of 16 bytes long, so that eight rows below each other lie in
// different banks. In the end the outputs of the warps take the place of the stages. How much that is
// in all, geometry.py says.
TKV_DEVICE constexpr int padded(int bytes) { return bytes / 16 % 2 ? bytes : bytes + 16; }
constexpr int QUERY_ROW = padded(2 * DIM);
constexpr int KV_ROW = padded(KV_BYTES * DIM);
constexpr int ADDRESSES = ROWS * QUERY_ROW;
constexpr int STAGE_0 = ADDRESSES + 2 * 2 * TILE * 8;
constexpr int STAGE = 2 * TILE * KV_ROW;
constexpr int STATES = STAGE_0;
constexpr int OUTPUTS = STATES + KEY_WARPS * ROWS * 8;
constexpr int OUTPUT_ROW = 4 * (DIM + 8);

constexpr float LOG2_E = 1.44269504088896341f;
constexpr float LN_2 = 0.693147180559945309f;
constexpr u32 MINUS_INFINITY = 0xff800000u;

// What this thread block does.
struct Work {
  WorkRecord record;
  int head, group;        // KV head; query heads of one KV head
  int first_row, rows;    // of the record's n_tok * group rows
  int begin, end;         // the keys that some of these rows see

  TKV_DEVICE int token_of(int row) const { return (first_row + row) / group; }
};

template <typename T>
TKV_DEVICE T smaller(T a, T b) {
  return a < b ? a : b;
}
template <typename T>
TKV_DEVICE T larger(T a, T b) {
  return a > b ? a : b;
}

// The keys first .. last that a token of the record sees.
struct Sight {
  int first, last;

  TKV_DEVICE Sight(const AttentionParams &params, const WorkRecord &record, int token) {
    first = record.kv_begin;
    last = record.kv_end - 1;
    if (record.pos0 == TKV_NO_MASK) return;
    const i64 position = static_cast<i64>(record.pos0) + token;
    if (params.causal && position < last) last = static_cast<int>(larger<i64>(position, -1));
    if (params.window >= 0 && position - params.window > first) {
      first = static_cast<int>(position - params.window);
    }
  }
};

TKV_DEVICE Work find_work(const AttentionParams &params) {
  Work work;
  int rest = dev::block();
  // The last rows of a record see the most keys: they begin first.
  const int row_tile = params.row_tiles - 1 - rest % params.row_tiles;
  rest /= params.row_tiles;
  work.head = rest % params.num_kv_heads;
  const u64 at = params.records + static_cast<u64>(rest / params.num_kv_heads) * sizeof(WorkRecord);
  work.record.q_tok = dev::load_int(at);
  work.record.n_tok = dev::load_int(at + 4);
  work.record.table_row = dev::load_int(at + 8);
  work.record.kv_begin = dev::load_int(at + 12);
  work.record.kv_end = dev::load_int(at + 16);
  work.record.pos0 = dev::load_int(at + 20);
  work.record.part = dev::load_int(at + 24);

  work.group = params.num_q_heads / params.num_kv_heads;
  work.first_row = row_tile * ROWS;
  work.rows = smaller(work.record.n_tok * work.group - work.first_row, ROWS);
  if (work.rows <= 0) return work;
  work.begin = Sight(params, work.record, work.token_of(0)).first;
  work.end = Sight(params, work.record, work.token_of(work.rows - 1)).last + 1;
  return work;
}

// ---- Queries ----

// What float16 can hold; NaN stays.
TKV_DEVICE float within_f16(float x) {
  constexpr float greatest = 65504;
  return x > greatest ? greatest : x < -greatest ? -greatest : x;
}

// With float8 keys, queries are float16, and each 16 dimensions are stored in the order in which a thread finds them in its four
// bytes of a row: 0 1 4 5 8 9 12 13, 2 3 6 7 10 11 14 15.
TKV_DEVICE void store_queries(u32 to, Quad eight_dims, int half) {
  if constexpr (FP8) {
    if constexpr (BF16) {
      for (u32 &word : eight_dims.word) {
        word = dev::pack<false>(within_f16(dev::unpack<true>(word)),
                                within_f16(dev::unpack<true>(word >> 16)));
      }
    }
    dev::shared_store_pair(to + 8 * half, eight_dims.word[0], eight_dims.word[2]);
    dev::shared_store_pair(to + 8 * half + 16, eight_dims.word[1], eight_dims.word[3]);
  } else {
    dev::shared_store_quad(to + 16 * half, eight_dims);
  }
}

TKV_DEVICE void fetch_queries(const AttentionParams &params, const Work &work, u32 shared) {
  for (int i = dev::thread(); i < ROWS * 2 * GROUPS; i += THREADS) {
    const int row = i / (2 * GROUPS), eighth = i % (2 * GROUPS);
    Quad eight_dims{};
    if (row < work.rows) {
      const int token = work.token_of(row);
      const int head = work.head * work.group + (work.first_row + row) - token * work.group;
      const i64 offset = (work.record.q_tok + token) * params.q_token_stride +
                         head * params.q_head_stride + 8 * eighth;
      eight_dims = dev::load_quad(params.q + 2 * offset);
    }
    store_queries(shared + row * QUERY_ROW + 32 * (eighth / 2), eight_dims, eighth % 2);
  }
}

// ---- Keys and values on their way ----

// Finds where the rows of a tile lie: each thread one row of the keys or of the values. The block table
// is read long before its answer is used.
struct Finder {
  u64 table;
  int begin, end;

  TKV_DEVICE Finder(const AttentionParams &params, const Work &work)
      : table(params.block_table + 4ll * work.record.table_row * params.table_row_stride),
        begin(work.begin),
        end(work.end) {}

  static TKV_DEVICE bool has_row() { return dev::thread() < 2 * TILE; }
  static TKV_DEVICE bool of_values() { return dev::thread() >= TILE; }
  TKV_DEVICE int key(int tile) const { return begin + tile * TILE + dev::thread() % TILE; }

  TKV_DEVICE int ask(const AttentionParams &params, int tile) const {
    const bool wanted = has_row() && key(tile) < end;
    return wanted ? dev::load_int(table + 4ll * (key(tile) / params.block_size)) : 0;
  }

  // An address of 0: there is no such key.
  TKV_DEVICE void note(const AttentionParams &params, int head, u32 shared, int tile,
                       int block) const {
    if (!has_row()) return;
    u64 address = 0;
    if (key(tile) < end) {
      const i64 token = key(tile) % params.block_size;
      const i64 offset =
          of_values() ? block * params.v_block_stride + token * params.v_token_stride +
                            head * params.v_head_stride
                      : block * params.k_block_stride + token * params.k_token_stride +
                            head * params.k_head_stride;
      address = (of_values() ? params.v_cache : params.k_cache) + offset * KV_BYTES;
    }
    const u32 to = shared + ADDRESSES + tile % 2 * 2 * TILE * 8;
    dev::shared_store_u64(to + dev::thread() * 8, address);
  }
};

// Starts the copies of a tile, whose addresses are noted. Keys past the end become zeros: nothing that
// lies in unused memory reaches a product.
TKV_DEVICE void fetch_tile(const AttentionParams &params, u32 shared, int tile) {
  constexpr int CHUNKS = KV_BYTES * DIM / 16;  // of a row
  const u32 addresses = shared + ADDRESSES + tile % 2 * 2 * TILE * 8;
  const u32 stage = shared + STAGE_0 + tile % STAGES * STAGE;
#pragma unroll 4
  for (int first = 0; first < 2 * TILE * CHUNKS; first += THREADS) {
    const int i = first + dev::thread();
    if (2 * TILE * CHUNKS % THREADS && i >= 2 * TILE * CHUNKS) break;
    const int row = i / CHUNKS, chunk = i % CHUNKS;
    const u64 address = dev::shared_load_u64(addresses + 8 * row);
    const bool wanted = address != 0;
    dev::copy_async(stage + row * KV_ROW + 16 * chunk,
                    wanted ? address + 16 * chunk : params.k_cache, wanted);
  }
}

// ---- Arithmetic ----

// tanh(x), to within a few units in the last place.
TKV_DEVICE float tanh(float x) {
  const float square = x * x;
  if (square < 0.02f) {
    return x + x * square * (-1.0f / 3 + square * (2.0f / 15 + square * (-17.0f / 315)));
  }
  return 1.0f - 2.0f * dev::reciprocal(1.0f + dev::exp2(2 * LOG2_E * x));
}

// What becomes of a product of query and key: a score in units of ln 2.
struct Scoring {
  float before, cap;  // cap 0: none

  TKV_DEVICE explicit Scoring(const AttentionParams &params) {
    cap = params.softcap * LOG2_E;
    before = params.softcap > 0 ? params.score_scale / params.softcap : params.score_scale * LOG2_E;
  }
  TKV_DEVICE float operator()(float product) const {
    const float score = product * before;
    return cap > 0 ? cap * tanh(score) : score;
  }
};

// What a thread has of its warp's output: of rows lane / 4 and 8 below, the greatest score, its part of
// the sum of 2 ** (score - greatest), and its part of the values weighted by that.
struct Output {
  float greatest[2], sum[2];
  float value[2 * OWN_GROUPS][4];

  TKV_DEVICE Output() {
    for (int i = 0; i < 2; ++i) greatest[i] = dev::float_of(MINUS_INFINITY), sum[i] = 0;
#pragma unroll
    for (int i = 0; i < 2 * OWN_GROUPS; ++i) {
      for (int j = 0; j < 4; ++j) value[i][j] = 0;
    }
  }
};

TKV_DEVICE float base_of(float greatest) {
  return greatest == dev::float_of(MINUS_INFINITY) ? 0 : greatest;
}

// The sixteen rows of queries of a warp against dimensions 16 * group and on.
TKV_DEVICE void load_queries(u32 (&a)[4], u32 queries, int group) {
  const int lane = dev::thread() % 32;
  dev::matrix_load(a, queries + lane % 16 * QUERY_ROW + 32 * group + lane / 16 * 16);
}

// scores of 16 rows and the 16 keys whose rows begin at `keys`.
TKV_DEVICE void score_keys(float (&scores)[2][4], const u32 (&kept)[GROUPS][4], u32 queries,
                           u32 keys) {
  const int lane = dev::thread() % 32;
#pragma unroll
  for (int group = 0; group < GROUPS; ++group) {
    u32 a[4];
    if constexpr (KEEPS_QUERIES) {
      for (int i = 0; i < 4; ++i) a[i] = kept[group][i];
    } else {
      load_queries(a, queries, group);
    }
    if constexpr (FP8) {
      u32 x[2];
      dev::matrix_load(x, keys + lane % 16 * KV_ROW + 16 * group);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        dev::multiply_add<BF16_MATH>(scores[i], a, unpack_e4m3<0, 1>(x[i]),
                                unpack_e4m3<2, 3>(x[i]));
      }
    } else {
      u32 x[4];
      dev::matrix_load(x, keys + (lane % 8 + lane / 16 * 8) * KV_ROW + 32 * group + lane / 8 % 2 * 16);
      dev::multiply_add<BF16_MATH>(scores[0], a, x[0], x[1]);
      dev::multiply_add<BF16_MATH>(scores[1], a, x[2], x[3]);
    }
  }
}

// Adds 16 keys' values, whose rows begin at `values`. With float8, values of even and of odd dimensions
// are separate columns.
TKV_DEVICE void add_values(Output &output, const u32 (&weights)[4], u32 values) {
  const int lane = dev::thread() % 32;
#pragma unroll
  for (int group = 0; group < OWN_GROUPS; ++group) {
    if constexpr (FP8) {
      u32 x[2];
      dev::matrix_load_transposed(x, values + lane % 16 * KV_ROW + 16 * group);
      dev::multiply_add<BF16_MATH>(output.value[2 * group], weights, unpack_e4m3<0, 2>(x[0]),
                              unpack_e4m3<0, 2>(x[1]));
      dev::multiply_add<BF16_MATH>(output.value[2 * group + 1], weights, unpack_e4m3<1, 3>(x[0]),
                              unpack_e4m3<1, 3>(x[1]));
    } else {
      u32 x[4];
      dev::matrix_load_transposed(x, values + lane % 16 * KV_ROW + 32 * group + lane / 16 * 16);
      dev::multiply_add<BF16_MATH>(output.value[2 * group], weights, x[0], x[1]);
      dev::multiply_add<BF16_MATH>(output.value[2 * group + 1], weights, x[2], x[3]);
    }
  }
}

// Turns scores into weights, and what is there into what it weighs beside them.
TKV_DEVICE void weigh(Output &output, float (&scores)[2][4]) {
  float factor[2];
  bool grew = false;
  for (int i = 0; i < 2; ++i) {
    float greatest = larger(larger(scores[0][2 * i], scores[0][2 * i + 1]),
                         larger(scores[1][2 * i], scores[1][2 * i + 1]));
    greatest = larger(greatest, dev::shuffle_xor(greatest, 1));
    greatest = larger(greatest, dev::shuffle_xor(greatest, 2));
    greatest = larger(greatest, output.greatest[i]);
    const float base = base_of(greatest);
    factor[i] = dev::exp2(output.greatest[i] - base);
    grew |= greatest > output.greatest[i];
    output.greatest[i] = greatest;
    float sum = 0;
    for (int j = 0; j < 2; ++j) {
      for (int k = 2 * i; k < 2 * i + 2; ++k) {
        scores[j][k] = dev::exp2(scores[j][k] - base);
        sum += scores[j][k];
      }
    }
    output.sum[i] = output.sum[i] * factor[i] + sum;
  }
  if (!dev::any(grew)) return;
#pragma unroll
  for (int i = 0; i < 2 * OWN_GROUPS; ++i) {
    for (int j = 0; j < 4; ++j) output.value[i][j] *= factor[j / 2];
  }
}

// ---- The end ----

TKV_DEVICE float sum_of_four_lanes(float x) {
  x += dev::shuffle_xor(x, 1);
  return x + dev::shuffle_xor(x, 2);
}

struct Place {
  int row_warp, key_warp, dim_warp;

  TKV_DEVICE Place() {
    const int warp = dev::thread() / 32;
    row_warp = warp % ROW_WARPS;
    key_warp = warp / ROW_WARPS % KEY_WARPS;
    dim_warp = warp / (ROW_WARPS * KEY_WARPS);
  }
};

// Of one query head and token: where its output goes.
TKV_DEVICE void write_lse(const AttentionParams &params, const Work &work, int row, float lse) {
  const int token = work.token_of(row);
  const int head = work.head * work.group + (work.first_row + row) - token * work.group;
  const bool direct = work.record.part < 0;
  const u64 to = direct ? params.lse : params.partial_lse;
  if (direct && to == 0) return;
  const i64 line = (direct ? work.record.q_tok : work.record.part) + static_cast<i64>(token);
  dev::store_float(to + 4 * (line * params.num_q_heads + head), lse);
}

TKV_DEVICE void write_eight(const AttentionParams &params, const Work &work, int row, int eighth,
                            const float (&x)[8]) {
  const int token = work.token_of(row);
  const int head = work.head * work.group + (work.first_row + row) - token * work.group;
  if (work.record.part < 0) {
    Quad packed;
#pragma unroll
    for (int i = 0; i < 4; ++i) packed.word[i] = dev::pack<BF16>(x[2 * i], x[2 * i + 1]);
    const i64 offset = (work.record.q_tok + token) * params.out_token_stride +
                       head * params.out_head_stride + 8 * eighth;
    dev::store_quad(params.out + 2 * offset, packed);
    return;
  }
  const i64 line = (work.record.part + static_cast<i64>(token)) * params.num_q_heads + head;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    Quad four;
    for (int i = 0; i < 4; ++i) four.word[i] = dev::bits_of(x[4 * half + i]);
    dev::store_quad(params.partial_out + 4 * (line * DIM + 8 * eighth + 4 * half), four);
  }
}

// Puts what each warp has into shared memory, weighed so that the sum over the warps that share the
// keys is the record's output, and writes lse.
TKV_DEVICE void gather_outputs(const AttentionParams &params, const Work &work, u32 shared,
                               const Place &place, Output &output) {
  const int lane = dev::thread() % 32;
  const u32 states = shared + STATES;
  for (int i = 0; i < 2; ++i) {
    output.sum[i] = sum_of_four_lanes(output.sum[i]);
    const int row = 16 * place.row_warp + lane / 4 + 8 * i;
    if (lane % 4 == 0 && place.dim_warp == 0) {
      dev::shared_store_pair(states + 8 * (place.key_warp * ROWS + row),
                             dev::bits_of(output.greatest[i]), dev::bits_of(output.sum[i]));
    }
  }
  dev::block_sync();
  for (int i = 0; i < 2; ++i) {
    const int row = 16 * place.row_warp + lane / 4 + 8 * i;
    float greatest = dev::float_of(MINUS_INFINITY);
    for (int warp = 0; warp < KEY_WARPS; ++warp) {
      greatest = larger(greatest, dev::shared_load_float(states + 8 * (warp * ROWS + row)));
    }
    const float base = base_of(greatest);
    float sum = 0;
    for (int warp = 0; warp < KEY_WARPS; ++warp) {
      const u32 state = states + 8 * (warp * ROWS + row);
      sum += dev::shared_load_float(state + 4) * dev::exp2(dev::shared_load_float(state) - base);
    }
    if (lane % 4 == 0 && place.key_warp == 0 && place.dim_warp == 0 && row < work.rows) {
      const float none = dev::float_of(MINUS_INFINITY);
      write_lse(params, work, row, sum > 0 ? (base + dev::log2(sum)) * LN_2 : none);
    }
    const float factor =
        sum > 0 ? dev::exp2(output.greatest[i] - base) * params.v_scale / sum : 0;
    const u32 to = shared + OUTPUTS + (place.key_warp * ROWS + row) * OUTPUT_ROW;
#pragma unroll
    for (int group = 0; group < OWN_GROUPS; ++group) {
      const float *low = output.value[2 * group] + 2 * i;
      const float *high = output.value[2 * group + 1] + 2 * i;
      const u32 at = to + 64 * (place.dim_warp * OWN_GROUPS + group);
      if constexpr (FP8) {  // even and odd dimensions
        dev::shared_store_quad(at + 16 * (lane % 4),
                               {dev::bits_of(low[0] * factor), dev::bits_of(high[0] * factor),
                                dev::bits_of(low[1] * factor), dev::bits_of(high[1] * factor)});
      } else {
        dev::shared_store_pair(at + 8 * (lane % 4), dev::bits_of(low[0] * factor),
                               dev::bits_of(low[1] * factor));
        dev::shared_store_pair(at + 32 + 8 * (lane % 4), dev::bits_of(high[0] * factor),
                               dev::bits_of(high[1] * factor));
      }
    }
  }
  dev::block_sync();
}

TKV_DEVICE void write_outputs(const AttentionParams &params, const Work &work, u32 shared) {
  for (int i = dev::thread(); i < work.rows * 2 * GROUPS; i += THREADS) {
    const int row = i / (2 * GROUPS), eighth = i % (2 * GROUPS);
    float x[8] = {};
    for (int warp = 0; warp < KEY_WARPS; ++warp) {
      const u32 from = shared + OUTPUTS + (warp * ROWS + row) * OUTPUT_ROW + 32 * eighth;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const Quad four = dev::shared_load_quad(from + 16 * half);
        for (int j = 0; j < 4; ++j) x[4 * half + j] += dev::float_of(four.word[j]);
      }
    }
    write_eight(params, work, row, eighth, x);
  }
}

}  // namespace

TKV_KERNEL(paged_attention, AttentionParams, THREADS, DIM > 128 ? 2 : 3) {
  const Work work = find_work(params);
  if (work.rows <= 0) return;
  const u32 shared = dev::shared_begin();
  const Finder finder(params, work);
  const int tiles = (larger(work.end - work.begin, 0) + TILE - 1) / TILE;

  finder.note(params, work.head, shared, 0, finder.ask(params, 0));
  fetch_queries(params, work, shared);
  for (int tile = 0; tile < STAGES - 1; ++tile) {
    dev::block_sync();
    fetch_tile(params, shared, tile);
    dev::copy_commit();
    finder.note(params, work.head, shared, tile + 1, finder.ask(params, tile + 1));
  }

  const Place place;
  const int lane = dev::thread() % 32;
  const u32 queries = shared + 16 * place.row_warp * QUERY_ROW;
  u32 kept[GROUPS][4];
  if constexpr (KEEPS_QUERIES) {
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) load_queries(kept[group], queries, group);
  }
  const Scoring scoring(params);
  const int top = 16 * place.row_warp + lane / 4;
  const Sight sights[2] = {Sight(params, work.record, work.token_of(smaller(top, work.rows - 1))),
                           Sight(params, work.record, work.token_of(smaller(top + 8, work.rows - 1)))};
  // Keys that all rows see.
  const int common_first = Sight(params, work.record, work.token_of(work.rows - 1)).first;
  const int common_last = Sight(params, work.record, work.token_of(0)).last;

  Output output;
  for (int tile = 0; tile < tiles; ++tile) {
    dev::copy_wait<STAGES - 2>();
    dev::block_sync();  // for all this tile is there, and the one before it is done with
    fetch_tile(params, shared, tile + STAGES - 1);
    dev::copy_commit();
    const int block = finder.ask(params, tile + STAGES);

    const u32 keys = shared + STAGE_0 + tile % STAGES * STAGE;
    const u32 values = keys + TILE * KV_ROW + 16 * KV_BYTES * OWN_GROUPS * place.dim_warp;
    const int first_key = work.begin + tile * TILE;
    const bool masked = first_key < common_first || first_key + TILE - 1 > common_last;
#pragma unroll 1
    for (int step = 0; step < STEPS; ++step) {
      const int key = 16 * (step * KEY_WARPS + place.key_warp);
      float scores[2][4] = {};
      score_keys(scores, kept, queries, keys + key * KV_ROW);
      for (int i = 0; i < 2; ++i) {
        for (int j = 0; j < 4; ++j) scores[i][j] = scoring(scores[i][j]);
      }
      if (masked) {
        for (int i = 0; i < 2; ++i) {
          for (int j = 0; j < 4; ++j) {
            const int at = first_key + key + 8 * i + lane % 4 * 2 + j % 2;
            const Sight &sight = sights[j / 2];
            if (at < sight.first || at > sight.last) scores[i][j] = dev::float_of(MINUS_INFINITY);
          }
        }
      }
      weigh(output, scores);
      const u32 weights[4] = {dev::pack<BF16_MATH>(scores[0][0], scores[0][1]),
                              dev::pack<BF16_MATH>(scores[0][2], scores[0][3]),
                              dev::pack<BF16_MATH>(scores[1][0], scores[1][1]),
                              dev::pack<BF16_MATH>(scores[1][2], scores[1][3])};
      add_values(output, weights, values + key * KV_ROW);
    }
    finder.note(params, work.head, shared, tile + STAGES, block);
  }
  dev::copy_wait<0>();
  dev::block_sync();
  const Work again = find_work(params);  // read again, as all registers were needed for other things
  gather_outputs(params, again, shared, place, output);
  write_outputs(params, again, shared);
}
