"""The Metal target: kernels are found compiled, their forms are made once, and launches say all that a kernel needs."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import pytest
from kernel_checks import check_identities, random
from metal_checks import FAST, WatchedTarget, check

from metile.errors import MetileError
from metile.ops.attention import AttentionKey
from metile.ops.base import DTYPES, OpKey
from metile.ops.linear import LinearKey
from metile.ops.linear_tile import LinearTile
from metile.ops.norm import NormKey, NormTile
from metile.ops.rope import RopeKey, RopeTile
from metile.simulator.devices import DEVICES, custom
from metile.targets import metal as module
from metile.targets.base import KernelSource, Limits, Output
from metile.targets.metal import MetalKernel, MetalTarget, limits_of, this_device

SOURCE = KernelSource("k", "norm.metal", "…", ("x", "w"), ("y",), ("count", "depth"), "0", ("x",), ("depth",), 2)
OUTPUT = Output((3, 4), mx.float32)


class Recorder:
    """Stands in for `mx.fast.metal_kernel`: keeps texts and launches, runs nothing."""

    def __init__(self) -> None:
        self.texts: list[dict[str, Any]] = []
        self.launches: list[dict[str, Any]] = []

    def __call__(self, **text: Any) -> Any:
        self.texts.append(text)

        def call(**launch: Any) -> list[mx.array]:
            self.launches.append(launch)
            pairs = zip(launch["output_shapes"], launch["output_dtypes"], strict=True)
            return [mx.zeros(shape, dtype) for shape, dtype in pairs]

        return call

    def sizes(self) -> list[list[int]]:
        """Return the first input of each launch."""
        return [launch["inputs"][0].tolist() for launch in self.launches]


def recorded(source: KernelSource = SOURCE) -> tuple[MetalKernel, Recorder]:
    recorder = Recorder()
    return MetalKernel(source, recorder, 32), recorder


# ---- what a kernel is called ----


def test_forms_are_told_apart_by_name_and_made_once() -> None:
    kernel, recorder = recorded()
    x, w, tiny = mx.zeros((3, 4)), mx.zeros(9), mx.zeros((1, 3))
    for numbers, first in (((1, 16), x), ((2, 16), x), ((1, 32), x), ((1, 16), tiny), ((1, 32), x), ((9, 16), tiny)):
        kernel([first, w], [OUTPUT], groups=1, numbers=numbers)
    names = [text["name"] for text in recorder.texts]
    assert len(names) == len(set(names)) == 3  # depth 16, depth 32, and depth 16 with an x too small to be a view
    assert all(name.isidentifier() for name in names)
    base = names[2].removesuffix("_16")
    assert names == [f"{base}_16_x", f"{base}_32_x", f"{base}_16"]
    assert base.startswith("k_")
    bodies = {text["source"] for text in recorder.texts}
    assert len(bodies) == 3
    assert [text["ensure_row_contiguous"] for text in recorder.texts] == [False] * 3
    plain, other = recorded(KernelSource("k", "norm.metal", "", ("x",), ("y",)))
    plain([x], [OUTPUT], groups=1)
    assert other.texts[0]["ensure_row_contiguous"] is True


def test_a_kernel_is_found_by_its_content() -> None:
    target = MetalTarget(DEVICES["m1"], Recorder())
    key, tile = NormKey(False, 4, 577, 1e-5, "float32"), NormTile(1, 4)
    assert target.compile(key.source(tile)) is target.compile(key.source(tile))
    assert target.compile(key.source(tile)) is not target.compile(key.source(NormTile(2, 4)))
    again = MetalTarget(DEVICES["m1"], Recorder())
    assert again.compile(key.source(tile)) is not target.compile(key.source(tile))


def test_labels_and_names_of_all_spaces() -> None:
    keys: list[OpKey] = [NormKey(add, 512, 8192, 1e-5, dtype) for add in (False, True) for dtype in DTYPES]
    keys += [RopeKey(512, 4, 2, dimension, dtype) for dimension in (64, 256) for dtype in DTYPES]
    keys += [
        AttentionKey(rows, 256, *heads, dimension, dtype)
        for rows in (1, 512)
        for heads in ((4, 4), (4, 1))
        for dimension in (64, 80, 256)
        for dtype in DTYPES
    ]
    check_identities(keys, FAST)  # type: ignore[arg-type]
    for epilogue in ("store", "swiglu"):
        check_identities([LinearKey(epilogue, 4, 577, 1100, "bfloat16")], FAST)  # type: ignore[arg-type]


# ---- launches ----


def test_a_launch_is_in_threads() -> None:
    kernel, recorder = recorded()
    kernel([mx.zeros((3, 4)), mx.zeros(9)], [OUTPUT], groups=5, numbers=(7, 16))
    kernel([mx.zeros((3, 4)), mx.zeros(9)], [OUTPUT], groups=5, numbers=(7, 16), poison=True)
    first, second = recorder.launches
    assert (first["grid"], first["threadgroup"]) == ((5 * 64, 1, 1), (64, 1, 1))
    assert (first["output_shapes"], first["output_dtypes"]) == ([(3, 4)], [mx.float32])
    assert "init_value" not in first
    assert math.isnan(second["init_value"])
    assert recorder.sizes()[0] == [5, 7, 16, 2, 3, 4, 0, 0, 1, 9, 0, 0, 0, 2, 3, 4, 0, 0]
    assert first["inputs"][0].dtype == mx.int32


def test_nothing_is_launched_over_no_threadgroups() -> None:
    kernel, recorder = recorded()
    for poison in (False, True):
        (y,) = kernel([mx.zeros((0, 4)), mx.zeros(9)], [Output((0, 4), mx.bfloat16)], groups=0, poison=poison)
        assert (y.shape, y.dtype) == ((0, 4), mx.bfloat16)
    assert recorder.texts == recorder.launches == []


def test_sizes_are_made_once_and_few_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_SIZES", 4)
    kernel, recorder = recorded()
    w = mx.zeros(9)

    def sizes(rows: int, groups: int = 1, number: int = 0) -> mx.array:
        kernel([mx.zeros((rows, 4)), w], [OUTPUT], groups=groups, numbers=(number, 16))
        return recorder.launches[-1]["inputs"][0]

    first = sizes(3)
    assert sizes(3) is first
    assert sizes(3, groups=2) is not first
    assert sizes(3, number=1) is not first
    assert sizes(3) is first
    for rows in range(4, 14):  # as a cache that grows by a token
        assert sizes(rows)[4] == rows
        assert len(kernel._sizes) <= 4
    assert sizes(3) is not first
    assert sizes(3).tolist() == first.tolist()


def test_arrays_are_fitted_to_their_form() -> None:
    kernel, recorder = recorded()
    x, w = mx.arange(24.0).reshape(4, 6).T, mx.arange(40.0).reshape(4, 10)[:, ::2]
    kernel([x, w], [OUTPUT], groups=1, numbers=(0, 16))
    _, view, contiguous = recorder.launches[-1]["inputs"]
    assert view is x  # its strides are read
    assert mx.array_equal(contiguous, w)
    kernel([mx.array([[1.0], [2.0]]).T, mx.array(3.0)], [OUTPUT], groups=1, numbers=(0, 16))
    _, small, scalar = recorder.launches[-1]["inputs"]
    assert small.tolist() == [1, 2, 0, 0, 0, 0, 0, 0]
    assert scalar.tolist() == [3, 0, 0, 0, 0, 0, 0, 0]
    assert recorder.sizes()[-1][3:13] == [2, 1, 2, 0, 0, 0, 0, 0, 0, 0]  # the shapes are those of the caller's arrays
    many = mx.zeros((2, 1, 3, 1, 2, 4))
    kernel([x, many], [OUTPUT], groups=1, numbers=(0, 16))
    assert recorder.sizes()[-1][8:13] == [4, 6, 1, 2, 4]


def test_a_view_of_too_many_axes_is_refused() -> None:
    kernel, _ = recorded()
    with pytest.raises(MetileError, match=r"^\[k\] expected x of at most 4 axes but got shape \(1, 2, 1, 3, 4\)$"):
        kernel([mx.zeros((1, 2, 1, 3, 4)), mx.zeros(9)], [OUTPUT], groups=1, numbers=(0, 16))


@pytest.mark.parametrize("numbers", [(), (1,), (1, 2, 3)])
def test_other_numbers_are_refused(numbers: tuple[int, ...]) -> None:
    kernel, recorder = recorded()
    message = r"^\[k\] expected numbers \('count', 'depth'\) and inputs \('x', 'w'\) but got \("
    with pytest.raises(MetileError, match=message):
        kernel([mx.zeros((3, 4)), mx.zeros(9)], [OUTPUT], groups=1, numbers=numbers)
    with pytest.raises(MetileError, match=message):
        kernel.bind([OUTPUT], groups=1, numbers=numbers)([mx.zeros((3, 4)), mx.zeros(9)])
    assert recorder.launches == []


@pytest.mark.parametrize("count", [0, 1, 3])
def test_another_number_of_inputs_is_refused(count: int) -> None:
    kernel, _ = recorded()
    inputs = [mx.zeros((3, 4)), mx.zeros(9), mx.zeros(9)][:count]
    with pytest.raises(MetileError, match=rf"^\[k\] expected numbers .* but got \(1, 16\) and {count} arrays$"):
        kernel(inputs, [OUTPUT], groups=1, numbers=(1, 16))


def test_a_bound_launch_equals_a_call() -> None:
    key, tile = RopeKey(64, 4, 2, 64, "bfloat16"), RopeTile(4, 2)
    kernel = FAST.compile(key.source(tile))
    inputs = key.example(9, 0)
    q, k, v = key.launch(kernel, tile, inputs)
    outputs = [Output(array.shape, array.dtype) for array in (q, k, v)]
    bound = kernel.bind(outputs, groups=3, numbers=(3, 4, 2))
    for given in (inputs, [array[:, ::-1] if array.ndim == 3 else array for array in inputs]):
        expected = kernel(given, outputs, groups=3, numbers=(3, 4, 2))
        assert all(mx.array_equal(ours, theirs) for ours, theirs in zip(bound(given), expected, strict=True))
    assert all(mx.array_equal(ours, theirs) for ours, theirs in zip(bound(inputs), (q, k, v), strict=True))


def test_forms_run_as_they_are_named() -> None:
    """Depths of a slice and small arrays make other texts of one kernel; all of them compute the same."""
    target, tile = WatchedTarget(), LinearTile("matrix", 8, 16, 1, 1, 1, 16, "linear")
    key = LinearKey("store", 8, 17, 40, "float32")
    other = LinearTile(**{**vars(tile), "outer_k": 32})
    check(key, tile, key.example(9, 0), target)
    check(key, other, key.example(9, 0), target)
    assert target.compile(key.source(tile)) is target.compile(key.source(other))
    assert [text["name"].rpartition("_")[2] for text in target.made] == ["16", "32"]
    y = random(1, (2, 3), "float32")  # fewer than eight elements on both sides
    check(LinearKey("store", 8, 1, 3, "float32"), tile, [y, y[:1]], target)
    assert len(target.made) == 2  # contiguous inputs are padded, not told apart


# ---- the device ----


def test_limits_of_devices() -> None:
    assert limits_of(DEVICES["m1"]) == Limits(lanes=32, registers=128, threadgroup_bytes=32 << 10, threads=1024)
    assert limits_of(DEVICES["m3"].with_pipeline_threads(896)).threads == 896
    small = custom("c", threadgroup_bytes=16 << 10, max_threads_per_threadgroup=512)
    assert limits_of(small) == Limits(lanes=32, registers=128, threadgroup_bytes=16 << 10, threads=512)
    assert all(limits_of(device).is_gpu for device in DEVICES.values())


@pytest.mark.parametrize(
    ("given", "name"), [("Apple M2 Max", "m2-max"), ("Apple M99 Ultra", "Apple M99 Ultra"), (None, "Apple GPU")]
)
def test_the_device_of_this_machine(given: str | None, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "device_info", lambda _: {"device_name": given} if given else {})
    device = this_device()
    assert device.name == name
    assert limits_of(device) == limits_of(DEVICES["m1"])  # what is unknown has the limits of the strictest
    target = MetalTarget(make=Recorder())
    assert (target.name, target.timed, target.chip()) == ("metal", True, name)
    assert target.prepare([mx.zeros(3)]) == 0
    target.expect([mx.zeros(3)])
