"""Checked mode: each planted defect is found, with its kind, variable and line, and its repaired twin is clean."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from simulated_launches import BODY_LINE, TG, Ran, body, run

from metile.simulator.findings import FindingsError
from metile.simulator.program import Options, Program, compile_program
from metile.simulator.runtime import Buffer, Launch, launch

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
    Planted("threadgroup write one after", SHARED + "threadgroup float* p = s;\np[tid + {bug}] = 1;\ny[i] = s[tid];",
            "n", "0", "out of bounds", "s", 4),
    Planted("thread array one after", "float a[4] = {x[i], 1, 2, 3};\ny[i] = a[(i & 3) + {bug}];",
            "n", "0", "out of bounds", "", 1),
    Planted("thread array write one after",
            "float a[4] = {x[i], 1, 2, 3};\na[(i & 3) + {bug}] = x[i];\ny[i] = a[i & 3];",
            "n", "0", "out of bounds", "", 1),
    Planted("thread array one before", "float a[4] = {x[i], 1, 2, 3};\ny[i] = a[(int)(i & 3) - (int){bug}];",
            "n", "0", "out of bounds", "", 1),
    Planted("uninitialised", "threadgroup float s[128];\nif (tid < {bug}) s[tid] = x[i];\n" + TG + "\ny[i] = s[tid];",
            "127", "128", "uninitialised read", "s", 3),
    Planted("early return", "y[i] = x[i];\nif (tid >= {bug}) return;\n" + TG, "96", "128", "barrier divergence", "", 2,
            "thread 96 returned"),
    Planted("barrier in a branch", "if ({bug}) {\n" + TG + "\n}\ny[i] = x[i];", "tid < 64", "n == 1",
            "barrier divergence", "", 1),
    Planted("barriers on both sides of a branch", "if ({bug}) {\n" + TG + "\n} else {\n" + TG + "\n}\ny[i] = x[i];",
            "tid < 64", "n == 1", "barrier divergence", "", 1),
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


LEGAL = {
    "reuse of threadgroup memory": f"""threadgroup float s[128];
float v = x[i];
for (int j = 0; j < 4; j++) {{
  s[tid] = v;
  {TG}
  v = s[127 - tid];
  {TG}
}}
y[i] = v;""",
    "simdgroup exchange": """threadgroup float s[128];
s[tid] = x[i];
simdgroup_barrier(mem_flags::mem_threadgroup);
float v = s[tid ^ 5];
simdgroup_barrier(mem_flags::mem_threadgroup);
s[tid] = v;
y[i] = s[tid];""",
    "all threads read one element": f"threadgroup float s;\nif (tid == 0) s = x[i];\n{TG}\ny[i] = s + x[0];",
    "one thread rewrites": "y[i] = x[i];\ny[i] += 1;\ny[i] *= 2;",
    "a leader per simdgroup": f"""threadgroup float s[4];
float v = simd_sum(x[i]);
if (lane == 0) s[sg] = v;
{TG}
if (sg == 0) {{ v = simd_sum(lane < 4 ? s[lane] : 0.0f); if (lane == 0) s[0] = v; }}
{TG}
y[i] = s[0];""",
    "a simdgroup reads before it alone writes": f"""threadgroup float s[128];
s[tid] = x[i];
{TG}
float v = sg == 1 ? s[(tid ^ 1)] : 0;
simdgroup_barrier(mem_flags::mem_threadgroup);
if (sg == 1) s[tid] = v;
{TG}
y[i] = s[127 - tid];""",
    "exchange through device memory": f"y[i] = x[i];\n{DEVICE_FLAG}\nfloat v = y[i ^ 1];\n{DEVICE_FLAG}\ny[i] = v;",
    "both kinds at one barrier": """threadgroup float s[128];
s[tid] = x[i];
y[i] = x[i];
threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);
float v = s[tid ^ 1] + y[i ^ 1];
threadgroup_barrier(mem_flags::mem_device);
y[i] = v;""",
    "vectors, bytes and pointers": f"""threadgroup float4 s[32];
if (tid < 32) s[tid] = ((const device float4*)x)[tid];
{TG}
threadgroup uchar* bytes = (threadgroup uchar*)s;
uchar b = bytes[tid * 4 + 3];
y[i] = s[tid / 4][tid % 4] + (float)b;""",
    "threadgroup atomics": f"""threadgroup atomic_uint c;
if (tid == 0) atomic_store_explicit(&c, 0u, memory_order_relaxed);
{TG}
atomic_fetch_add_explicit(&c, 1u, memory_order_relaxed);
{TG}
y[i] = atomic_load_explicit(&c, memory_order_relaxed);""",
    "arrays of a thread": "float a[8];\nfor (uint j = 0; j < 8; j++) a[(j + i) & 7] = x[i] + j;\ny[i] = a[i & 7];",
    "matrices": f"""threadgroup float s[4 * 64];
simdgroup_float8x8 a, b(2.0f), c(0.0f);
s[sg * 64 + lane] = x[i];
s[sg * 64 + 32 + lane] = x[i];
{TG}
simdgroup_load(a, s + sg * 64, 8);
simdgroup_multiply_accumulate(c, a, b, c);
simdgroup_store(c, s + sg * 64, 8);
{TG}
y[i] = s[sg * 64 + lane];""",
}


@pytest.mark.parametrize("name", LEGAL)
def test_legal_pattern_is_clean(name: str) -> None:
    ran = _run(LEGAL[name])
    assert [str(finding) for finding in ran.findings] == []
    assert ran.launch.benign == ()


def test_atomics_of_all_threadgroups_do_not_race() -> None:
    text = (
        "[[kernel]] void k(device atomic_uint* c [[buffer(0)]], device uint* y [[buffer(1)]],\n"
        "    uint i [[thread_position_in_grid]]) {\n"
        "  y[i] = atomic_fetch_add_explicit(c, 1u, memory_order_relaxed);\n}\n"
    )
    ran = run(text, [np.zeros(1, np.uint32), X], X.size, THREADS, outputs=(1,), updated=(0,), check=True)
    assert ran.findings == ()
    assert ran.arrays[0][0] == X.size


def test_atomic_and_plain_accesses_race() -> None:
    text = (
        "[[kernel]] void k(device atomic_uint* c [[buffer(0)]], device uint* y [[buffer(1)]],\n"
        "    uint i [[thread_position_in_grid]]) {\n"
        "  atomic_fetch_add_explicit(c, 1u, memory_order_relaxed);\n"
        "  y[i] = *(device uint*)c;\n}\n"
    )
    ran = run(text, [np.zeros(1, np.uint32), X], X.size, THREADS, outputs=(1,), updated=(0,), check=True)
    assert {(one.kind, one.variable) for one in ran.findings} == {("race", "b0")}


def test_same_value_overlap_is_benign() -> None:
    ran = _run("y[i] = 1;\ny[0] = 1;")
    assert ran.findings == ()
    assert [(one.kind, one.variable, one.line) for one in ran.launch.benign] == [("race", "b0", BODY_LINE + 1)]


def test_unwritten_ranges_are_merged() -> None:
    ran = _run("if (i < 16 || i > 19) y[i] = x[i];")
    assert [(one.kind, one.offset, one.size) for one in ran.findings] == [("unwritten output", 64, 16)]


def test_uninitialised_output_is_not_to_be_read() -> None:
    ran = _run("y[i] += x[i];")
    assert {(one.kind, one.variable, one.line) for one in ran.findings} == {("uninitialised read", "b0", BODY_LINE)}


def test_one_finding_a_place_with_a_count() -> None:
    ran = _run("y[i] = x[i + n];\nif (i == 300) y[i] = 2;")
    assert [(one.kind, one.offset, one.size, one.thread, one.threadgroup) for one in ran.findings] == [
        ("out of bounds", 1024, 4, 127, (1, 0, 0))
    ]
    text = str(ran.findings[0])
    assert text.startswith(f"kernel.metal:{BODY_LINE}: out of bounds of 4 bytes at b1+1024 by thread 127 of")
    race = _run("y[0] = x[i];\ny[i] = x[i];").findings[0]
    assert race.count > 200


def test_an_access_outside_is_not_carried_out() -> None:
    ran = _run("y[i] = 7;\ny[(int)i - 1] = 9;")
    assert [(one.kind, one.offset) for one in ran.findings][:1] == [("out of bounds", -4)]


def test_findings_are_the_same_each_time() -> None:
    statements = SECOND.replace("{bug}", "")
    assert _run(statements).findings == _run(statements).findings


def test_line_of_an_inlined_function() -> None:
    helper = "inline float next(threadgroup float* s, uint i) {\n  return s[i + 1];\n}\n"
    text = helper + body(f"threadgroup float s[128];\ns[tid] = x[i];\n{TG}\ny[i] = next(s, tid);")
    ran = run(text, [np.zeros_like(X), X, np.uint32(1)], X.size, THREADS, outputs=(0,), check=True)
    assert [(one.kind, one.variable, one.file, one.line) for one in ran.findings] == [
        ("out of bounds", "s", "kernel.metal", 5)
    ]


def test_findings_error_lists_them() -> None:
    ran = _run("y[i] = x[i + n];")
    error = FindingsError(ran.findings, ran.launch.benign)
    assert error.findings == ran.findings
    assert str(error).startswith("[check] expected no findings but got 1:\n  kernel.metal:8: out of bounds")


def test_a_launch_with_fewer_buffers_than_the_last_one_finds_all_of_its_own() -> None:
    parameters = ", ".join(f"device int* b{i}" for i in range(6))
    many = compile_program(
        f"kernel void k({parameters}, uint i [[thread_position_in_grid]]) {{ b5[i] = 1; }}", None, Options(check=True)
    )
    few = compile_program(
        "kernel void k(device int* b0, device int* b1, uint i [[thread_position_in_grid]]) { b1[i] = b0[i]; }",
        None,
        Options(check=True),
    )

    def ran(program: Program, count: int) -> Launch:
        buffers = {i: Buffer(f"b{i}", np.zeros(32, np.uint8)) for i in range(count)}
        return launch(program, "k", buffers, (8, 1, 1), (8, 1, 1))

    assert ran(many, 6).findings == ()
    assert ran(few, 2).findings == ()
