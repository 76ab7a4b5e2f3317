// Barriers, and which memory they order.
namespace metal {
enum class mem_flags : uint {
  mem_none = 0,
  mem_device = 1,
  mem_threadgroup = 2,
  mem_texture = 4,
  mem_threadgroup_imageblock = 8,
  mem_object_data = 16,
  mem_device_and_threadgroup = 3
};
METAL_FUNC constexpr mem_flags operator|(mem_flags a, mem_flags b) { return (mem_flags)((uint)a | (uint)b); }
METAL_FUNC constexpr mem_flags operator&(mem_flags a, mem_flags b) { return (mem_flags)((uint)a & (uint)b); }
METAL_FUNC void threadgroup_barrier(mem_flags flags) { __msl_tgbar((uint)flags); }
METAL_FUNC void simdgroup_barrier(mem_flags flags) { __msl_sgbar((uint)flags); }
}  // namespace metal
