// Products of a warpgroup: four warps multiply 64 rows of weights by rows of x, both from shared memory, while they go on.
// Compute capability 9.0 alone has these instructions (PTX: wgmma).
#pragma once

#if defined(METILE_EMULATED)
constexpr bool has_warpgroups = true;
#elif defined(__CUDA_ARCH_FEAT_SM90_ALL)
constexpr bool has_warpgroups = true;

// 8 or more rows of 64 of k, 16 of them from `k` on, as the instruction takes them: rows of 128 bytes, their 16 bytes
// exchanged (stage.h), 1024 bytes from 8 rows to the next. `rows` is at a multiple of 1024 bytes.
inline unsigned long long group_operand(const char* rows, int k) {
  constexpr unsigned long long exchanged = 1ull << 62, eight_rows = 1024 >> 4;
  return exchanged | eight_rows << 32 | 1ull << 16 | (shared_address(rows) + k * 2 & 0x3ffff) >> 4;
}

// What copies and stores have put into shared memory is seen by the products after the next barrier.
inline void publish_to_groups() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
inline void group_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
inline void group_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT>  // until all groups of products but the last LEFT are done
inline void group_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(LEFT) : "memory"); }

#define METILE_4 "%0, %1, %2, %3"
#define METILE_8 METILE_4 ", %4, %5, %6, %7"
#define METILE_16 METILE_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define METILE_32 METILE_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define METILE_64 METILE_32 \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47" \
  ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define METILE_128 METILE_64 \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" \
  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95" \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
  ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define METILE_SUMS1(i) "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])
#define METILE_SUMS2(i) METILE_SUMS1(i), METILE_SUMS1(i + 1)
#define METILE_SUMS4(i) METILE_SUMS2(i), METILE_SUMS2(i + 2)
#define METILE_SUMS8(i) METILE_SUMS4(i), METILE_SUMS4(i + 4)
#define METILE_SUMS16(i) METILE_SUMS8(i), METILE_SUMS8(i + 8)
#define METILE_SUMS32(i) METILE_SUMS16(i), METILE_SUMS16(i + 16)

// c += w . x^T of 64 x 16 and ROWS x 16. Sums lie over the lanes of each warp as those of `multiply_fragments` do.
#define METILE_PRODUCT(T, type, rows, fragments, count, w_at, x_at)                                                  \
  inline void multiply_groups(T, float (&c)[fragments][4], unsigned long long w, unsigned long long x) {             \
    asm volatile("{ .reg .pred adds; setp.eq.u32 adds, 0, 0; "                                                       \
                 "wgmma.mma_async.sync.aligned.m64n" #rows "k16.f32." type "." type " {" METILE_##count "}, "        \
                 w_at ", " x_at ", adds, 1, 1, 0, 0; }"                                                              \
                 : METILE_SUMS##fragments(0) : "l"(w), "l"(x));                                                      \
  }
#define METILE_PRODUCTS(T, type)                                   \
  METILE_PRODUCT(T, type, 8, 1, 4, "%4", "%5")                     \
  METILE_PRODUCT(T, type, 16, 2, 8, "%8", "%9")                    \
  METILE_PRODUCT(T, type, 32, 4, 16, "%16", "%17")                 \
  METILE_PRODUCT(T, type, 64, 8, 32, "%32", "%33")                 \
  METILE_PRODUCT(T, type, 128, 16, 64, "%64", "%65")               \
  METILE_PRODUCT(T, type, 256, 32, 128, "%128", "%129")
METILE_PRODUCTS(Bfloat, "bf16")
METILE_PRODUCTS(Half, "f16")
#undef METILE_PRODUCTS
#undef METILE_PRODUCT

#else
constexpr bool has_warpgroups = false;
inline unsigned long long group_operand(const char*, int) { return 0; }
inline void publish_to_groups() {}
inline void group_begin() {}
inline void group_commit() {}
template <int LEFT>
inline void group_wait() {}
template <typename T, int TM>
inline void multiply_groups(T, float (&)[TM][4], unsigned long long, unsigned long long) {}
#endif
