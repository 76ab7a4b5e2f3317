// The instructions that the vocabulary stands on, and the two dtypes of 16 bits. Nothing else holds assembly.
#pragma once

#ifndef METILE_EMULATED

struct Bfloat {
  ushort bits;
  Bfloat() = default;
  inline explicit Bfloat(float value) { asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value)); }
  inline operator float() const { return __uint_as_float(uint(bits) << 16); }
};

struct Half {
  ushort bits;
  Half() = default;
  inline explicit Half(float value) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value)); }
  inline operator float() const {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
  }
};

// Barrier of the threadgroup; or also: whether any of its threads says so.
inline void settle() { __syncthreads(); }
inline bool any_thread(bool own) { return __syncthreads_or(own); }

inline float shuffle_xor(float value, int mask) { return __shfl_xor_sync(0xffffffffu, value, mask); }
inline float shuffle(float value, int lane) { return __shfl_sync(0xffffffffu, value, lane); }

// 16 bytes that are read once, or again and again, of memory that this kernel does not write.
inline Words load_once(const void* from) {
  Words to;
  asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(to.at[0]), "=r"(to.at[1]), "=r"(to.at[2]), "=r"(to.at[3]) : "l"(from));
  return to;
}
inline Words load_again(const void* from) {
  Words to;
  asm("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(to.at[0]), "=r"(to.at[1]), "=r"(to.at[2]), "=r"(to.at[3]) : "l"(from));
  return to;
}

inline uint shared_address(const void* of) { return uint(__cvta_generic_to_shared(of)); }

// 16 bytes to shared memory while the thread goes on, zero past the first `bytes`.
inline void copy_async(void* to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
               :: "r"(shared_address(to)), "l"(from), "r"(bytes) : "memory");
}
inline void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT>  // until all groups but the last LEFT are there
inline void copy_wait() { asm volatile("cp.async.wait_group %0;" :: "n"(LEFT) : "memory"); }

// Matrices of 8 x 8 from shared memory: lane 8 * i + r names row r of matrix i; each lane gets two of row lane / 4.
inline void load_matrices(uint (&to)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(shared_address(row)) : "memory");
}
inline void load_matrices(uint (&to)[2], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(to[0]), "=r"(to[1]) : "r"(shared_address(row)) : "memory");
}
inline void load_turned(uint (&to)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(shared_address(row)) : "memory");
}
// A matrix of 8 x 8 over the lanes, turned.
inline uint turned(uint value) {
  uint to;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(to) : "r"(value));
  return to;
}

// c += a . b of 16 x 16 and 16 x 8.
inline void multiply_fragments(Bfloat, float (&c)[4], const uint (&a)[4], uint b0, uint b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
               "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
inline void multiply_fragments(Half, float (&c)[4], const uint (&a)[4], uint b0, uint b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
               "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two values as they lie side by side in memory.
inline uint packed(Bfloat, float low, float high) {
  uint to;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(to) : "f"(high), "f"(low));
  return to;
}
inline uint packed(Half, float low, float high) {
  uint to;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(to) : "f"(high), "f"(low));
  return to;
}

// a * b + c of two values each, rounded once.
inline uint fused(Bfloat, uint a, uint b, uint c) {
  uint to;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(to) : "r"(a), "r"(b), "r"(c));
  return to;
}
inline uint fused(Half, uint a, uint b, uint c) {
  uint to;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(to) : "r"(a), "r"(b), "r"(c));
  return to;
}

// Four of the 8 bytes of b and a, each named by a digit: 0 to 3 are those of a.
inline uint picked_bytes(uint a, uint b, uint digits) { return __byte_perm(a, b, digits); }

inline float float_of_bits(int bits) { return __int_as_float(bits); }
inline uint bits_of_float(float value) { return __float_as_uint(value); }
inline float exponential(float x) { return __expf(x); }
inline float reciprocal_root(float x) { return 1.0f / sqrtf(x); }
inline float quotient(float a, float b) { return __fdividef(a, b); }

// Memory that threadgroups write for one another.
inline void publish() { __threadfence(); }
inline float load_published(const float* from) { return __ldcg(from); }
inline uint count_up(uint* counter, uint last) { return atomicInc(counter, last); }  // 0 again after `last`

#endif

typedef Bfloat bfloat;
#define half Half

inline float unpacked_low(Bfloat, uint word) { return float_of_bits(int(word << 16)); }
inline float unpacked_high(Bfloat, uint word) { return float_of_bits(int(word & 0xffff0000u)); }
inline float unpacked_low(Half, uint word) {
  Half value;
  value.bits = ushort(word);
  return float(value);
}
inline float unpacked_high(Half, uint word) { return unpacked_low(Half(), word >> 16); }

template <typename T>
struct Held {  // of a dtype, in 16 bytes
  static constexpr int count = 16 / int(sizeof(T));
};

inline constexpr bool is_float(float) { return true; }
template <typename T>
inline constexpr bool is_float(T) { return false; }
