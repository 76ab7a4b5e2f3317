"""The generated text is the one that the installed MLX makes, which it prints while it exports a function."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from metile.errors import MetileError
from metile.simulator.signature import ATTRIBUTES, MAX_BUFFERS, TYPE_NAMES, Body, Passed, Template

DTYPES = list(TYPE_NAMES)
OURS = {"max_examples": 60, "deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture]}


def text_of_mlx(
    body: Body, inputs: list[mx.array], dtypes: list[mx.Dtype], template: Template, capfd: Any, folder: Path
) -> str:
    """Return the text of MLX, or an empty one where it makes none."""
    kernel = mx.fast.metal_kernel(
        name=body.name,
        input_names=list(body.inputs),
        output_names=list(body.outputs),
        source=body.source,
        header=body.header,
        atomic_outputs=body.atomic_outputs,
    )

    def function(*arrays: mx.array) -> Any:
        return kernel(
            inputs=list(arrays),
            template=list(template),
            grid=(1, 1, 1),
            threadgroup=(1, 1, 1),
            output_shapes=[(1,)] * len(dtypes),
            output_dtypes=dtypes,
            verbose=True,
        )

    capfd.readouterr()
    mx.export_function(str(folder / "function.mlxfn"), function, *inputs)
    printed: str = capfd.readouterr().out
    begin, end = f"Generated source code for `{body.name}`:\n```\n", "\n```\n"
    assert printed.startswith(begin)
    return printed[len(begin) : printed.index(end, len(begin))]


def ours(body: Body, inputs: list[mx.array], dtypes: list[mx.Dtype], template: Template = ()) -> str:
    return body.generate([Passed.of(array) for array in inputs], dtypes, template).shown


words = st.lists(
    st.sampled_from([*ATTRIBUTES, "a_shape", "a_strides", "b_ndim", "max_shape", "bb_shape", "dispatch_threads"]),
    min_size=1,
    max_size=5,
).map(" ".join)
arrays = st.tuples(st.sampled_from([(), (1,), (7,), (8,), (0,), (2, 3), (2, 4)]), st.sampled_from(DTYPES)).map(
    lambda kind: mx.zeros(*kind)
)
templates = st.lists(
    st.tuples(
        st.sampled_from(["T", "N", "B", "U"]), st.one_of(st.booleans(), st.integers(-9, 9), st.sampled_from(DTYPES))
    ),
    max_size=4,
    unique_by=lambda pair: pair[0],
).map(tuple)


@settings(**OURS)
@given(
    words,
    st.lists(arrays, min_size=1, max_size=3),
    st.lists(st.sampled_from(DTYPES), min_size=1, max_size=2),
    templates,
    st.booleans(),
    st.sampled_from(["", "// a header\n", "constant int one = 1;\n"]),
)
def test_text_is_that_of_mlx(
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    source: str,
    inputs: list[mx.array],
    dtypes: list[mx.Dtype],
    template: Template,
    atomic: bool,
    header: str,
) -> None:
    source += " thread_position_in_grid"  # without any attribute MLX's text is cut off where there are shapes
    body = Body("k", ("a", "b", "max")[: len(inputs)], ("y", "z")[: len(dtypes)], source, header, atomic)
    assert ours(body, inputs, dtypes, template) == text_of_mlx(body, inputs, dtypes, template, capfd, tmp_path)


@pytest.mark.parametrize("attribute", ATTRIBUTES)
def test_each_attribute_has_the_type_of_mlx(attribute: str, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    body, inputs = Body("k", ("x",), ("y",), f"  use({attribute});"), [mx.zeros(8)]
    text = ours(body, inputs, [mx.float32])
    assert f"{ATTRIBUTES[attribute]} {attribute} [[{attribute}]]" in text
    assert text == text_of_mlx(body, inputs, [mx.float32], (), capfd, tmp_path)


def test_names_tell_instances_apart() -> None:
    body = Body("k", ("x",), ("y",), "")
    kinds = [mx.zeros(7), mx.zeros(8), mx.array(0.0), mx.zeros(8, mx.float16), mx.zeros(7, mx.float16)]
    names = {body.generate([Passed.of(array)], [array.dtype], ()).name for array in kinds}
    assert len(names) == len(kinds)
    values: list[Template] = [(("T", mx.float16),), (("T", mx.float32),), (("T", 3),), (("T", 4),), (("T", -4),)]
    names = {body.generate([Passed.of(kinds[0])], [mx.float32], template).name for template in values}
    assert len(names) == len(values)


def test_shapes_are_left_out_of_arrays_without_axes() -> None:
    body = Body("k", ("x",), ("y",), "x_shape; x_strides; x_ndim;")
    assert len(body.generate([Passed.of(mx.array(1))], [mx.float32], ()).slots) == 2
    slots = body.generate([Passed.of(mx.zeros(3))], [mx.float32], ()).slots
    assert [slot.role for slot in slots] == ["data", "shape", "strides", "ndim", "output"]


def test_line_markers_name_the_strings_of_the_caller() -> None:
    body = Body("k", ("x",), ("y",), "\n  y[0] = x[0];", "#define ONE 1\n")
    lines = body.generate([Passed.of(mx.zeros(8))], [mx.float32], ()).text.splitlines()
    assert lines[lines.index("#define ONE 1") - 1] == '#line 1 "k.header"'
    assert lines[lines.index("  y[0] = x[0];") - 2] == '#line 1 "k.source"'


def test_more_buffers_than_metal_has() -> None:
    count = MAX_BUFFERS
    body = Body("k", tuple(f"x{i:02}" for i in range(count)), ("y",), "")
    with pytest.raises(MetileError, match="expected at most 31 buffers"):
        body.generate([Passed.of(mx.zeros(8))] * count, [mx.float32], ())
    fewer = Body("k", body.inputs[:-1], ("y",), "")
    assert len(fewer.generate([Passed.of(mx.zeros(8))] * (count - 1), [mx.float32], ()).slots) == count


@pytest.mark.parametrize("where", ["input", "output", "template"])
def test_a_dtype_that_metal_lacks(where: str) -> None:
    chosen = {name: mx.float64 if name == where else mx.float32 for name in ("input", "output", "template")}
    passed = [Passed(chosen["input"], False, False)]
    with pytest.raises(MetileError, match=r"a dtype that Metal has .* but got mlx\.core\.float64"):
        Body("k", ("x",), ("y",), "").generate(passed, [chosen["output"]], (("T", chosen["template"]),))
