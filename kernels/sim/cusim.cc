// The machine behind cusim.h: fibers for threads, a scheduler, warps, shared memory and its copies.
//
// One launch at a time: a library holds one machine.

#include <sys/mman.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <deque>
#include <map>
#include <string>
#include <vector>

#include "dev.cuh"
#include "fiber.h"

namespace cusim {

Position position;

namespace {

constexpr int LANES = 32;
constexpr int THREADS_MAX = 1024;
constexpr u32 SHARED_BEGIN = 1024;
constexpr u32 SHARED_MAX = 227 * 1024;
constexpr std::size_t STACK_BYTES = 256 * 1024;
constexpr int NOBODY = -1, SEVERAL = -2;

enum class State { ready, waits_for_warp, waits_for_block, done };
enum class Operation { shuffle_xor, any, matrix_load, multiply_add };
const char *const NAMES[] = {"shuffle_xor", "any", "matrix_load", "multiply_add"};

enum Schedule { RING, RANDOM, AHEAD };

// What a lane brings to an operation of its warp, and where the result goes.
struct Operands {
  float value = 0;
  int lanes = 0;
  u32 row = 0, *x = nullptr;
  int count = 0;
  bool flag = false;  // transposed, bf16, or the vote
  float *c = nullptr;
  const u32 *a = nullptr;
  u32 b0 = 0, b1 = 0;
};

struct Copy {
  u32 to;
  u64 from;
  bool wanted;
  int group;
};

struct Thread {
  fiber::Context context;
  State state = State::ready;
  Line line;
  Operands operands;
  std::vector<Copy> copies;
  int groups = 0;
};

struct Warp {
  int arrived = 0;
  Operation operation{};
  Line line;
};

// Who touched four bytes of shared memory last, and between which barriers.
struct Word {
  int writer = NOBODY, reader = NOBODY;
  int written = -1, read = -1;
  bool in_flight = false;
};

struct Stacks {
  char *memory;
  Stacks() {
    void *got = mmap(nullptr, THREADS_MAX * STACK_BYTES, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    memory = got == MAP_FAILED ? nullptr : static_cast<char *>(got);
  }
  ~Stacks() {
    if (memory) munmap(memory, THREADS_MAX * STACK_BYTES);
  }
  Stacks(const Stacks &) = delete;
  Stacks &operator=(const Stacks &) = delete;
};

struct Machine {
  // Settings.
  Schedule schedule = RING;
  u64 random = 1;
  std::map<u64, u64> ranges;  // that copies may read: begin to end; none: everything
  // Over all launches.
  u64 conflicts = 0;
  u32 shared_used = 0;
  // The launch.
  Body body = nullptr;
  const void *argument = nullptr;
  std::string error;
  u32 shared_bytes = 0;
  // The block.
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  std::deque<int> ready;
  int at_barrier = 0, barriers = 0, finished = 0;
  Line barrier;
  std::vector<char> shared;
  std::vector<Word> words;
  fiber::Context scheduler;
  Stacks stacks;
};

Machine machine;

struct Entry {
  int threads;
  Body body;
};

std::map<std::string, Entry> &kernels() {
  static std::map<std::string, Entry> all;
  return all;
}

std::string text(const char *format, ...) __attribute__((format(printf, 1, 2)));
std::string text(const char *format, ...) {
  char room[512];
  va_list values;
  va_start(values, format);
  std::vsnprintf(room, sizeof room, format, values);
  va_end(values);
  return room;
}

std::string place(Line line) {
  const char *slash = std::strrchr(line.file, '/');
  return text("%s:%d", slash ? slash + 1 : line.file, line.number);
}

Thread &self() { return machine.threads[position.thread]; }

// Back to the scheduler until somebody makes this thread ready.
void pause() {
  const int thread = position.thread;
  fiber::go(&self().context, &machine.scheduler);
  position.thread = thread;
}

// Ends the launch; does not return.
[[noreturn]] void fail(Line line, const std::string &what) {
  machine.error = text("block %d, thread %d, %s: ", position.block, position.thread,
                       place(line).c_str()) + what;
  for (;;) pause();
}

void wake(int thread) {
  machine.threads[thread].state = State::ready;
  machine.ready.push_back(thread);
}

// ---- Memory ----

void check_aligned(const char *what, u64 address, int bytes, Line line) {
  if (address % bytes) {
    fail(line, text("%s address %#llx is not a multiple of %d", what, address, bytes));
  }
}

void check_global(u64 address, int bytes, Line line) {
  check_aligned("global", address, bytes, line);
  if (address < 4096) fail(line, text("global memory at %#llx", address));
}

void check_source(u64 address, int bytes, Line line) {
  check_global(address, bytes, line);
  if (machine.ranges.empty()) return;
  auto after = machine.ranges.upper_bound(address);
  if (after == machine.ranges.begin() || std::prev(after)->second < address + bytes) {
    fail(line, text("a copy of %d bytes at %#llx, outside of the caches", bytes, address));
  }
}

void check_shared(u32 address, int bytes, Line line) {
  check_aligned("shared", address, bytes, line);
  if (address < SHARED_BEGIN || address + bytes > SHARED_BEGIN + machine.shared_bytes) {
    fail(line, text("%d bytes of shared memory at offset %lld, of %u", bytes,
                    static_cast<i64>(address) - SHARED_BEGIN, machine.shared_bytes));
  }
  machine.shared_used = std::max(machine.shared_used, address + bytes - SHARED_BEGIN);
}

char *shared_at(u32 address) { return &machine.shared[address - SHARED_BEGIN]; }

[[noreturn]] void fail_race(Line line, const char *what, u32 address, int other) {
  const std::string who = other == SEVERAL ? "several threads" : text("thread %d", other);
  fail(line, text("shared memory at offset %u is %s %s without a barrier in between",
                  address - SHARED_BEGIN, what, who.c_str()));
}

void note_read(u32 address, int bytes, Line line) {
  for (u32 at = address; at < address + bytes; at += 4) {
    Word &word = machine.words[(at - SHARED_BEGIN) / 4];
    if (word.in_flight) {
      fail(line, text("shared memory at offset %u is read while a copy of thread %d to it is on its way",
                      at - SHARED_BEGIN, word.writer));
    }
    if (word.written == machine.barriers && word.writer != position.thread) {
      fail_race(line, "read after it was written by", at, word.writer);
    }
    const bool first = word.read != machine.barriers || word.reader == position.thread;
    word.reader = first ? position.thread : SEVERAL;
    word.read = machine.barriers;
  }
}

void note_write(u32 address, int bytes, bool in_flight, Line line) {
  for (u32 at = address; at < address + bytes; at += 4) {
    Word &word = machine.words[(at - SHARED_BEGIN) / 4];
    if (word.in_flight) {
      fail(line, text("shared memory at offset %u is written while a copy of thread %d to it is on its way",
                      at - SHARED_BEGIN, word.writer));
    }
    if (word.written == machine.barriers && word.writer != position.thread) {
      fail_race(line, "written after it was written by", at, word.writer);
    }
    if (word.read == machine.barriers && word.reader != position.thread) {
      fail_race(line, "written after it was read by", at, word.reader);
    }
    word = {position.thread, NOBODY, machine.barriers, -1, in_flight};
  }
}

void land(const Copy &copy) {
  if (copy.wanted) {
    std::memcpy(shared_at(copy.to), reinterpret_cast<const void *>(copy.from), 16);
  } else {
    std::memset(shared_at(copy.to), 0, 16);
  }
}

// ---- Warps ----

Thread &lane(int warp, int nth) { return machine.threads[warp * LANES + nth]; }

void do_shuffle_xor(int warp) {
  float values[LANES];
  for (int i = 0; i < LANES; ++i) values[i] = lane(warp, i).operands.value;
  for (int i = 0; i < LANES; ++i) {
    Operands &mine = lane(warp, i).operands;
    mine.value = values[(i ^ mine.lanes) % LANES];
  }
}

void do_any(int warp) {
  bool some = false;
  for (int i = 0; i < LANES; ++i) some |= lane(warp, i).operands.flag;
  for (int i = 0; i < LANES; ++i) lane(warp, i).operands.flag = some;
}

// Each eight rows are read at once; those in the same four of 32 banks wait for each other.
void count_conflicts(const u32 *rows) {
  int in_banks[8] = {}, most = 0;
  for (int i = 0; i < 8; ++i) {
    bool repeated = false;
    for (int earlier = 0; earlier < i; ++earlier) repeated |= rows[earlier] == rows[i];
    if (!repeated) most = std::max(most, ++in_banks[rows[i] / 16 % 8]);
  }
  machine.conflicts += most - 1;
}

void do_matrix_load(int warp) {
  const Operands &first = lane(warp, 0).operands;
  const int count = first.count;
  for (int matrix = 0; matrix < count; ++matrix) {
    u32 rows[8];
    u16 values[8][8];
    for (int i = 0; i < 8; ++i) {
      rows[i] = lane(warp, matrix * 8 + i).operands.row;
      std::memcpy(values[i], shared_at(rows[i]), 16);
    }
    count_conflicts(rows);
    for (int i = 0; i < LANES; ++i) {
      const int row = i / 4, column = i % 4 * 2;
      const u32 low = first.flag ? values[column][row] : values[row][column];
      const u32 high = first.flag ? values[column + 1][row] : values[row][column + 1];
      lane(warp, i).operands.x[matrix] = low | high << 16;
    }
  }
}

void do_multiply_add(int warp) {
  const bool bf16 = lane(warp, 0).operands.flag;
  float a[16][16], b[16][8], c[16][8];
  for (int i = 0; i < LANES; ++i) {
    const Operands &mine = lane(warp, i).operands;
    const int row = i / 4, pair = i % 4 * 2;
    for (int half = 0; half < 2; ++half) {
      auto part = [&](u32 x) { return widen(bf16, static_cast<u16>(half ? x >> 16 : x)); };
      a[row][pair + half] = part(mine.a[0]);
      a[row + 8][pair + half] = part(mine.a[1]);
      a[row][pair + 8 + half] = part(mine.a[2]);
      a[row + 8][pair + 8 + half] = part(mine.a[3]);
      b[pair + half][row] = part(mine.b0);
      b[pair + 8 + half][row] = part(mine.b1);
      c[row][pair + half] = mine.c[half];
      c[row + 8][pair + half] = mine.c[2 + half];
    }
  }
  for (int i = 0; i < 16; ++i) {
    for (int k = 0; k < 16; ++k) {
      for (int j = 0; j < 8; ++j) c[i][j] += a[i][k] * b[k][j];
    }
  }
  for (int i = 0; i < LANES; ++i) {
    const Operands &mine = lane(warp, i).operands;
    const int row = i / 4, pair = i % 4 * 2;
    for (int half = 0; half < 2; ++half) {
      mine.c[half] = c[row][pair + half];
      mine.c[2 + half] = c[row + 8][pair + half];
    }
  }
}

// The last lane to arrive does the work of all.
void join_warp(Operation operation, Line line) {
  const int number = position.thread / LANES;
  Warp &warp = machine.warps[number];
  if (warp.arrived == 0) {
    warp.operation = operation;
    warp.line = line;
  } else if (warp.operation != operation || warp.line.number != line.number) {
    fail(line, text("diverged: %s here, while other lanes of the warp are at %s, %s",
                    NAMES[static_cast<int>(operation)],
                    NAMES[static_cast<int>(warp.operation)], place(warp.line).c_str()));
  }
  if (++warp.arrived < LANES) {
    self().state = State::waits_for_warp;
    self().line = line;
    return pause();
  }
  switch (operation) {
    case Operation::shuffle_xor: do_shuffle_xor(number); break;
    case Operation::any: do_any(number); break;
    case Operation::matrix_load: do_matrix_load(number); break;
    case Operation::multiply_add: do_multiply_add(number); break;
  }
  warp.arrived = 0;
  for (int i = 0; i < LANES; ++i) {
    const int thread = number * LANES + i;
    if (thread != position.thread) wake(thread);
  }
}

// ---- The life of a block ----

void run_thread() {
  machine.body(machine.argument);
  Thread &thread = self();
  if (!thread.copies.empty()) {
    fail(thread.line, text("it ends with %zu copies on their way", thread.copies.size()));
  }
  thread.state = State::done;
  ++machine.finished;
  for (;;) pause();
}

u64 next_random() {
  machine.random ^= machine.random << 13;
  machine.random ^= machine.random >> 7;
  machine.random ^= machine.random << 17;
  return machine.random;
}

int take_ready() {
  std::deque<int> &ready = machine.ready;
  if (machine.schedule == RANDOM) {
    std::swap(ready.back(), ready[next_random() % ready.size()]);
  } else if (machine.schedule == RING) {
    const int thread = ready.front();
    ready.pop_front();
    return thread;
  }
  const int thread = ready.back();
  ready.pop_back();
  return thread;
}

// Every place where threads are stuck, with one of the threads.
std::string describe_deadlock() {
  std::map<std::string, int> places;
  for (std::size_t i = 0; i < machine.threads.size(); ++i) {
    const Thread &thread = machine.threads[i];
    if (thread.state == State::done) continue;
    const char *what = "a barrier";
    if (thread.state == State::waits_for_warp) {
      what = NAMES[static_cast<int>(machine.warps[i / LANES].operation)];
    }
    places.emplace(what + std::string(" at ") + place(thread.line), i);
  }
  std::string all = text("block %d is deadlocked:", position.block);
  for (const auto &[where, thread] : places) all += text(" thread %d in %s;", thread, where.c_str());
  all.pop_back();
  return all;
}

void start_block(int block, int threads) {
  position.block = block;
  machine.threads.assign(threads, {});
  machine.warps.assign(threads / LANES, {});
  machine.shared.assign(machine.shared_bytes, static_cast<char>(0xff));  // NaN in every format
  machine.words.assign((machine.shared_bytes + 3) / 4, {});
  machine.ready.clear();
  machine.at_barrier = machine.barriers = machine.finished = 0;
  for (int i = 0; i < threads; ++i) {
    fiber::prepare(&machine.threads[i].context, machine.stacks.memory + i * STACK_BYTES,
                   STACK_BYTES, run_thread);
    machine.ready.push_back(i);
  }
}

bool run_block(int block, int threads) {
  start_block(block, threads);
  while (machine.finished < threads) {
    if (machine.ready.empty()) {
      machine.error = describe_deadlock();
      return false;
    }
    position.thread = take_ready();
    fiber::go(&machine.scheduler, &self().context);
    if (!machine.error.empty()) return false;
  }
  return true;
}

bool refuse(const std::string &why) {
  machine.error = why;
  return false;
}

bool launch(const char *name, unsigned grid, unsigned block, unsigned shared_bytes,
            const void *argument) {
  machine.error.clear();
  const auto found = kernels().find(name);
  if (found == kernels().end()) return refuse(text("there is no kernel %s", name));
  if (block != static_cast<unsigned>(found->second.threads)) {
    return refuse(text("%s: launched with %u threads, made for %d", name, block,
                       found->second.threads));
  }
  if (grid < 1 || grid > 0x7fffffff) return refuse(text("%s: a grid of %u blocks", name, grid));
  if (shared_bytes > SHARED_MAX) {
    return refuse(text("%s: %u bytes of shared memory, the most is %u", name, shared_bytes,
                       SHARED_MAX));
  }
  if (!machine.stacks.memory) return refuse("no memory for stacks");
  machine.body = found->second.body;
  machine.argument = argument;
  machine.shared_bytes = shared_bytes;
  for (unsigned i = 0; i < grid; ++i) {
    if (!run_block(static_cast<int>(i), static_cast<int>(block))) return false;
  }
  return true;
}

}  // namespace

Kernel::Kernel(const char *name, int threads, Body body) {
  kernels()[name] = {threads, body};
}

const void *global_read(u64 from, int bytes, Line line) {
  check_global(from, bytes, line);
  return reinterpret_cast<const void *>(from);
}

void *global_write(u64 to, int bytes, Line line) {
  check_global(to, bytes, line);
  return reinterpret_cast<void *>(to);
}

const void *shared_read(u32 from, int bytes, Line line) {
  check_shared(from, bytes, line);
  note_read(from, bytes, line);
  return shared_at(from);
}

void *shared_write(u32 to, int bytes, Line line) {
  check_shared(to, bytes, line);
  note_write(to, bytes, false, line);
  return shared_at(to);
}

void block_sync(Line line) {
  if (machine.finished) fail(line, "a barrier that other threads of the block did not wait for");
  if (machine.at_barrier == 0) {
    machine.barrier = line;
  } else if (machine.barrier.number != line.number) {
    fail(line, "diverged: other threads of the block are in the barrier at " +
                   place(machine.barrier));
  }
  if (++machine.at_barrier < static_cast<int>(machine.threads.size())) {
    self().state = State::waits_for_block;
    self().line = line;
    return pause();
  }
  machine.at_barrier = 0;
  ++machine.barriers;
  for (int i = 0; i < static_cast<int>(machine.threads.size()); ++i) {
    if (i != position.thread) wake(i);
  }
}

// The data lands now or when it is waited for, as late as a device may have it; until then the place
// holds NaN.
void copy_async(u32 to, u64 from, bool wanted, Line line) {
  check_shared(to, 16, line);
  if (wanted) {
    check_source(from, 16, line);
  } else {
    check_aligned("global", from, 16, line);
  }
  note_write(to, 16, true, line);
  std::memset(shared_at(to), 0xff, 16);
  Thread &thread = self();
  thread.line = line;
  thread.copies.push_back({to, from, wanted, thread.groups});
  if (machine.schedule != RING) land(thread.copies.back());
}

void copy_commit() { ++self().groups; }

void copy_wait(int groups) {
  Thread &thread = self();
  std::vector<Copy> left;
  for (const Copy &copy : thread.copies) {
    if (copy.group >= thread.groups - groups) {
      left.push_back(copy);
      continue;
    }
    if (machine.schedule == RING) land(copy);
    for (u32 at = copy.to; at < copy.to + 16; at += 4) {
      machine.words[(at - SHARED_BEGIN) / 4] = {position.thread, NOBODY, machine.barriers, -1, false};
    }
  }
  thread.copies = std::move(left);
}

float shuffle_xor(float x, int lanes, Line line) {
  self().operands.value = x;
  self().operands.lanes = lanes;
  join_warp(Operation::shuffle_xor, line);
  return self().operands.value;
}

bool any(bool x, Line line) {
  self().operands.flag = x;
  join_warp(Operation::any, line);
  return self().operands.flag;
}

void matrix_load(u32 *x, int count, bool transposed, u32 row, Line line) {
  if (position.thread % LANES < 8 * count) {
    check_shared(row, 16, line);
    note_read(row, 16, line);
  }
  Operands &operands = self().operands;
  operands.x = x;
  operands.count = count;
  operands.flag = transposed;
  operands.row = row;
  join_warp(Operation::matrix_load, line);
}

void multiply_add(bool bf16, float *c, const u32 *a, u32 b0, u32 b1, Line line) {
  Operands &operands = self().operands;
  operands.flag = bf16;
  operands.c = c;
  operands.a = a;
  operands.b0 = b0;
  operands.b1 = b1;
  join_warp(Operation::multiply_add, line);
}

}  // namespace cusim

// ---- For the host ----

using cusim::machine;

#pragma GCC visibility push(default)
extern "C" {

// Runs a kernel to its end, as cuLaunchKernel with these: one-dimensional grid and block, arguments[0]
// points to the kernel's struct. Returns 0, or 1 and cusim_error() says what went wrong where.
int cusim_launch(const char *name, unsigned grid, unsigned block, unsigned shared_bytes,
                 void **arguments) {
  return cusim::launch(name, grid, block, shared_bytes, arguments[0]) ? 0 : 1;
}

const char *cusim_error() { return machine.error.c_str(); }

// 0, ring: threads in turn, copies land as late as they may. 1, random: threads in random order, copies
// land at once. 2, ahead: a warp runs as far as it can, copies land at once.
void cusim_schedule(int schedule, u64 seed) {
  machine.schedule = static_cast<cusim::Schedule>(schedule);
  machine.random = seed * 2 + 1;
}

// Names memory that asynchronous copies may read; 0 bytes: forget all that was named, and allow
// everything.
void cusim_sources(u64 begin, u64 bytes) {
  if (bytes) {
    u64 &end = machine.ranges[begin];
    end = std::max(end, begin + bytes);
  } else {
    machine.ranges.clear();
  }
}

// Cycles that matrix loads lost because rows lie in the same banks, in all launches so far.
u64 cusim_bank_conflicts() { return machine.conflicts; }

// Bytes of dynamic shared memory up to the last that any launch so far touched.
unsigned cusim_shared_used() { return machine.shared_used; }

}  // extern "C"
#pragma GCC visibility pop
