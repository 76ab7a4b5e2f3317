"""Cases 1 to 5 of public reports, in the operations of the Metal target: each with the whole kind it stands for.

What concerns plain kernels (names, layouts, grids, limits of a launch) is in test_simulator_kernel.py and
test_simulator_layouts.py; device limits and the search are in test_metal_limits.py. Tiles are those of the other test
files where possible: a text compiles once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import pytest
from kernel_checks import assert_near, numpy_of, random
from metal_checks import CHECKED, FAST, WatchedTarget, check, check_attend
from test_attention import arrays
from test_rope import table_of

from metile.files import data_root
from metile.ops.attention import AttentionKey
from metile.ops.attention_space import AttentionTile
from metile.ops.base import OpKey
from metile.ops.linear import LinearKey
from metile.ops.linear_tile import LinearTile
from metile.ops.norm import NormKey, NormTile
from metile.ops.rope import RopeKey, RopeTile
from metile.simulator import FindingsError
from metile.targets import metal_text
from metile.targets.base import KernelSource, Output

ELEMENT = "const Index i = group.index * group_threads + group.thread_index;\n  if (i < y.shape[0]) "


def source_of(name: str, body: str, inputs: Sequence[str] = ("x",), **fields: Any) -> KernelSource:
    return KernelSource(name, "norm.metal", body, tuple(inputs), ("y",), **fields)


def run(
    source: KernelSource, inputs: list[mx.array], target: WatchedTarget = FAST, *, size: int = 64, poison: bool = True
) -> mx.array:
    groups = -(-size // (32 * source.simdgroups))
    return target.compile(source)(inputs, [Output((size,), mx.float32)], groups=groups, poison=poison)[0]


# ---- 1: kernel identity ----


def test_two_sources_of_one_name_in_one_evaluation() -> None:
    x, target = mx.arange(64, dtype=mx.float32), WatchedTarget()
    twice = source_of("k", ELEMENT + "y.data[i] = x.data[i] * 2;")
    more = source_of("k", ELEMENT + "y.data[i] = x.data[i] + 100;")
    results = [run(source, [x], target) for source in (twice, more, twice, more)]
    mx.eval(results)
    for y, expected in zip(results, [x * 2, x + 100] * 2, strict=True):
        assert mx.array_equal(y, expected)
    names = [text["name"] for text in target.made]
    assert len(names) == len(set(names)) == 2


def test_one_operation_at_two_dtypes_in_one_graph() -> None:
    target = WatchedTarget()
    tiles: dict[str, NormTile] = {"float16": NormTile(1, 1), "float32": NormTile(4, 32)}
    keys = {dtype: NormKey(False, 4, 40, 1e-5, dtype) for dtype in tiles}
    inputs = {dtype: key.example(3, 0) for dtype, key in keys.items()}

    def launch(dtype: str) -> mx.array:
        kernel = target.compile(keys[dtype].source(tiles[dtype]))
        return keys[dtype].launch(kernel, tiles[dtype], inputs[dtype], poison=True)[0]

    total = launch("float16") + launch("float32") + launch("float16")
    halves, floats = (keys[dtype].reference(inputs[dtype])[0] for dtype in tiles)
    assert total.dtype == mx.float32
    assert mx.allclose(total, 2 * halves + floats, atol=1e-2)
    assert len({text["name"] for text in target.made}) == 2


@pytest.mark.parametrize("add", [False, True])
def test_norm_weights_of_seven_and_eight_elements(add: bool) -> None:
    # MLX passes seven in the constant address space, and eight in the device's.
    tile, dtype = (NormTile(4, 8), "float16") if add else (NormTile(2, 2), "bfloat16")
    for _ in range(2):
        for hidden in (7, 8, 1, 9):
            key = NormKey(add, 64, hidden, 1e-5, dtype)
            for rows in (1, 3):
                check(key, tile, key.example(rows, hidden), CHECKED)


def test_a_scale_without_axes() -> None:
    source = source_of("scaled", ELEMENT + "y.data[i] = x.data[i] * matrix_of<const device float>(s).data[0];", "xs")
    x = mx.arange(64, dtype=mx.float32)
    for scale in (mx.array(2.5), mx.array([3.0]), mx.full((9,), 0.5), mx.array(-1.0)):
        assert mx.array_equal(run(source, [x, scale]), x * scale.reshape(-1)[0])


# ---- 2: layouts ----

View = Callable[[mx.array], mx.array]

# Each returns the values of x, or some of them over and over, in other strides.
VIEWS: dict[str, View] = {
    "reversed": lambda x: mx.contiguous(x[::-1])[::-1],
    "every second column": lambda x: mx.repeat(x, 2, axis=-1)[..., ::2],
    "transposed": lambda x: mx.contiguous(x.T).T,
    "reversed columns": lambda x: mx.contiguous(x[..., ::-1])[..., ::-1],
    "inside a larger one": lambda x: mx.concatenate([x, x, x], axis=-1)[..., x.shape[-1] : 2 * x.shape[-1]],
    "stride 0": lambda x: mx.broadcast_to(x[:1], x.shape),
    "stride 0 in columns": lambda x: mx.broadcast_to(x[..., :1], x.shape),
    "size-1 axes": lambda x: x[None, :, None].swapaxes(0, 2)[0].squeeze(1) if x.ndim > 1 else x[None][0],
}

Op = tuple[OpKey, Any]
LINEAR = LinearTile("matrix", 32, 32, 1, 2, 1, 64, "linear"), LinearTile("rows", 4, 32, 1, 8, 4, 0, "linear")
STORE = LinearTile("matrix", 8, 16, 1, 1, 1, 0, "linear"), LinearTile("rows", 1, 4, 1, 1, 4, 0, "linear")
OPS: dict[str, Op] = {
    "norm": (NormKey(False, 64, 70, 1e-5, "float16"), NormTile(1, 1)),
    "add_norm": (NormKey(True, 64, 70, 1e-5, "bfloat16"), NormTile(2, 4)),
    "linear rows": (LinearKey("store", 64, 33, 70, "bfloat16"), STORE[1]),
    "linear matrix": (LinearKey("store", 64, 33, 70, "bfloat16"), STORE[0]),
    "swiglu rows": (LinearKey("swiglu", 64, 33, 70, "bfloat16"), LINEAR[1]),
    "swiglu matrix": (LinearKey("swiglu", 64, 33, 70, "bfloat16"), LINEAR[0]),
    "rope": (RopeKey(64, 4, 2, 64, "bfloat16"), RopeTile(4, 2)),
    "attention rows": (AttentionKey(1, 256, 4, 2, 64, "bfloat16"), AttentionTile("rows", 1, 64, 8)),
    "attention matrix": (AttentionKey(64, 256, 4, 2, 64, "bfloat16"), AttentionTile("matrix", 32, 32, 4)),
}


def inputs_for(key: OpKey) -> list[mx.array]:
    if isinstance(key, AttentionKey):
        return arrays(key, 1 if key.rows == 1 else 19, 45, batch=2)
    if isinstance(key, RopeKey):
        widths = [heads * key.dimension for heads in (key.query_heads, key.key_value_heads, key.key_value_heads)]
        return [*(random(n, (2, 9, width), key.dtype) for n, width in enumerate(widths)), table_of(20, key.dimension)]
    return key.example(9, 0)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("op", OPS)
def test_layouts_equal_plain_mlx(op: str, view: str) -> None:
    key, tile = OPS[op]
    kernel, plain = FAST.compile(key.source(tile)), inputs_for(key)
    count = 3 if isinstance(key, RopeKey) and view.startswith("stride 0") else len(plain)  # a table has its values
    for place in (None, *range(count)):  # all inputs, and each alone
        inputs = [
            VIEWS[view](array) if number < count and place in (None, number) else array
            for number, array in enumerate(plain)
        ]
        outputs = key.launch(kernel, tile, inputs, poison=True)
        copies = [mx.contiguous(array) for array in inputs]
        # Plain MLX rounds between the steps, the scores of attention too: it is asked in float32.
        exact = key.reference([array.astype(mx.float32) for array in copies])
        for y, same, expected in zip(outputs, key.launch(kernel, tile, copies, poison=True), exact, strict=True):
            assert mx.array_equal(y, same)
            assert y.dtype == inputs[0].dtype
            assert_near(y, numpy_of(expected), times=2 if isinstance(key, NormKey) else 1.1)


# ---- 3: grid units ----


@pytest.mark.parametrize(
    ("count", "simdgroups"), [(257, 8), (24 * 64, 8), (1, 8), (256, 8), (255, 8), (33, 1), (1023, 32)]
)
def test_each_element_is_written_once(count: int, simdgroups: int) -> None:
    source = source_of("ones", ELEMENT + "y.data[i] = x.data[0];", simdgroups=simdgroups)
    y = run(source, [mx.ones(8)], CHECKED, size=count, poison=False)
    assert CHECKED.last is not None
    assert CHECKED.last.counters.threads == -(-count // (32 * simdgroups)) * 32 * simdgroups
    assert (CHECKED.last.counters.traffic or {})["y_data"].written == y.nbytes
    assert (y == 1).all()


def test_operations_of_256_threads_write_257_columns_once() -> None:
    norm = NormKey(True, 64, 257, 1e-5, "float16")
    for rows in (1, 24, 64):  # a check on a checked target counts the bytes written
        check(norm, NormTile(4, 8), norm.example(rows, rows), CHECKED)
    linear = LinearKey("store", 8, 257, 24, "bfloat16")
    for rows in (1, 24, 64):
        check(linear, STORE[0], linear.example(rows, rows), CHECKED)


# ---- 5: barriers ----

THREADS = 256
REDUCE = """threadgroup float* shared = group.memory<float>(0);
  const int t = group.thread_index;
  const float value = x.data[t];
  const float highest = simd_max(value);
  if (group.lane == 0) shared[group.simdgroup] = highest;
  settle();
  const float most = simd_max(shared[group.lane % group_simdgroups]);
  /* between */
  const float part = simd_sum(exp(value - most));
  if (group.lane == 0) shared[group.simdgroup] = part;
  settle();
  y.data[t] = exp(value - most) / simd_sum(group.lane < group_simdgroups ? shared[group.lane] : 0.0f);"""


def softmax(between: str) -> KernelSource:
    return source_of("softmax", REDUCE.replace("/* between */", between), scratch="4 * 8", simdgroups=8)


def test_a_buffer_used_again_without_a_barrier_is_a_race() -> None:
    x = random(0, (THREADS,), "float32")
    for between in ("", "simdgroup_barrier(mem_flags::mem_threadgroup);", "threadgroup_barrier(mem_flags::mem_none);"):
        with pytest.raises(FindingsError) as caught:
            run(softmax(between), [x], CHECKED, size=THREADS)
        assert {finding.kind for finding in caught.value.findings} == {"race"}
        assert all(finding.line and finding.file.endswith("source") for finding in caught.value.findings)
    y = run(softmax("settle();"), [x], CHECKED, size=THREADS)
    assert mx.allclose(y, mx.softmax(x), atol=1e-6)


def test_threads_that_leave_before_a_barrier_diverge() -> None:
    body = """threadgroup float* shared = group.memory<float>(0);
  const int t = group.thread_index;
  {leave}
  shared[t] = x.data[t];
  settle();
  y.data[t] = shared[{mirror} - t];"""
    x = mx.arange(THREADS, dtype=mx.float32)
    leaving = source_of(
        "leave", body.format(leave="if (t >= 128) return;", mirror=127), scratch="1024", simdgroups=THREADS // 32
    )
    with pytest.raises(FindingsError) as caught:
        run(leaving, [x], CHECKED, size=THREADS)
    assert "barrier divergence" in {finding.kind for finding in caught.value.findings}
    staying = source_of("stay", body.format(leave="", mirror=255), scratch="1024", simdgroups=THREADS // 32)
    assert mx.array_equal(run(staying, [x], CHECKED, size=THREADS, poison=False), x[::-1])


STAGED = LinearTile("matrix", 8, 32, 1, 2, 2, 16, "linear")


def norm_launch(target: WatchedTarget) -> None:
    key = NormKey(True, 64, 300, 1e-5, "float16")
    check(key, NormTile(4, 8), key.example(9, 0), target)


def linear_launch(target: WatchedTarget) -> None:
    key = LinearKey("store", 64, 33, 41, "float16")
    check(key, STAGED, key.example(9, 0), target)


def attention_launch(target: WatchedTarget) -> None:
    key = AttentionKey(1, 256, 6, 2, 96, "float16")
    check_attend(key, AttentionTile("rows", 1, 32, 8), arrays(key, 1, 100), target)


BARRIERS: list[tuple[str, int, Callable[[WatchedTarget], None]]] = [
    ("team.h", 0, norm_launch),
    ("team.h", 1, norm_launch),
    ("stage.h", 0, linear_launch),
    ("stage.h", 1, linear_launch),
    ("query_rows.h", 0, attention_launch),
    ("query_rows.h", 1, attention_launch),
]


@pytest.mark.parametrize(("file", "number", "launch"), BARRIERS, ids=[f"{file}-{n}" for file, n, _ in BARRIERS])
def test_every_barrier_of_the_vocabulary_is_missed(
    file: str, number: int, launch: Callable[[WatchedTarget], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without any one of its barriers an operation has a race, and with all of them none."""
    whole, text = (
        metal_text.written_out("tile/metal.h"),
        (data_root("kernels") / "tile/metal" / file).read_text(),
    )
    barriers = [found.start() for found in re.finditer(r"\bsettle\(\);", text)]
    assert len(barriers) == sum(other == file for other, *_ in BARRIERS)
    start = barriers[number]
    before, after = text[start - 40 : start], text[start + len("settle();") : start + 60]
    assert whole.count(before + "settle();" + after) == 1
    launch(CHECKED)
    broken = whole.replace(before + "settle();" + after, before + ";" + after)
    original = metal_text.written_out
    monkeypatch.setattr(metal_text, "written_out", lambda name: broken if name == "tile/metal.h" else original(name))
    with pytest.raises(FindingsError, match=r"race") as caught:
        launch(WatchedTarget(check=True))
    assert all(finding.file.endswith("header") and finding.line for finding in caught.value.findings)


def test_every_barrier_of_the_vocabulary_is_listed() -> None:
    folder = data_root("kernels") / "tile" / "metal"
    count = sum(len(re.findall(r"\bsettle\(\);", path.read_text())) for path in folder.glob("*.h"))
    assert count == len(BARRIERS)
