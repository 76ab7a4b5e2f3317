"""The text of a kernel for Metal: includes written out once, numbers and arrays taken from ``sizes``."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from metile.errors import MetileError
from metile.files import data_root
from metile.ops.attention import AttentionKey
from metile.ops.base import OpKey
from metile.ops.linear import LinearKey
from metile.ops.norm import NormKey
from metile.ops.rope import RopeKey
from metile.simulator import custom
from metile.targets import gpu_text as module
from metile.targets.base import KernelSource
from metile.targets.metal import limits_of
from metile.targets.metal_text import LEAST_ELEMENTS, MAX_DIMS, fold, metal_text, sizes_of, written_out

KEYS: list[OpKey] = [
    LinearKey("residual", 8, 577, 1100, "bfloat16"),
    LinearKey("swiglu", 64, 577, 1100, "float16"),
    NormKey(True, 8, 577, 1e-5, "float32"),
    RopeKey(16, 4, 2, 64, "bfloat16"),
    AttentionKey(1, 256, 4, 2, 64, "float16"),
    AttentionKey(64, 256, 4, 2, 80, "float32"),
]
IDS = [f"{key.family}-{key.dtype}" for key in KEYS]  # type: ignore[attr-defined]
SOURCE = KernelSource("k", "norm.metal", "y.data[0] = count;", ("x", "w"), ("y",), ("count", "depth"), "4 * depth",
                      ("x",), ("depth",), 2)  # fmt: skip


def source_of(key: OpKey) -> KernelSource:
    return key.source(key.space(limits_of(custom("c")))[0])


@pytest.mark.parametrize("key", KEYS, ids=IDS)
def test_includes_are_written_out_once(key: OpKey) -> None:
    source = source_of(key)
    text = metal_text(source, (16,) * len(source.fixed), source.strided)
    whole = text.header + text.body
    assert '#include "' not in whole
    assert "#pragma once" not in whole
    assert re.findall(r"#include <(\w+)>", whole) == ["metal_stdlib", "metal_simdgroup_matrix"]
    root = data_root("kernels")
    files = [*(root / "tile" / "metal").glob("*.h"), root / "tile" / "schedule.h", root / source.program]
    assert len(files) == 11
    for file in files:
        assert whole.count(_definition(file)) == 1, file.name
    for other in root.glob("*.metal"):
        assert other.name == source.program or _definition(other) not in whole
    assert "cpu" not in whole


def _definition(file: Path) -> str:
    """Return the line with the first struct or function of a file that no other file has."""
    lines = file.read_text().splitlines()
    return next(line for line in lines if re.match(r"(struct \w+ \{|inline \w.*\(|enum \w+ \{)", line))


def test_a_file_included_twice_stands_there_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "first.h").write_text(
        '#pragma once\n  #include "inner/a.h"  // both\n#include "inner/b.h"\nint first;\n'
    )
    (tmp_path / "inner" / "a.h").write_text('#pragma once\n#include "b.h"\n#include <metal_stdlib>\nint a;\n')
    (tmp_path / "inner" / "b.h").write_text('#pragma once\n#include "../first.h"\nint b;\n')
    monkeypatch.setattr(module, "data_root", lambda _: tmp_path)
    written_out.cache_clear()
    try:
        lines = [line for line in written_out("first.h").splitlines() if line]
    finally:
        written_out.cache_clear()
    assert lines == ["int b;", "#include <metal_stdlib>", "int a;", "int first;"]


def test_fixed_numbers_are_constants_and_the_others_come_from_sizes() -> None:
    text = metal_text(SOURCE, (48,), ())
    assert "constexpr Index depth = 48;" in text.body
    assert "const Index count = sizes[1];" in text.body
    assert "constexpr Index count" not in text.body
    assert "sizes[2]" not in text.body
    scratch = text.header[text.header.index("constexpr Index metile_scratch()") :]
    assert "constexpr Index depth = 48;" in scratch
    assert "return 4 * depth;" in scratch
    assert text.header.startswith("#define METILE_SIMDGROUPS 2\n")
    assert text.inputs == ("sizes", "x_data", "w_data")
    assert text.outputs == ("y_data",)
    assert metal_text(SOURCE, (16,), ()) != text


def test_views_have_strides_and_the_others_are_contiguous() -> None:
    plain, view = metal_text(SOURCE, (48,), ()), metal_text(SOURCE, (48,), ("x",))
    assert "x = contiguous_array(x_data, sizes + 3);" in plain.body
    assert "x = strided_array(x_data, sizes + 3, x_data_strides);" in view.body
    for text in (plain, view):
        assert "w = contiguous_array(w_data, sizes + 8);" in text.body
        assert "y = contiguous_array(y_data, sizes + 13);" in text.body
    assert plain.header == view.header


@pytest.mark.parametrize("fixed", [(), (1, 2)])
def test_another_number_of_fixed_numbers_is_refused(fixed: tuple[int, ...]) -> None:
    with pytest.raises(MetileError, match=r"^\[k\] expected values of \('depth',\) but got \("):
        metal_text(SOURCE, fixed, ())


@pytest.mark.parametrize(
    ("shape", "folded"),
    [
        ((), ()),
        ((7,), (7,)),
        ((2, 3, 4, 5), (2, 3, 4, 5)),
        ((2, 3, 4, 5, 6), (6, 4, 5, 6)),
        ((2, 1, 3, 1, 2, 70), (6, 1, 2, 70)),
        ((0, 2, 3, 4, 5), (0, 3, 4, 5)),
    ],
)
def test_folded_shapes(shape: tuple[int, ...], folded: tuple[int, ...]) -> None:
    assert fold(shape) == folded
    assert len(folded) <= MAX_DIMS


def test_sizes() -> None:
    assert sizes_of(3, (5, 6), [(2, 7), ()]) == [3, 5, 6, 2, 2, 7, 0, 0, 0, 0, 0, 0, 0]
    assert sizes_of(3, (), []) == [3] + [0] * (LEAST_ELEMENTS - 1)  # MLX must not make it constant
    assert all(len(sizes_of(1, (), [(1,)] * count)) >= LEAST_ELEMENTS for count in range(4))
