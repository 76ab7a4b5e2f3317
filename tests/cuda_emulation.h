// Runs the CUDA vocabulary on a CPU: every thread of a threadgroup is a fiber, and the instructions of
// kernels/tile/cuda/machine.h are done here, after the layouts that the PTX manual gives. The same text that a GPU
// compiles runs, so its index arithmetic, its barriers and its rings are what is tested; its speed is not.
//
// What a GPU leaves open is chosen by the two switches of `emulated_launch`: in which order threads run between two
// barriers, and whether an asynchronous copy lands when it is issued or only when it is waited for.
#pragma once

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#define METILE_EMULATED

namespace emulated {

struct Copy {
  void* to;
  const void* from;
  int bytes;
};

struct Warp {
  char slots[2][32][64];  // what lanes give to an instruction of the whole warp; alternating
  int kind, arrived, turn;
};

constexpr int most_groups = 16, most_copies = 512, stack_bytes = 1 << 18, most_threads = 1024, most_arrays = 16;

struct Fiber {
  ucontext_t context;
  char* stack;
  Copy copies[most_groups][most_copies];  // groups, the last of them open
  int counts[most_groups], groups;
  bool done;
};

struct Range {
  const char *begin, *end;
};

inline Fiber* fibers[most_threads];
inline Warp warps[most_threads / 32];
inline Range arrays[most_arrays];
inline ucontext_t scheduler;
inline int current, threads, barrier_arrived, barrier_turn, barrier_flag[2];
inline bool late, progressed;
inline void (*body)(int thread);

inline Fiber& fiber() { return *fibers[current]; }

[[noreturn]] inline void fail(const char* what) {
  fprintf(stderr, "emulation: %s, thread %d\n", what, current);
  abort();
}

inline void yield() { swapcontext(&fiber().context, &scheduler); }

inline int barrier(bool flag) {
  const int turn = barrier_turn;
  if (barrier_arrived == 0) barrier_flag[turn % 2] = 0;
  barrier_flag[turn % 2] |= flag;
  progressed = true;
  if (++barrier_arrived == threads) barrier_arrived = 0, ++barrier_turn;
  while (barrier_turn == turn) yield();
  return barrier_flag[turn % 2];
}

// Give `own` to the other lanes; returns what all of them gave. Every lane must come, to the same kind of instruction.
template <typename V>
inline const V* exchange(int kind, const V& own) {
  static_assert(sizeof(V) <= 64, "fits a slot");
  Warp& warp = warps[current / 32];
  const int turn = warp.turn;
  static V all[2][32];
  if (warp.arrived == 0) warp.kind = kind;
  if (warp.kind != kind) fail("lanes are at different instructions");
  memcpy(warp.slots[turn % 2][current % 32], &own, sizeof(V));
  progressed = true;
  if (++warp.arrived == 32) warp.arrived = 0, ++warp.turn;
  while (warp.turn == turn) yield();
  for (int lane = 0; lane < 32; ++lane) memcpy(&all[turn % 2][lane], warp.slots[turn % 2][lane], sizeof(V));
  return all[turn % 2];
}

inline void enter() {
  body(current);
  fiber().done = true, progressed = true;
  yield();
}

inline void land(const Copy& copy) {
  memset(copy.to, 0, 16);
  memcpy(copy.to, copy.from, copy.bytes);
}

inline void run_group(bool backwards) {
  memset(warps, 0, sizeof warps);
  barrier_arrived = barrier_turn = 0;
  for (int i = 0; i < threads; ++i) {
    if (!fibers[i]) fibers[i] = (Fiber*)malloc(sizeof(Fiber)), fibers[i]->stack = (char*)malloc(stack_bytes);
    Fiber& fiber = *fibers[i];
    fiber.groups = 1, fiber.counts[0] = 0, fiber.done = false;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack, fiber.context.uc_stack.ss_size = stack_bytes;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, enter, 0);
  }
  // A warp runs until all of its lanes wait for other warps: what is not kept apart by a barrier is far apart in time.
  for (bool any = true; any;) {
    any = false;
    for (int w = 0; w < threads / 32; ++w)
      for (progressed = true; progressed;) {
        progressed = false;
        for (int lane = 0; lane < 32; ++lane) {
          current = backwards ? threads - 1 - (w * 32 + lane) : w * 32 + lane;
          if (!fiber().done) swapcontext(&scheduler, &fiber().context);
        }
        any = any || progressed;
      }
  }
  for (current = 0; current < threads; ++current)
    if (!fiber().done) fail("waits for others that have ended");
  for (current = 0; current < threads; ++current)
    for (int g = 0; g < fiber().groups; ++g)
      if (late && fiber().counts[g]) fail("a copy was never waited for");
}

inline void check(const void* from, int bytes) {
  if (uintptr_t(from) % 16) fail("a read of 16 bytes is not aligned");
  for (const Range& range : arrays)
    if (from >= range.begin && (const char*)from + bytes <= range.end) return;
  fail("a read is out of bounds");
}

inline float bfloat_value(uint32_t bits) {
  bits <<= 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
inline float half_value(uint32_t bits) {
  const uint16_t low = uint16_t(bits);
  _Float16 value;
  memcpy(&value, &low, 2);
  return float(value);
}

// Element `column` of 8 elements of 16 bits, two to a register, four lanes to a row.
inline uint32_t element_of(const uint32_t* lanes, int stride, int row, int column) {
  return lanes[(row * 4 + column / 2) * stride] >> (16 * (column % 2)) & 0xffff;
}

}  // namespace emulated

typedef unsigned int uint;
typedef unsigned short ushort;
struct Words;

struct Bfloat {
  ushort bits;
  Bfloat() = default;
  explicit Bfloat(float value) {
    uint32_t whole;
    memcpy(&whole, &value, 4);
    bits = ushort(value != value ? 0x7fff : (whole + 0x7fff + (whole >> 16 & 1)) >> 16);
  }
  operator float() const { return emulated::bfloat_value(bits); }
};

struct Half {
  ushort bits;
  Half() = default;
  explicit Half(float value) {
    const _Float16 narrow = _Float16(value);
    memcpy(&bits, &narrow, 2);
  }
  operator float() const { return emulated::half_value(bits); }
};

inline void settle() { emulated::barrier(false); }
inline bool any_thread(bool own) { return emulated::barrier(own); }
inline float shuffle(float value, int lane) { return emulated::exchange(1, value)[lane]; }
inline float shuffle_xor(float value, int mask) { return emulated::exchange(2, value)[emulated::current % 32 ^ mask]; }

template <typename W = Words>
inline W load_once(const void* from) {
  emulated::check(from, 16);
  return *(const W*)from;
}
template <typename W = Words>
inline W load_again(const void* from) { return load_once<W>(from); }

inline void copy_async(void* to, const void* from, int bytes) {
  if (bytes) emulated::check(from, bytes);
  if (uintptr_t(to) % 16) emulated::fail("a copy is not aligned");
  const emulated::Copy copy = {to, from, bytes};
  emulated::Fiber& fiber = emulated::fiber();
  int& count = fiber.counts[fiber.groups - 1];
  if (count == emulated::most_copies) emulated::fail("too many copies in a group");
  if (emulated::late) fiber.copies[fiber.groups - 1][count++] = copy;
  else emulated::land(copy);
}
inline void copy_commit() {
  emulated::Fiber& fiber = emulated::fiber();
  if (fiber.groups == emulated::most_groups) emulated::fail("too many groups of copies");
  fiber.counts[fiber.groups++] = 0;
}
template <int LEFT>
inline void copy_wait() {
  emulated::Fiber& fiber = emulated::fiber();
  const int first = fiber.groups - 1 - LEFT;
  if (first <= 0) return;
  for (int g = 0; g < first; ++g)
    for (int i = 0; i < fiber.counts[g]; ++i) emulated::land(fiber.copies[g][i]);
  for (int g = first; g < fiber.groups; ++g) {
    fiber.counts[g - first] = fiber.counts[g];
    memcpy(fiber.copies[g - first], fiber.copies[g], sizeof fiber.copies[g]);
  }
  fiber.groups -= first;
}

template <int N>
inline void load_matrices(uint (&to)[N], const void* row) {
  const void* const* rows = emulated::exchange(3, row);
  const int lane = emulated::current % 32;
  for (int i = 0; i < N; ++i) memcpy(&to[i], (const char*)rows[8 * i + lane / 4] + lane % 4 * 4, 4);
}
inline void load_turned(uint (&to)[4], const void* row) {
  const void* const* rows = emulated::exchange(4, row);
  const int lane = emulated::current % 32;
  for (int i = 0; i < 4; ++i) {
    const auto at = [&](int r) { return uint(((const ushort*)rows[8 * i + r])[lane / 4]); };
    to[i] = at(lane % 4 * 2) | at(lane % 4 * 2 + 1) << 16;
  }
}
inline uint turned(uint value) {
  const uint* lanes = emulated::exchange(5, value);
  const int lane = emulated::current % 32, row = lane / 4, column = lane % 4 * 2;
  return emulated::element_of(lanes, 1, column, row) | emulated::element_of(lanes, 1, column + 1, row) << 16;
}

// a0 .. a3 are the quarters (rows 0-7, k 0-7), (8-15, 0-7), (0-7, 8-15), (8-15, 8-15); b0, b1 those of k.
template <typename T>
inline void multiply_fragments(T, float (&c)[4], const uint (&a)[4], uint b0, uint b1) {
  struct Given {
    uint a[4], b[2];
  };
  const Given* lanes = emulated::exchange(6, Given{{a[0], a[1], a[2], a[3]}, {b0, b1}});
  const int lane = emulated::current % 32, words = sizeof(Given) / 4;
  const auto value = [](uint bits) {
    T narrow;
    narrow.bits = ushort(bits);
    return float(narrow);
  };
  for (int e = 0; e < 4; ++e)
    for (int k = 0; k < 16; ++k) {
      const uint* quarter = &lanes[0].a[e / 2 + k / 8 * 2];
      const uint left = emulated::element_of(quarter, words, lane / 4, k % 8);
      const uint right = emulated::element_of(&lanes[0].b[k / 8], words, lane % 4 * 2 + e % 2, k % 8);
      c[e] += value(left) * value(right);
    }
}

// A warpgroup's operand: rows of 128 bytes whose 16 bytes are exchanged by the address, from column k on. Products are
// done at once: what a GPU would still be reading when it is fetched over is not seen here.
struct GroupOperand {
  const char* rows;
  int k;
  float at(float (*value)(ushort), int row, int column) const {
    const char* from = rows + row * 128 + (((k + column) / 8) ^ row % 8) * 16 + (k + column) % 8 * 2;
    return value(*(const ushort*)from);
  }
};
inline GroupOperand group_operand(const char* rows, int k) {
  if (uintptr_t(rows) % 1024) emulated::fail("an operand of a warpgroup is not aligned");
  return {rows, k};
}
inline void publish_to_groups() {}
inline void group_begin() {}
inline void group_commit() {}
template <int LEFT>
inline void group_wait() {}
template <typename T, int TM>
inline void multiply_groups(T, float (&c)[TM][4], GroupOperand w, GroupOperand x) {
  const auto value = [](ushort bits) {
    T narrow;
    narrow.bits = bits;
    return float(narrow);
  };
  const int lane = emulated::current % 32, first = emulated::current / 32 % 4 * 16;
  for (int i = 0; i < TM; ++i)
    for (int e = 0; e < 4; ++e)
      for (int k = 0; k < 16; ++k)
        c[i][e] += w.at(value, first + lane / 4 + e / 2 * 8, k) * x.at(value, i * 8 + lane % 4 * 2 + e % 2, k);
}

template <typename T>
inline uint packed(T, float low, float high) { return T(low).bits | uint(T(high).bits) << 16; }

template <typename T>
inline uint fused(T, uint a, uint b, uint c) {
  const auto one = [&](int shift) {
    T x, y, z;
    x.bits = ushort(a >> shift), y.bits = ushort(b >> shift), z.bits = ushort(c >> shift);
    return uint(T(fmaf(float(x), float(y), float(z))).bits) << shift;
  };
  return one(0) | one(16);
}

inline uint picked_bytes(uint a, uint b, uint digits) {
  const uint64_t both = uint64_t(b) << 32 | a;
  uint to = 0;
  for (int i = 0; i < 4; ++i) to |= uint(both >> (digits >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return to;
}

inline float float_of_bits(int bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
inline uint bits_of_float(float value) {
  uint bits;
  memcpy(&bits, &value, 4);
  return bits;
}
inline float exponential(float x) { return expf(x); }
inline float reciprocal_root(float x) { return 1.0f / sqrtf(x); }
inline float quotient(float a, float b) { return a / b; }

inline void publish() {}
inline float load_published(const float* from) { return *from; }
inline void load_published(float (&to)[2], const float* from) {
  if (uintptr_t(from) % 8) emulated::fail("a read of 8 bytes is not aligned");
  to[0] = from[0], to[1] = from[1];
}
inline uint count_up(uint* counter, uint last) {
  const uint before = *counter;
  *counter = before >= last ? 0 : before + 1;
  return before;
}

// Run a kernel: `body` for every thread of every threadgroup. Arrays are what 16-byte reads may touch.
inline void emulated_launch(void (*body)(int), int groups, int threads, bool backwards, bool late, void* const* arrays,
                            const long long* bytes, int count, int* index, char* scratch, long long scratch_bytes) {
  emulated::body = body, emulated::threads = threads, emulated::late = late;
  memset(emulated::arrays, 0, sizeof emulated::arrays);
  for (int i = 0; i < count; ++i) emulated::arrays[i] = {(const char*)arrays[i], (const char*)arrays[i] + bytes[i]};
  for (int g = 0; g < groups; ++g) {
    *index = backwards ? groups - 1 - g : g;
    memset(scratch, 0xff, scratch_bytes);  // NaN in every dtype
    emulated::run_group(backwards);
  }
}
