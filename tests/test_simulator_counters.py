"""Counters of launches whose counts follow from the source."""

from __future__ import annotations

import numpy as np
from simulated_launches import TG, body, run

from metile.simulator.counters import Traffic

X = np.arange(256, dtype=np.float32)


def test_traffic_by_buffer() -> None:
    counters = run(
        body("y[i] = x[i] + x[0];"), [X, X, np.uint32(1)], 256, 128, outputs=(0,), check=True
    ).launch.counters
    assert counters.traffic is not None
    assert counters.traffic["b0"] == Traffic(written=1024, unique_written=1024)
    # x[0] once more in the second threadgroup, whose own elements do not include it
    assert counters.traffic["b1"] == Traffic(read=2048, unique_read=1024 + 4)
    assert counters.traffic["b2"] == Traffic()


def test_fast_mode_counts_no_traffic() -> None:
    assert run(body("y[i] = x[i];"), [X, X, np.uint32(1)], 256, 128).launch.counters.traffic is None


def test_barriers_collectives_and_memory() -> None:
    statements = (
        f"threadgroup float s[128];\nthreadgroup float4 t[8];\ns[tid] = simd_sum(x[i]);\nt[tid & 7] = 1;\n{TG}\n"
    )
    statements += f"for (int j = 0; j < 3; j++) {{ y[i] = s[127 - tid]; {TG} }}"
    for check in (False, True):
        counters = run(body(statements), [X, X, np.uint32(1)], 256, 128, outputs=(0,), check=check).launch.counters
        assert counters.threads == 256
        assert counters.barriers == 2 * 4
        assert counters.collectives == 8
        assert counters.threadgroup_bytes == 128 * 4 + 8 * 16


def test_multiply_accumulates_are_the_same_in_each_mode() -> None:
    statements = "simdgroup_float8x8 a(1.0f), b(2.0f), c(0.0f);\nfor (int j = 0; j < 5; j++)\n"
    statements += "  simdgroup_multiply_accumulate(c, a, b, c);\ny[i] = c.thread_elements()[0];"
    for check in (False, True):
        counters = run(body(statements), [X, X, np.uint32(1)], 256, 128, outputs=(0,), check=check).launch.counters
        assert counters.multiply_accumulates == 512 * 5 * 8
