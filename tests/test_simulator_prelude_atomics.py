"""Atomics of device and threadgroup memory."""

import numpy as np
import pytest
from simulator_run import TYPES, run

SPACES = pytest.mark.parametrize("space", ["device", "threadgroup"])
RNG = np.random.default_rng(5)


def held(space: str, kind: str, count: int) -> tuple[str, str]:
    """Return the text that makes `a` atomics of `space` holding what `y` holds, and the text that gives them back."""
    if space == "device":
        return f"device atomic<{kind}>* a = y;", ""
    fence = "threadgroup_barrier(mem_flags::mem_threadgroup);"
    before = f"threadgroup atomic<{kind}> a[{count}]; if (i == 0) for (int j = 0; j < {count}; j++) "
    move = "atomic_store_explicit(&{}[j], atomic_load_explicit(&{}[j], memory_order_relaxed), memory_order_relaxed);"
    before += f"{move.format('a', 'y')} {fence}"
    after = f"{fence} if (i == 0) for (int j = 0; j < {count}; j++) "
    return (
        before,
        f"{after} {move.format('y', 'a')}",
    )


def update(space: str, kind: str, body: str, count: int, inputs: np.ndarray, start: np.ndarray) -> np.ndarray:
    before, after = held(space, kind, count)
    source = f"""kernel void k(device atomic<{kind}>* y, device {kind}* p, uint i [[thread_position_in_threadgroup]]) {{
      {before} {kind} x = p[i]; {body} {after} }}"""
    return run(source, [start, inputs], 96)[0]


@SPACES
@pytest.mark.parametrize("kind", ["int", "uint", "ulong"])
def test_fetches(space, kind):
    names = ["add", "sub", "min", "max", "and", "or", "xor"]
    body = "".join(f"atomic_fetch_{name}_explicit(&a[{n}], x, memory_order_relaxed);" for n, name in enumerate(names))
    x = RNG.integers(0, 1000, 96).astype(TYPES[kind])
    start = np.full(7, 500, TYPES[kind])
    got = update(space, kind, body, 7, x, start)
    with np.errstate(over="ignore"):
        total = x.sum(dtype=x.dtype)
        expected = [500 + total, start[0] - total, min(500, x.min()), max(500, x.max())]
        expected += [500 & np.bitwise_and.reduce(x), 500 | np.bitwise_or.reduce(x), 500 ^ np.bitwise_xor.reduce(x)]
    np.testing.assert_array_equal(got, np.array(expected, TYPES[kind]))


@SPACES
def test_floats(space):
    x = RNG.integers(-8, 9, 96).astype(np.float32)
    body = "".join(
        f"atomic_fetch_{name}_explicit(&a[{n}], x, memory_order_relaxed);" for n, name in enumerate(("add", "sub"))
    )
    got = update(space, "float", body, 2, x, np.array([1, 2], np.float32))
    np.testing.assert_array_equal(got, [1 + x.sum(), 2 - x.sum()])


@SPACES
@pytest.mark.parametrize("kind", ["int", "uint", "ulong", "float"])
def test_compare_exchange_loops(space, kind):
    body = f"""{kind} old = atomic_load_explicit(&a[0], memory_order_relaxed);
      while (!atomic_compare_exchange_weak_explicit(&a[0], &old, old + x, memory_order_relaxed,
      memory_order_relaxed)) {{}}"""
    x = RNG.integers(0, 9, 96).astype(TYPES[kind])
    got = update(space, kind, body, 1, x, np.array([3], TYPES[kind]))
    np.testing.assert_array_equal(got, [3 + x.sum()])


def test_a_failed_exchange_says_what_is_there():
    source = """kernel void k(device atomic_int* y, device int* out) { int expected = 5;
      bool done = atomic_compare_exchange_weak_explicit(y, &expected, 9, memory_order_relaxed, memory_order_relaxed);
      out[0] = done; out[1] = expected; out[2] = atomic_exchange_explicit(y, 11, memory_order_relaxed);
      out[3] = atomic_load_explicit(y, memory_order_relaxed); }"""
    value, out = run(source, [np.array([7], np.int32), np.zeros(4, np.int32)])
    np.testing.assert_array_equal(out, [0, 7, 7, 11])
    np.testing.assert_array_equal(value, [11])


def test_fetch_returns_what_was_there():
    source = """kernel void k(device atomic_uint* y, device uint* out, uint i [[thread_position_in_grid]]) {
      out[i] = atomic_fetch_add_explicit(y, 1u, memory_order_relaxed); }"""
    count, tickets = run(source, [np.zeros(1, np.uint32), np.zeros(128, np.uint32)], 128, 32)
    np.testing.assert_array_equal(np.sort(tickets), np.arange(128))
    np.testing.assert_array_equal(count, [128])


def test_names_and_flags():
    source = """kernel void k(device atomic_uint* y, device atomic_bool* b, device atomic_ulong* w,
      device atomic_float* f, device atomic_int* s,
        uint i [[thread_position_in_threadgroup]]) {
      atomic_store_explicit(b, true, memory_order_relaxed);
      atomic_max_explicit(w, ulong(1) << 40, memory_order_relaxed);
      atomic_fetch_add_explicit(f, 0.5f, memory_order_relaxed);
      atomic_fetch_min_explicit(s, -int(i), memory_order_relaxed);
      atomic_thread_fence(mem_flags::mem_device, memory_order_seq_cst, thread_scope_device);
      atomic_thread_fence(mem_flags::mem_threadgroup, memory_order_seq_cst);
      volatile device atomic_uint* v = y; atomic_fetch_or_explicit(v, 1u << i, memory_order_relaxed); }"""
    start = [np.zeros(1, t) for t in (np.uint32, np.bool_, np.uint64, np.float32, np.int32)]
    got = run(source, start, 32)
    assert [array[0] for array in got] == [2**32 - 1, True, 2**40, 16, -31]
