"""Checked mode: each planted defect is found, with its kind, variable and line, and its repaired twin is clean."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from simulated_launches import BODY_LINE, TG, Ran, body, run

THREADS, GROUPS = 128, 2
X = np.arange(THREADS * GROUPS, dtype=np.float32) + 1


@dataclass(frozen=True)
class Planted:
    """A defect; `{bug}` in the statements stands for `wrong` or `right`. The line counts from the first statement."""

    name: str
    statements: str
    wrong: str
    right: str
    kind: str
    variable: str
    line: int
    detail: str = ""


REDUCTION = """threadgroup float s[128];
s[tid] = x[i];
{first}
for (uint d = 64; d > 0; d >>= 1) {{
  if (tid < d) s[tid] += s[tid + d];
  {second}
}}
y[i] = s[0];"""
FIRST, SECOND = REDUCTION.format(first="{bug}", second=TG), REDUCTION.format(first=TG, second="{bug}")
SHARED = f"threadgroup float s[128];\ns[tid] = x[i];\n{TG}\n"
DEVICE_FLAG, SIMD = "threadgroup_barrier(mem_flags::mem_device);", "simdgroup_barrier(mem_flags::mem_threadgroup);"
NONE = "threadgroup_barrier(mem_flags::mem_none);"
TWO_PHASE = f"""threadgroup float s[4];
float m = simd_max(x[i]);
if (lane == 0) s[sg] = m;
{TG}
m = max(max(s[0], s[1]), max(s[2], s[3]));
{{bug}}
float sum = simd_sum(x[i] - m);
if (lane == 0) s[sg] = sum;
{TG}
y[i] = s[0] + s[1] + s[2] + s[3];"""

PLANTED = [
    Planted("missing barrier", "threadgroup float s[128];\ns[tid] = x[i];\n{bug}\ny[i] = s[127 - tid];", "", TG,
            "race", "s", 3, "read of a write"),
    Planted("device flag for threadgroup memory", FIRST, DEVICE_FLAG, TG, "race", "s", 4),
    Planted("no flag", FIRST, NONE, TG, "race", "s", 4),
    Planted("first barrier of a reduction", FIRST, "", TG, "race", "s", 1),
    Planted("second barrier of a reduction", SECOND, "", TG, "race", "s", 4),
    Planted("simdgroup barrier instead", FIRST, SIMD, TG, "race", "s", 1),
    Planted("max then sum in one buffer", TWO_PHASE, "", TG, "race", "s", 7, "write over a read"),
    Planted("threadgroup flag for device memory",
            "y[i] = x[i];\n{bug}\nfloat v = y[i ^ 1];\nthreadgroup_barrier(mem_flags::mem_device);\ny[i] = v;",
            TG, DEVICE_FLAG, "race", "b0", 2),
    Planted("two threadgroups write one element", "y[i] = x[i];\nif (tid == 0) {bug} = x[i];", "y[0]", "y[i]",
            "race", "b0", 1, "another threadgroup"),
    Planted("a threadgroup reads what another writes", "y[i] = x[i];\nfloat v = {bug};\nif (v < 0) y[i] = v;",
            "y[(i + 128) % 256]", "y[i]", "race", "b0", 0, "another threadgroup"),
    Planted("collectives order nothing",
            "threadgroup float s[128];\ns[tid] = simd_sum(x[i]);\n{bug}\ny[i] = s[tid ^ 1] + simd_sum(1.0f);",
            "float t = simd_sum(1.0f);", SIMD, "race", "s", 3),
    Planted("device read one after", "y[i] = x[{bug}];", "i + 1", "i", "out of bounds", "b1", 0, "read"),
    Planted("device read one before", "y[i] = x[{bug}];", "(int)i - 1", "i", "out of bounds", "b1", 0, "read"),
    Planted("device write one after", "y[{bug}] = x[i];", "i + 1", "i", "out of bounds", "b0", 0, "write"),
    Planted("device write one before", "y[{bug}] = x[i];", "(int)i - 1", "i", "out of bounds", "b0", 0, "write"),
    Planted("constant one after", "constant uint* p = &n;\ny[i] = p[{bug}];", "1", "0", "out of bounds", "b2", 1),
    Planted("constant one before", "constant uint* p = &n;\ny[i] = p[{bug}];", "-1", "0", "out of bounds", "b2", 1),
    Planted("threadgroup one after", SHARED + "threadgroup float* p = s;\ny[i] = p[tid + {bug}];", "n", "0",
            "out of bounds", "s", 4),
    Planted("threadgroup one before", SHARED + "threadgroup float* p = s;\ny[i] = p[(int)tid - (int){bug}];", "n", "0",
            "out of bounds", "s", 4),
    Planted("threadgroup write one after", SHARED + f"threadgroup float* p = s;\np[tid + {{bug}}] = 1;\n{TG}\ny[i] = s[tid];",
            "n", "0", "out of bounds", "s", 4),
    Planted("thread array one after", "float a[4] = {x[i], 1, 2, 3};\na[(i & 3) + {bug}] = 4;\ny[i] = a[i & 3] + a[0];",
            "n", "0", "out of bounds", "", 1),
    Planted("thread array one before", "float a[4] = {x[i], 1, 2, 3};\ny[i] = a[(int)(i & 3) - (int){bug}];",
            "n", "0", "out of bounds", "", 1),
    Planted("uninitialised", "threadgroup float s[128];\nif (tid < {bug}) s[tid] = x[i];\n" + TG + "\ny[i] = s[tid];",
            "127", "128", "uninitialised read", "s", 3),
    Planted("early return", "y[i] = x[i];\nif (tid >= {bug}) return;\n" + TG, "96", "128", "barrier divergence", "", 2,
            "thread 96 returned"),
    Planted("barrier in a branch", "if ({bug}) {\n" + TG + "\n}\ny[i] = x[i];", "tid < 64", "n == 1",
            "barrier divergence", "", 1),
    Planted("barriers in loops of different length",
            "for (uint j = 0; j < {bug}; j++) {\n" + TG + "\n}\n" + TG + "\ny[i] = x[i];", "sg + 1", "n + 1",
            "barrier divergence", "", 1),
    Planted("simdgroup barrier in a branch", "if ({bug}) {\n" + SIMD + "\n}\ny[i] = x[i];", "lane < 16", "n == 1",
            "barrier divergence", "", 1),
    Planted("unwritten", "if (i != {bug}) y[i] = x[i];", "100", "1000", "unwritten output", "b0", -1),
]  # fmt: skip


def _run(statements: str) -> Ran:
    ones = np.uint32(1)
    return run(body(statements), [np.zeros_like(X), X, ones], X.size, THREADS, outputs=(0,), check=True)


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.name)
def test_planted_defect_is_found(planted: Planted) -> None:
    ran = _run(planted.statements.replace("{bug}", planted.wrong))
    place = ("kernel.metal", BODY_LINE + planted.line) if planted.line >= 0 else ("", 0)
    wanted = (planted.kind, planted.variable, *place)
    found = [(one.kind, one.variable, one.file, one.line) for one in ran.findings if planted.detail in one.detail]
    assert wanted in found, [str(finding) for finding in ran.findings]
    # Without a barrier some threads read what is not there yet, which is a defect too.
    also = {"uninitialised read"} if planted.kind == "race" else set()
    assert set(ran.kinds) <= {planted.kind} | also


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.name)
def test_repaired_twin_is_clean(planted: Planted) -> None:
    ran = _run(planted.statements.replace("{bug}", planted.right))
    assert [str(finding) for finding in ran.findings] == []
    assert ran.launch.benign == ()
