// Names behind Metal's own library that MLX calls directly. The last argument picks fast or precise: one here.
namespace metal {
#define __MSL_INTERNAL1(name) \
  METAL_FUNC float __metal_##name(float x, int = 0) { return metal::name(x); }
#define __MSL_INTERNAL2(name) \
  METAL_FUNC float __metal_##name(float x, float y, int = 0) { return metal::name(x, y); }
#define __MSL_INTERNAL3(name) \
  METAL_FUNC float __metal_##name(float x, float y, float z, int = 0) { return metal::name(x, y, z); }
#define __MSL_INTERNAL_SIMD(name)                                  \
  template <class... A>                                            \
  METAL_FUNC auto __metal_##name(A... a) { return metal::name(a...); }
__MSL_INTERNAL1_LIST(__MSL_INTERNAL1)
__MSL_INTERNAL2_LIST(__MSL_INTERNAL2)
__MSL_INTERNAL3_LIST(__MSL_INTERNAL3)
__MSL_INTERNAL_SIMD_LIST(__MSL_INTERNAL_SIMD)
#undef __MSL_INTERNAL1
#undef __MSL_INTERNAL2
#undef __MSL_INTERNAL3
#undef __MSL_INTERNAL_SIMD
METAL_FUNC float __metal_ldexp(float x, int k, int = 0) { return metal::ldexp(x, k); }
METAL_FUNC float __metal_frexp(float x, thread int* exponent) { return metal::frexp(x, *exponent); }
METAL_FUNC ushort __metal_get_simdgroup_size(ushort) { return 32; }
METAL_FUNC ushort __metal_get_thread_index_in_simdgroup(ushort) { return (ushort)__msl_lane(); }
}  // namespace metal
