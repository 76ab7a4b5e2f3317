// Operators of vectors, element by element. A scalar stands for a vector of it.
namespace metal {
#define __MSL_ARITHMETIC(op)                                                             \
  template <class A, class B, class V = __common_t<A, B>>                                \
  METAL_FUNC V operator op(A a, B b) {                                                   \
    V p(a), q(b), r;                                                                     \
    __MSL_EACH(__parts<V>::size, r.__e[i] = (__element_t<V>)(p.__e[i] op q.__e[i]))      \
    return r;                                                                            \
  }                                                                                      \
  template <class A, class B, class V = __common_t<__plain_t<A>, B>,                     \
            class = enable_if_t<!is_arithmetic_v<A>>>                                    \
  METAL_FUNC A& operator op##=(A& a, B b) {                                              \
    a = (V)a op b;                                                                       \
    return a;                                                                            \
  }
__MSL_ARITHMETIC(+)
__MSL_ARITHMETIC(-)
__MSL_ARITHMETIC(*)
__MSL_ARITHMETIC(/)
__MSL_ARITHMETIC(%)
__MSL_ARITHMETIC(&)
__MSL_ARITHMETIC(|)
__MSL_ARITHMETIC(^)
__MSL_ARITHMETIC(<<)
__MSL_ARITHMETIC(>>)
#undef __MSL_ARITHMETIC

#define __MSL_COMPARISON(op)                                                             \
  template <class A, class B, class V = __common_t<A, B>>                                \
  METAL_FUNC vec<bool, __parts<V>::size> operator op(A a, B b) {                         \
    V p(a), q(b);                                                                        \
    vec<bool, __parts<V>::size> r;                                                       \
    __MSL_EACH(__parts<V>::size, r.__e[i] = p.__e[i] op q.__e[i])                        \
    return r;                                                                            \
  }
__MSL_COMPARISON(<)
__MSL_COMPARISON(>)
__MSL_COMPARISON(<=)
__MSL_COMPARISON(>=)
__MSL_COMPARISON(==)
__MSL_COMPARISON(!=)
__MSL_COMPARISON(&&)
__MSL_COMPARISON(||)
#undef __MSL_COMPARISON

#define __MSL_PREFIX(op)                                                                 \
  template <class A, class V = __vec_of_t<A>>                                            \
  METAL_FUNC V operator op(A a) {                                                        \
    V p(a), r;                                                                           \
    __MSL_EACH(__parts<V>::size, r.__e[i] = (__element_t<V>)(op p.__e[i]))               \
    return r;                                                                            \
  }
__MSL_PREFIX(+)
__MSL_PREFIX(-)
__MSL_PREFIX(~)
#undef __MSL_PREFIX
template <class A, class V = __vec_of_t<A>>
METAL_FUNC vec<bool, __parts<V>::size> operator!(A a) {
  return V(a) == V((__element_t<V>)0);
}
template <class A, class V = __vec_of_t<__plain_t<A>>>
METAL_FUNC A& operator++(A& a) {
  a = (V)a + (__element_t<V>)1;
  return a;
}
template <class A, class V = __vec_of_t<__plain_t<A>>>
METAL_FUNC A& operator--(A& a) {
  a = (V)a - (__element_t<V>)1;
  return a;
}
template <class A, class V = __vec_of_t<__plain_t<A>>>
METAL_FUNC V operator++(A& a, int) {
  V before(a);
  ++a;
  return before;
}
template <class A, class V = __vec_of_t<__plain_t<A>>>
METAL_FUNC V operator--(A& a, int) {
  V before(a);
  --a;
  return before;
}
}  // namespace metal

// `pointer += x` and `number += x`, where x is an object that converts to a number: clang finds no operator of its own
// when the left side has an address space.
#define __MSL_NUMBER_ASSIGNMENT(op, left)                                                    \
  template <class P, class I,                                                                \
            class = metal::enable_if_t<(left) && __is_class(I) && metal::__count<I>::value == 100 && \
                                       metal::is_convertible_v<I, long>>,                     \
            class = void, class = void>                                                      \
  METAL_FUNC P& operator op##=(P& p, I i) {                                                  \
    return p = p op (long)i;                                                                 \
  }
__MSL_NUMBER_ASSIGNMENT(+, metal::is_pointer_v<P> || metal::is_integral_v<P>)
__MSL_NUMBER_ASSIGNMENT(-, metal::is_pointer_v<P> || metal::is_integral_v<P>)
__MSL_NUMBER_ASSIGNMENT(*, metal::is_integral_v<P>)
__MSL_NUMBER_ASSIGNMENT(/, metal::is_integral_v<P>)
__MSL_NUMBER_ASSIGNMENT(%, metal::is_integral_v<P>)
#undef __MSL_NUMBER_ASSIGNMENT
