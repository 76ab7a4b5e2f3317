// os_log: messages go nowhere.
namespace metal {
struct os_log {
  constexpr os_log(const __constant char*, const __constant char*) {}
  constexpr os_log(const __constant char*, const __constant char*) __constant {}
#define __MSL_LOG(name)                                              \
  template <class... A>                                              \
  METAL_FUNC void name(const __constant char*, A...) const {}        \
  template <class... A>                                              \
  METAL_FUNC void name(const __constant char*, A...) const __constant {}
  __MSL_LOG(log)
  __MSL_LOG(log_debug)
  __MSL_LOG(log_info)
  __MSL_LOG(log_error)
  __MSL_LOG(log_fault)
#undef __MSL_LOG
};
}  // namespace metal
