"""The CUDA vocabulary without a GPU: the same text compiled by NVRTC, and run on a CPU by ``cuda_emulation.h``.

What this shows is that index arithmetic, layouts of fragments, rings and joins are right, as far as the emulation
follows the PTX manual. It shows nothing of speed, and of races only what two orders of threads and two moments for
copies to land bring to light.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from metile.ops.attention import AttentionKey
from metile.ops.attention_space import AttentionTile
from metile.ops.base import DTYPES
from metile.ops.linear import LinearKey
from metile.ops.linear_tile import LinearTile
from metile.ops.norm import NormKey, NormTile
from metile.ops.projections import ProjectionsKey
from metile.ops.rope import RopeKey, RopeTile
from metile.targets.base import KERNEL_TYPES, KernelSource, Output
from metile.targets.compiler import compile_library
from metile.targets.metal_text import sizes_of, written_out

TOLERANCE = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 2e-2}  # of the largest value
SCRATCH = 1 << 18
KINDS = {"table": "float", "partials": "float", "counters": "uint", "count": "int"}


@dataclass(frozen=True)
class Text:
    """A kernel's text in parts: definitions, parameters after the arrays, and statements."""

    head: str
    pointers: tuple[str, ...]
    count: int
    body: str


def kernel_text(source: KernelSource, t: str, numbers: Sequence[int], *, stages: int = 3, words: str = "") -> Text:
    """Return the text of a kernel for these numbers; `t` is the dtype of its arrays, but for those in `KINDS`."""
    names = (*source.inputs, *source.outputs)
    kinds = [f"const {KINDS.get(name, t)}" for name in source.inputs]
    kinds += [KINDS.get(name, t) for name in source.outputs]
    known = dict(zip(source.numbers, numbers, strict=True))
    fixed = {name: known[name] if name in source.fixed else 0 for name in source.numbers}
    head = f"""#define METILE_SIMDGROUPS {source.simdgroups}
#define METILE_STAGES {stages}
{words}
{written_out("tile/cuda.h")}
{written_out(source.program)}
inline constexpr Index metile_scratch() {{
  {" ".join(f"constexpr Index {name} = {value}; (void){name};" for name, value in fixed.items())}
  return {source.scratch};
}}
"""
    lines = [
        f"constexpr Index {name} = {known[name]};" if name in source.fixed else f"const Index {name} = sizes[{1 + i}];"
        for i, name in enumerate(source.numbers)
    ]
    lines += [f"(void){name};" for name in source.numbers]
    first = 1 + len(source.numbers)
    lines += [
        f"const auto {name} = contiguous_array({name}_data, sizes + {first + 5 * i});" for i, name in enumerate(names)
    ]
    pointers = tuple(f"{kind}* {name}_data" for kind, name in zip(kinds, names, strict=True))
    return Text(head, pointers, first + 5 * len(names), "\n  ".join([*lines, source.body]))


def nvrtc_text(text: Text, simdgroups: int) -> str:
    """Return the text as NVRTC takes it: sizes come one by one."""
    sizes = [f"sizes{i}" for i in range(text.count)]
    return f"""{text.head}
extern "C" __global__ void __launch_bounds__({32 * simdgroups}) metile_kernel(
    {", ".join([*text.pointers, *(f"int {size}" for size in sizes)])}) {{
  const int sizes[] = {{{", ".join(sizes)}}};
  extern __shared__ __attribute__((aligned(1024))) char memory[];
  static_assert(metile_scratch() >= 0, "known when compiled");
  const Group group = {{Index(blockIdx.x), int(threadIdx.x), int(threadIdx.x / 32), int(threadIdx.x % 32),
                       memory}};
  {text.body}
}}
"""


def emulated_text(text: Text) -> str:
    """Return the text as the emulation takes it: one function that launches."""
    header = (Path(__file__).parent / "cuda_emulation.h").read_text().replace("#pragma once", "")
    arrays = "\n  ".join(f"{p} = ({p.rsplit(' ', 1)[0]})now.arrays[{i}];" for i, p in enumerate(text.pointers))
    return f"""{header}
{text.head}
static struct {{ void* const* arrays; const int* sizes; int index; char* scratch; }} now;
static void metile_body(int own) {{
  const int* sizes = now.sizes;
  {arrays}
  const Group group = {{now.index, own, own / 32, own % 32, now.scratch}};
  {text.body}
}}
extern "C" long long launch(void* const* arrays, const long long* bytes, int count, const int* sizes, int backwards,
                            int late, char* scratch) {{
  now.arrays = arrays, now.sizes = sizes, now.scratch = scratch;
  emulated_launch(metile_body, sizes[0], group_threads, backwards, late, arrays, bytes, count, &now.index, scratch,
                  {SCRATCH});
  return metile_scratch();
}}
"""


class Emulated:
    """A kernel that runs on the emulation, in the form that keys launch."""

    def __init__(self, source: KernelSource, dtype: str, *, order: int = 0, stages: int = 4) -> None:
        self.source, self._dtype, self._order, self._stages = source, dtype, order, stages
        self.after: list[np.ndarray[Any, Any]] = []  # the bytes of the inputs of the last launch

    def __call__(
        self,
        inputs: Sequence[mx.array],
        outputs: Sequence[Output],
        *,
        groups: int,
        numbers: Sequence[int] = (),
        poison: bool = False,
    ) -> list[mx.array]:
        """Run over `groups` threadgroups; outputs begin as NaN."""
        del poison
        text = kernel_text(self.source, KERNEL_TYPES[DTYPES[self._dtype]], numbers, stages=self._stages)
        library = ctypes.CDLL(str(compile_library(emulated_text(text), ("-O1",), "emulated")))
        results = [np.full(output.shape, np.nan, np.float32) for output in outputs]
        arrays = [to_bits(array) for array in inputs]
        arrays += [to_bits(mx.array(r, output.dtype)) for r, output in zip(results, outputs, strict=True)]
        sizes = sizes_of(groups, numbers, [a.shape for a in inputs] + [r.shape for r in results])
        return_ = run(library, arrays, sizes, self._order)
        assert return_ <= SCRATCH
        self.after = arrays[: len(inputs)]
        names = zip(arrays[len(inputs) :], outputs, strict=True)
        return [from_bits(bits, output.shape, output.dtype) for bits, output in names]


def run(library: ctypes.CDLL, arrays: Sequence[np.ndarray[Any, Any]], sizes: Sequence[int], order: int) -> int:
    """Launch, and return the bytes of threadgroup memory that the kernel asks for."""
    pointers = (ctypes.c_void_p * len(arrays))(*[array.ctypes.data for array in arrays])
    nbytes = (ctypes.c_longlong * len(arrays))(*[array.nbytes for array in arrays])
    memory = aligned(SCRATCH)
    library.launch.restype = ctypes.c_longlong
    return int(
        library.launch(
            pointers,
            nbytes,
            len(arrays),
            (ctypes.c_int * len(sizes))(*sizes),
            order & 1,
            order >> 1 & 1,
            ctypes.c_void_p(memory.ctypes.data),
        )
    )


def aligned(size: int) -> np.ndarray[Any, Any]:
    """Return bytes that begin at a multiple of 1024, as a GPU's allocations and its shared memory do."""
    whole = np.zeros(size + 1024, np.uint8)
    start = -whole.ctypes.data % 1024
    return whole[start : start + size]


def to_bits(array: mx.array) -> np.ndarray[Any, Any]:
    """Return an array's bytes, aligned."""
    raw = np.array(mx.contiguous(array).reshape(-1).view(mx.uint8))
    copy = aligned(raw.size)
    copy[:] = raw
    return copy


def from_bits(raw: np.ndarray[Any, Any], shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
    """Return bytes as an array again."""
    return mx.array(raw).view(dtype).reshape(shape)


def check(key: Any, kernel: Emulated, candidate: Any, inputs: list[mx.array], tolerance: float) -> None:
    """Compare a launch with the reference in float32."""
    results = key.launch(kernel, candidate, inputs)
    expected = key.reference([array.astype(mx.float32) for array in inputs])
    for y, wanted in zip(results, expected, strict=True):
        bound = tolerance * float(mx.abs(wanted).max())
        error = mx.abs(y.astype(mx.float32) - wanted).max().item()
        assert error <= bound, f"{error} > {bound}"  # NaN, where nothing was written, fails too


def tile(program: Any, *fields: int) -> LinearTile:
    """Return a tile: rows, columns, wm, wn, unroll, depth of a slice."""
    m, n, wm, wn, unroll, depth = fields
    return LinearTile(program, m, n, wm, wn, unroll, depth, "linear")


LINEAR = [
    tile("rows", 1, 8, 1, 2, 2, 0),
    tile("rows", 3, 8, 1, 4, 1, 0),
    tile("rows", 7, 4, 1, 2, 1, 0),
    tile("matrix", 8, 16, 1, 1, 1, 0),
    tile("matrix", 16, 32, 2, 2, 2, 0),
    tile("matrix", 8, 32, 4, 2, 1, 0),  # four warps share k
    tile("matrix", 16, 16, 4, 1, 2, 0),
    tile("matrix", 24, 32, 1, 2, 1, 32),
    tile("matrix", 32, 64, 2, 2, 1, 64),
    tile("matrix", 8, 32, 4, 1, 1, 64),
    tile("matrix", 16, 32, 1, 2, 1, 16),
    tile("matrix", 16, 64, 1, 4, 4, 64),  # warpgroups
    tile("matrix", 16, 128, 2, 8, 4, 64),
]
SHAPES = [(19, 72, 200), (8, 33, 95), (1, 64, 64)]  # rows, outputs, inputs; the second moves no 16 bytes at once


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("candidate", LINEAR, ids=LinearTile.label)
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_linear(dtype: str, candidate: LinearTile, shape: tuple[int, int, int]) -> None:
    rows, outputs, inputs = shape
    epilogue = ("store", "swiglu", "residual")[(rows + candidate.block_m) % 3]
    key = LinearKey(epilogue, rows, outputs, inputs, dtype)  # type: ignore[arg-type]
    order = (rows + candidate.block_n // 8) % 4
    kernel = Emulated(key.source(candidate), dtype, order=order)
    check(key, kernel, candidate, key.example(rows, seed=rows), TOLERANCE[dtype])


@pytest.mark.parametrize("order", range(4))
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_a_ring_holds_in_any_order_of_threads(order: int, stages: int) -> None:
    candidate = tile("matrix", 16, 32, 1, 2, 1, 16)
    key = LinearKey("store", 17, 40, 168, "bfloat16")
    kernel = Emulated(key.source(candidate), "bfloat16", order=order, stages=stages)
    check(key, kernel, candidate, key.example(17, seed=1), TOLERANCE["bfloat16"])


@pytest.mark.parametrize(("heads", "dimension"), [((6, 1), 128), ((4, 2), 64), ((3, 1), 80), ((2, 1), 256)], ids=str)
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_attention_of_one_query(dtype: str, heads: tuple[int, int], dimension: int) -> None:
    candidate = AttentionTile("rows", 1, 16, 2)
    for tokens in (1, 37):
        key = AttentionKey(1, tokens, *heads, dimension, dtype)
        kernel = Emulated(key.source(candidate), dtype, order=tokens % 4)
        check(key, kernel, candidate, key.example(1, seed=tokens), TOLERANCE[dtype])


@pytest.mark.parametrize(("dimension", "order"), [(64, 1), (80, 2)])
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_attention_of_a_block(dtype: str, dimension: int, order: int) -> None:
    candidate = AttentionTile("matrix", 16, 32, 2)
    key = AttentionKey(21, 50, 2, 1, dimension, dtype)
    kernel = Emulated(key.source(candidate), dtype, order=order)
    check(key, kernel, candidate, key.example(21, seed=2), TOLERANCE[dtype])


@pytest.mark.parametrize("hidden", [96, 130])
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_norm(dtype: str, add: bool, hidden: int) -> None:
    candidate = NormTile(2, 2)
    key = NormKey(add, 3, hidden, 1e-5, dtype)
    check(key, Emulated(key.source(candidate), dtype), candidate, key.example(3, seed=3), TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_rope(dtype: str) -> None:
    candidate = RopeTile(4, 2)
    key = RopeKey(5, 3, 1, 80, dtype)
    check(key, Emulated(key.source(candidate), dtype), candidate, key.example(5, seed=4), TOLERANCE[dtype])


@functools.cache
def nvrtc() -> ctypes.CDLL | None:
    """Return the run-time compiler of the package nvidia-cuda-nvrtc, or None."""
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(root).glob("**/libnvrtc.so.*")):
            return ctypes.CDLL(str(path))
    return None


def compiled(text: str, *options: str) -> str:
    """Compile with NVRTC; return what ptxas says."""
    library, program, size = nvrtc(), ctypes.c_void_p(), ctypes.c_size_t()
    assert library is not None
    assert library.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"kernel.cu", 0, None, None) == 0
    given = [b"--std=c++17", b"--ptxas-options=-v", *(option.encode() for option in options)]
    status = library.nvrtcCompileProgram(program, len(given), (ctypes.c_char_p * len(given))(*given))
    library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    library.nvrtcGetProgramLog(program, log)
    library.nvrtcDestroyProgram(ctypes.byref(program))
    assert status == 0, log.value.decode()
    return log.value.decode()


COMPILED = [
    (LinearKey("swiglu", 1, 8960, 1536, "bfloat16"), tile("rows", 1, 32, 1, 8, 2, 0)),
    (LinearKey("store", 4, 8960, 1536, "float16"), tile("rows", 4, 32, 1, 8, 2, 0)),
    (LinearKey("swiglu", 8, 8960, 1536, "bfloat16"), tile("matrix", 8, 16, 4, 1, 2, 0)),
    (LinearKey("swiglu", 16, 8960, 1536, "bfloat16"), tile("matrix", 16, 32, 1, 2, 1, 64)),
    (LinearKey("swiglu", 2048, 8960, 1536, "bfloat16"), tile("matrix", 128, 64, 2, 2, 1, 32)),
    (LinearKey("bias", 2048, 8960, 1536, "float16"), tile("matrix", 128, 128, 2, 2, 1, 32)),
    (LinearKey("residual", 64, 1536, 8960, "float32"), tile("matrix", 32, 64, 2, 2, 1, 32)),
    (ProjectionsKey(1, (1536, 256, 256), 1536, True, "bfloat16"), tile("rows", 1, 16, 1, 8, 3, 0)),
    (ProjectionsKey(8, (1536, 256, 256), 1536, True, "float16"), tile("matrix", 8, 16, 4, 1, 2, 0)),
    (ProjectionsKey(512, (576, 192, 192), 576, False, "float32"), tile("matrix", 32, 64, 2, 2, 1, 32)),
    (AttentionKey(1, 1024, 12, 2, 128, "bfloat16"), AttentionTile("rows", 1, 64, 8)),
    (AttentionKey(1, 1024, 12, 2, 128, "bfloat16"), AttentionTile("rows", 1, 64, 8, 16)),
    (AttentionKey(128, 1024, 12, 2, 128, "bfloat16"), AttentionTile("matrix", 64, 32, 4)),
    (NormKey(True, 1, 1536, 1e-6, "bfloat16"), NormTile(1, 8)),
    (RopeKey(1, 12, 2, 128, "bfloat16"), RopeTile(1, 8)),
]


GROUPED = [  # what only compute capability 9.0 has
    (LinearKey("swiglu", 2048, 8960, 1536, "bfloat16"), tile("matrix", 128, 128, 1, 8, 4, 64), "sm_90a"),
    (LinearKey("store", 2048, 8960, 1536, "float16"), tile("matrix", 256, 128, 1, 8, 4, 64), "sm_90a"),
    (LinearKey("residual", 8, 1536, 8960, "bfloat16"), tile("matrix", 8, 64, 1, 4, 4, 64), "sm_90a"),
    (ProjectionsKey(512, (1536, 256, 256), 1536, True, "bfloat16"), tile("matrix", 128, 128, 1, 8, 4, 64), "sm_90a"),
]


def named(item: Any) -> str:
    """Return a parameter's name."""
    return item if isinstance(item, str) else getattr(item, "family", None) or str(item.label())


@pytest.mark.skipif(nvrtc() is None, reason="needs NVRTC: pip install nvidia-cuda-nvrtc")
@pytest.mark.parametrize(
    ("key", "candidate", "architecture"),
    [(*pair, architecture) for pair in COMPILED for architecture in ("sm_80", "sm_90a")] + GROUPED,
    ids=named,
)
def test_nvrtc_compiles(key: Any, candidate: Any, architecture: str) -> None:
    source = key.source(candidate)
    numbers = [candidate.outer_k if name == "outer_k" else 0 for name in source.numbers]
    text = nvrtc_text(kernel_text(source, KERNEL_TYPES[DTYPES[key.dtype]], numbers), source.simdgroups)
    log = compiled(text, f"--gpu-architecture={architecture}", "--device-as-default-execution-space")
    # Nothing is spilled, and no array is kept in memory: nothing indexes one by a number unknown to the compiler.
    assert set(re.findall(r"(\d+) bytes (?:stack frame|spill stores|spill loads)", log)) == {"0"}, log
    assert "serialized" not in log  # products of warpgroups that wait for one another


@pytest.mark.skipif(nvrtc() is None, reason="needs NVRTC: pip install nvidia-cuda-nvrtc")
@pytest.mark.parametrize(
    ("key", "candidate"), COMPILED[-5:], ids=lambda item: getattr(item, "family", None) or item.label()
)
def test_functions_say_that_they_run_on_the_gpu(key: Any, candidate: Any) -> None:
    """A kernel with views is compiled by MLX, which does not make functions the GPU's by default."""
    source = key.source(candidate)
    text = kernel_text(source, KERNEL_TYPES[DTYPES[key.dtype]], [0] * len(source.numbers), words="#define METILE_VIEWS")
    compiled(nvrtc_text(text, source.simdgroups), "--gpu-architecture=sm_90")
