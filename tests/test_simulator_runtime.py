"""What threads, simdgroups and threadgroups do, against what Metal says they do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_launches import TG, body, run

from metile.errors import MetileError
from metile.simulator.runtime import Buffer, launch

I = np.arange(64)  # noqa: E741
TRIPS = I % 8


def _maxima() -> np.ndarray:
    """Sum over j of the greatest index in each simdgroup that is still in the loop at turn j."""
    y = np.zeros(64)
    for j in range(7):
        for first in (0, 32):
            active = [i for i in range(first, first + 32) if TRIPS[i] > j]
            y[active] += max(active)
    return y


SEMANTICS: dict[str, tuple[str, np.ndarray]] = {
    "collectives in both branches": (
        "if (i & 1) y[i] = simd_sum(1.0f);\nelse y[i] = simd_sum(10.0f);",
        np.where(I & 1, 16.0, 160.0),
    ),
    "collective in one branch": (
        "y[i] = 0;\nif (lane < 5) y[i] = simd_sum((float)lane);",
        np.where(I % 32 < 5, 10.0, 0),
    ),
    "nested branches": (
        "float v = 0;\nif (lane < 16) { v = simd_sum(1.0f); if (lane < 4) v += simd_sum(100.0f); }\n"
        "y[i] = v + simd_sum(1000.0f);",
        np.where(I % 32 < 4, 416.0, np.where(I % 32 < 16, 16.0, 0)) + 32000,
    ),
    "three call sites at once": (
        "if (lane % 3 == 0) y[i] = simd_sum(1.0f);\nelse if (lane % 3 == 1) y[i] = simd_max((float)lane);\n"
        "else y[i] = simd_min((float)lane);",
        np.choose(I % 32 % 3, [11.0, 31.0, 2.0]),
    ),
    "loops of different length": (
        "float a = 0;\nfor (uint j = 0; j < (i & 7); j++) a += simd_max((float)i);\ny[i] = a;",
        _maxima(),
    ),
    "shuffles and scans": (
        "y[i] = simd_shuffle_xor((float)i, 3) + simd_broadcast((float)i, 7) + simd_prefix_exclusive_sum(1.0f) +\n"
        "  simd_prefix_inclusive_sum(2.0f);",
        (I ^ 3) + (I // 32 * 32 + 7) + I % 32 + 2.0 * (I % 32 + 1),
    ),
    "early exit before a barrier": (
        f"y[i] = -1;\nif (i >= 40) return;\nthreadgroup float s[64];\ns[i] = i;\n{TG}\ny[i] = s[39 - i];",
        np.where(I < 40, 39.0 - I, -1),
    ),
    "a whole simdgroup leaves": (
        f"y[i] = -1;\nif (sg == 0) return;\n{TG}\ny[i] = simd_sum(1.0f);\n{TG}",
        np.where(I < 32, -1.0, 32),
    ),
    "two barriers in a loop": (
        f"threadgroup float s[64];\nfloat v = i;\nfor (int j = 0; j < 5; j++) {{ s[tid] = v; {TG}\n"
        f"v = s[(tid + 1) % 64]; {TG} }}\ny[i] = v;",
        (I + 5.0) % 64,
    ),
    "lanes meet at a simdgroup barrier": (
        "threadgroup float s[64];\ns[tid] = i;\nsimdgroup_barrier(mem_flags::mem_threadgroup);\ny[i] = s[tid ^ 31];",
        I ^ 31,
    ),
    "threadgroup memory starts as garbage": (
        "threadgroup float s[64];\ny[i] = isnan(s[tid]) ? 1 : 0;\ns[tid] = 3;",
        np.ones(64),
    ),
}


@pytest.mark.parametrize("name", SEMANTICS)
def test_semantics(name: str) -> None:
    statements, expected = SEMANTICS[name]
    for threadgroups in (1, 5):
        x = np.zeros(64 * threadgroups, np.float32)
        text = body("uint whole = i;\n{ uint i = tid; device float* out = y + whole - tid; device float* y = out;\n"
                    f"{statements}\n}}")  # fmt: skip
        ran = run(text, [x, x, np.uint32(1)], x.size, 64, outputs=(0,))
        np.testing.assert_array_equal(ran.arrays[0].reshape(threadgroups, 64), np.tile(expected, (threadgroups, 1)))


def test_atomics_over_all_cores() -> None:
    text = (
        "[[kernel]] void k(device atomic_uint* c [[buffer(0)]], uint i [[thread_position_in_grid]]) {\n"
        "  atomic_fetch_add_explicit(c, 1u, memory_order_relaxed);\n"
        "  atomic_fetch_max_explicit(c + 1, i, memory_order_relaxed);\n}\n"
    )
    ran = run(text, [np.zeros(2, np.uint32)], 200_001, 96, updated=(0,), threads=8)
    assert ran.arrays[0].tolist() == [200_001, 200_000]


COVER = """[[kernel]] void k(device uint* y [[buffer(0)]], uint3 p [[thread_position_in_grid]],
    uint3 size [[threads_per_grid]], uint3 t [[thread_position_in_threadgroup]],
    uint3 g [[threadgroup_position_in_grid]], uint3 whole [[dispatch_threads_per_threadgroup]],
    uint3 own [[threads_per_threadgroup]], uint index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]], uint sg [[simdgroup_index_in_threadgroup]]) {
  uint at = (p.z * size.y + p.y) * size.x + p.x;
  bool fits = p.x == g.x * whole.x + t.x && p.y == g.y * whole.y + t.y && p.z == g.z * whole.z + t.z;
  fits = fits && index == (t.z * own.y + t.y) * own.x + t.x && lane == index % 32 && sg == index / 32;
  fits = fits && t.x < own.x && t.y < own.y && t.z < own.z;
  y[at] += fits ? 1 : 100;
}
"""
SIZES = st.tuples(st.integers(1, 37), st.integers(1, 9), st.integers(1, 5))
GROUPS = st.tuples(st.integers(1, 40), st.integers(1, 5), st.integers(1, 5))


@settings(max_examples=60, deadline=None)
@given(grid=SIZES, threadgroup=GROUPS, threads=st.integers(1, 3))
def test_each_thread_of_a_grid_runs_once(grid: tuple[int, ...], threadgroup: tuple[int, ...], threads: int) -> None:
    ran = run(COVER, [np.zeros(grid, np.uint32)], grid, threadgroup, updated=(0,), threads=threads)
    assert (ran.arrays[0] == 1).all()
    assert ran.launch.counters.threads == np.prod(grid)


def test_an_empty_grid_runs_nothing() -> None:
    ran = run(COVER, [np.zeros(4, np.uint32)], 0, 32, updated=(0,))
    assert (ran.arrays[0] == 0).all()
    assert ran.launch.counters.threads == 0


def test_last_threadgroup_is_partial() -> None:
    x = np.zeros(100, np.float32)
    ran = run(body("y[i] = simd_sum(1.0f) + 100 * (float)sg;"), [x, x, np.uint32(1)], 100, 64, outputs=(0,))
    assert ran.arrays[0].tolist() == [32.0] * 32 + [132.0] * 32 + [32.0] * 32 + [104.0] * 4


MATRIX = """template <typename T>
[[kernel]] void k(const device T* a [[buffer(0)]], const device T* b [[buffer(1)]], device float* c [[buffer(2)]],
    uint group [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]]) {
  simdgroup_matrix<float, 8, 8> sum = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  for (int k = 0; k < 3; k++) {
    simdgroup_matrix<T, 8, 8> x, y;
    simdgroup_load(x, a + 8 * k, 24);
    simdgroup_load(y, b + 64 * k + 4096 * 0, 8);
    simdgroup_multiply_accumulate(sum, x, y, sum);
    sum.thread_elements()[0] += 1;
    sum.thread_elements()[1] += 1;
  }
  simdgroup_store(sum, c + group * 64, 8);
}
"""


@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize(("name", "dtype"), [("float", np.float32), ("half", np.float16)])
def test_matrices_and_their_elements(once: bool, name: str, dtype: type) -> None:
    generator = np.random.default_rng(0)
    a, b = (generator.integers(-4, 5, shape).astype(dtype) for shape in ((8, 24), (24, 8)))
    ran = run(MATRIX, [a, b, np.zeros((6, 8, 8), np.float32)], 192, 32, outputs=(2,), function=f"k<{name}>",
              options={"once_per_simdgroup": once})  # fmt: skip
    expected = a.astype(np.float32) @ b.astype(np.float32) + 3
    np.testing.assert_array_equal(ran.arrays[2], np.broadcast_to(expected, (6, 8, 8)))
    assert ran.launch.counters.multiply_accumulates == 6 * 3 * 512


def test_many_short_lived_matrices() -> None:
    statements = "float total = 0;\nfor (uint j = 0; j < 5000 * n; j++) {\n  simdgroup_float8x8 a(1.0f), b(2.0f), c;\n"
    statements += (
        "  simdgroup_multiply(c, a, b);\n  if (j % 1000 == 0) total += c.thread_elements()[0];\n}\ny[i] = total;"
    )
    x = np.zeros(32, np.float32)
    once = run(body(statements), [x, x, np.uint32(1)], 32, 32, outputs=(0,), options={"once_per_simdgroup": True})
    lane = run(body(statements), [x, x, np.uint32(1)], 32, 32, outputs=(0,), options={"once_per_simdgroup": False})
    np.testing.assert_array_equal(once.arrays[0], lane.arrays[0])
    assert once.arrays[0].sum() == 4 * 2 * 5  # four diagonal elements are the first of their lane


def test_threadgroup_arguments() -> None:
    text = (
        "[[kernel]] void k(device float* y [[buffer(0)]], threadgroup float* s [[threadgroup(0)]],\n"
        "    threadgroup float* t [[threadgroup(1)]], uint i [[thread_position_in_threadgroup]]) {\n"
        f"  s[i] = i; t[i] = 100;\n  {TG}\n  y[i] = s[63 - i] + t[i];\n}}\n"
    )
    ran = run(text, [np.zeros(64, np.float32)], 64, 64, outputs=(0,), threadgroup_arguments={0: 256, 1: 256})
    np.testing.assert_array_equal(ran.arrays[0], 163 - I)
    assert ran.launch.counters.threadgroup_bytes == 512


def test_inputs_are_not_written_back_and_outputs_start_poisoned() -> None:
    x = np.zeros(4, np.float32)
    text = "[[kernel]] void k(device float* a [[buffer(0)]], device float* b [[buffer(1)]]) { a[0] = 5; b[0] = 5; }\n"
    ran = run(text, [x, x], 1, 1, outputs=(1,))
    assert ran.arrays[0].tolist() == [0, 0, 0, 0]
    assert ran.arrays[1][0] == 5
    assert np.isnan(ran.arrays[1][1:]).all()


def test_same_result_on_any_number_of_threads() -> None:
    x = np.arange(4096, dtype=np.float32)
    statements = f"threadgroup float s[64];\ns[tid] = x[i];\n{TG}\ny[i] = simd_sum(s[63 - tid]);"
    arrays = [
        run(body(statements), [x, x, np.uint32(1)], 4096, 64, outputs=(0,), threads=t).arrays[0] for t in (1, 2, 7)
    ]
    np.testing.assert_array_equal(arrays[0], arrays[1])
    np.testing.assert_array_equal(arrays[0], arrays[2])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a.update(entry="other"), "expected one of the kernels"),
        (lambda a: a.update(grid=(1, 2, 3, 4)), "expected a grid of one to three sizes"),
        (lambda a: a.update(threadgroup=(0,)), "expected a threadgroup of at least one thread"),
        (lambda a: a.update(buffers={40: a["buffers"][0]}), "expected buffers of index 0 to 31"),
        (lambda a: a.update(buffers={0: Buffer("b", np.zeros(4, np.float32))}), "expected b as contiguous bytes"),
        (lambda a: a.update(threadgroup_arguments={9: 4}), "expected threadgroup arguments of index 0 to 7"),
    ],
)
def test_wrong_arguments(change: Callable[[dict[str, Any]], None], message: str) -> None:
    from metile.simulator.program import compile_program

    program = compile_program("[[kernel]] void k(device float* a [[buffer(0)]]) { a[0] = 1; }\n")
    arguments: dict[str, Any] = {
        "entry": "k",
        "buffers": {0: Buffer("b", np.zeros(4, np.uint8))},
        "grid": (1,),
        "threadgroup": (1,),
    }
    change(arguments)
    with pytest.raises(MetileError, match=message):
        launch(program, **arguments)
