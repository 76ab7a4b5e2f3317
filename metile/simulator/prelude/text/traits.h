// Type traits. Address spaces are part of a type here, so every trait looks below them.
namespace metal {
template <class T, T v>
struct integral_constant {
  static constexpr __constant T value = v;
  typedef T value_type;
  typedef integral_constant type;
  constexpr operator T() const { return v; }
  constexpr T operator()() const { return v; }
};
template <bool B>
using bool_constant = integral_constant<bool, B>;
typedef bool_constant<true> true_type;
typedef bool_constant<false> false_type;

template <bool B, class T = void>
struct enable_if {};
template <class T>
struct enable_if<true, T> {
  typedef T type;
};
template <bool B, class T = void>
using enable_if_t = typename enable_if<B, T>::type;
template <bool B, class T, class F>
struct conditional {
  typedef T type;
};
template <class T, class F>
struct conditional<false, T, F> {
  typedef F type;
};
template <bool B, class T, class F>
using conditional_t = typename conditional<B, T, F>::type;

template <class T, class U>
struct is_same : false_type {};
template <class T>
struct is_same<T, T> : true_type {};

#define __MSL_REMOVE(name, from) \
  template <class T>             \
  struct name {                  \
    typedef T type;              \
  };                             \
  template <class T>             \
  struct name<from> {            \
    typedef T type;              \
  };                             \
  template <class T>             \
  using name##_t = typename name<T>::type;
__MSL_REMOVE(remove_const, const T)
__MSL_REMOVE(remove_volatile, volatile T)
__MSL_REMOVE(remove_extent, T[])
__MSL_REMOVE(remove_addrspace, device T)
__MSL_REMOVE(remove_reference, T&)
__MSL_REMOVE(remove_pointer, T*)
#undef __MSL_REMOVE
template <class T>
struct remove_addrspace<__local T> : remove_addrspace<T> {};
template <class T>
struct remove_addrspace<__private T> : remove_addrspace<T> {};
template <class T>
struct remove_addrspace<constant T> : remove_addrspace<T> {};
template <class T>
struct remove_addrspace<__generic T> : remove_addrspace<T> {};
#define __MSL_REFERENCE_SPACES(X) X(device) X(__local) X(__private) X(constant)
#define __MSL_REMOVE_IN(space)           \
  template <class T>                     \
  struct remove_reference<space T&> {    \
    typedef space T type;                \
  };                                     \
  template <class T>                     \
  struct remove_reference<space T&&> {   \
    typedef space T type;                \
  };                                     \
  template <class T>                     \
  struct remove_pointer<space T*> {      \
    typedef space T type;                \
  };
__MSL_REFERENCE_SPACES(__MSL_REMOVE_IN)
#undef __MSL_REMOVE_IN
template <class T>
struct remove_reference<T&&> {
  typedef T type;
};
template <class T, size_t N>
struct remove_extent<T[N]> {
  typedef T type;
};
template <class T>
struct remove_cv {
  typedef remove_volatile_t<remove_const_t<T>> type;
};
template <class T>
using remove_cv_t = typename remove_cv<T>::type;
template <class T>
using __plain_t = remove_cv_t<remove_addrspace_t<remove_cv_t<T>>>;
template <class T>
struct decay {
  typedef __plain_t<remove_reference_t<T>> type;
};
template <class T>
using decay_t = typename decay<T>::type;
template <class T>
struct add_const {
  typedef const T type;
};
template <class T>
using add_const_t = typename add_const<T>::type;

// What kind of number a type is.
static constexpr __constant int __no_number = 0, __bool_number = 1, __signed_number = 2, __unsigned_number = 3,
                                __floating_number = 4;
template <class T>
static constexpr __constant int __kind_of = __no_number;
#define __MSL_KIND(type, kind) \
  template <>                  \
  constexpr __constant int __kind_of<type> = kind;
__MSL_KIND(bool, __bool_number)
__MSL_KIND(char, __signed_number)
__MSL_KIND(signed char, __signed_number)
__MSL_KIND(short, __signed_number)
__MSL_KIND(int, __signed_number)
__MSL_KIND(long, __signed_number)
__MSL_KIND(long long, __signed_number)
__MSL_KIND(uchar, __unsigned_number)
__MSL_KIND(ushort, __unsigned_number)
__MSL_KIND(uint, __unsigned_number)
__MSL_KIND(ulong, __unsigned_number)
__MSL_KIND(unsigned long long, __unsigned_number)
__MSL_KIND(float, __floating_number)
__MSL_KIND(half, __floating_number)
__MSL_KIND(bfloat, __floating_number)
#undef __MSL_KIND

#define __MSL_TRAIT(name, expression)                        \
  template <class T>                                         \
  struct name : bool_constant<(expression)> {};              \
  template <class T>                                         \
  static constexpr __constant bool name##_v = (expression);
__MSL_TRAIT(is_integral, __kind_of<__plain_t<T>> == __bool_number || __kind_of<__plain_t<T>> == __signed_number ||
                             __kind_of<__plain_t<T>> == __unsigned_number)
__MSL_TRAIT(is_floating_point, __kind_of<__plain_t<T>> == __floating_number)
__MSL_TRAIT(is_unsigned, __kind_of<__plain_t<T>> == __bool_number || __kind_of<__plain_t<T>> == __unsigned_number)
__MSL_TRAIT(is_signed, __kind_of<__plain_t<T>> == __signed_number || __kind_of<__plain_t<T>> == __floating_number)
__MSL_TRAIT(is_arithmetic, __kind_of<__plain_t<T>> != __no_number)
__MSL_TRAIT(is_scalar, __kind_of<__plain_t<T>> != __no_number || __is_enum(T) || __is_pointer(T))
__MSL_TRAIT(is_pointer, __is_pointer(T))
__MSL_TRAIT(is_enum, __is_enum(T))
__MSL_TRAIT(is_class, __is_class(T))
__MSL_TRAIT(is_union, __is_union(T))
__MSL_TRAIT(is_array, __is_array(T))
__MSL_TRAIT(is_reference, __is_reference(T))
__MSL_TRAIT(is_void, __is_void(T))
__MSL_TRAIT(is_function, __is_function(T))
__MSL_TRAIT(is_const, __is_const(T))
__MSL_TRAIT(is_volatile, __is_volatile(T))
__MSL_TRAIT(is_trivial, __is_trivial(T))
__MSL_TRAIT(is_trivially_copyable, __is_trivially_copyable(T))
__MSL_TRAIT(is_standard_layout, __is_standard_layout(T))
__MSL_TRAIT(is_pod, __is_pod(T))
#undef __MSL_TRAIT

// Nothing but bfloat itself and integers converts to bfloat without a cast.
template <class F, class T>
static constexpr __constant bool is_convertible_v =
    __is_convertible(F, T) && !(is_same<__plain_t<T>, bfloat>::value && is_floating_point_v<F> &&
                                !is_same<__plain_t<F>, bfloat>::value);
template <class F, class T>
struct is_convertible : bool_constant<is_convertible_v<F, T>> {};
template <class B, class D>
struct is_base_of : bool_constant<__is_base_of(B, D)> {};
template <class B, class D>
static constexpr __constant bool is_base_of_v = __is_base_of(B, D);
template <class T, class... A>
struct is_constructible : bool_constant<__is_constructible(T, A...)> {};
template <class T, class... A>
static constexpr __constant bool is_constructible_v = __is_constructible(T, A...);
template <class T, class U>
static constexpr __constant bool is_same_v = is_same<T, U>::value;

template <class T>
struct make_unsigned {
  typedef T type;
};
template <class T>
struct make_signed {
  typedef T type;
};
#define __MSL_SIGNS(s, u)     \
  template <>                 \
  struct make_unsigned<s> {   \
    typedef u type;           \
  };                          \
  template <>                 \
  struct make_signed<u> {     \
    typedef s type;           \
  };
__MSL_SIGNS(char, uchar)
__MSL_SIGNS(short, ushort)
__MSL_SIGNS(int, uint)
__MSL_SIGNS(long, ulong)
#undef __MSL_SIGNS
template <>
struct make_unsigned<signed char> {
  typedef uchar type;
};
template <class T>
using make_unsigned_t = typename make_unsigned<T>::type;
template <class T>
using make_signed_t = typename make_signed<T>::type;

template <class... B>
struct _disjunction : false_type {};
template <class B>
struct _disjunction<B> : B {};
template <class B, class... C>
struct _disjunction<B, C...> : conditional_t<bool(B::value), B, _disjunction<C...>> {};
template <class... B>
using disjunction = _disjunction<B...>;
template <class... B>
struct _conjunction : true_type {};
template <class B>
struct _conjunction<B> : B {};
template <class B, class... C>
struct _conjunction<B, C...> : conditional_t<bool(B::value), _conjunction<C...>, B> {};
template <class... B>
using conjunction = _conjunction<B...>;
template <class B>
using negation = bool_constant<!bool(B::value)>;
template <class T>
T declval();
template <class T>
METAL_FUNC constexpr T&& forward(remove_reference_t<T>& x) {
  return static_cast<T&&>(x);
}
}  // namespace metal
