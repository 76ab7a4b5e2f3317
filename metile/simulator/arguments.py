"""Arguments of a kernel call, refused where MLX refuses them and in its words where it has some."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import mlx.core as mx

from metile.errors import MetileError, mismatch, wrong_type
from metile.simulator.devices import Device
from metile.simulator.signature import Body, Template, type_name

OP = "metal_kernel"
_INT_RANGE = range(-(1 << 31), 1 << 31)


def _items(name: str, value: object) -> list[Any]:
    if not isinstance(value, Iterable) or isinstance(value, (str, bytes, mx.array)):
        raise wrong_type(OP, f"`{name}` to be a list", repr(value))
    return list(value)


def _integer(name: str, value: object) -> int:
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise wrong_type(OP, f"integers in `{name}`", repr(value)) from None
    if number not in _INT_RANGE:
        raise wrong_type(OP, f"32-bit integers in `{name}`", number)
    return number


def names(kind: str, value: object) -> tuple[str, ...]:
    """Return the names of inputs or outputs."""
    given = _items(kind, value)
    for name in given:
        if not isinstance(name, str):
            raise wrong_type(OP, f"strings in `{kind}`", repr(name))
    return tuple(given)


def arrays(value: object) -> list[mx.array]:
    """Return inputs as arrays; a Python scalar becomes one without axes."""
    given = _items("inputs", value)
    for item in given:
        if item is None:
            raise wrong_type(OP, "arrays or scalars in `inputs`", repr(item))
    return [item if isinstance(item, mx.array) else mx.array(item) for item in given]


def template(value: object) -> Template:
    """Return template arguments as pairs of a name and a bool, an int or a dtype."""
    given = []
    for item in [] if value is None else _items("template", value):
        if not isinstance(item, (tuple, list)) or len(item) != 2 or not isinstance(item[0], str):
            raise wrong_type(OP, "pairs of a name and a value in `template`", repr(item))
        name, argument = item
        if not isinstance(argument, (bool, int, mx.Dtype)):
            raise MetileError("[metal_kernel] Invalid template argument. Must be `mlx.core.Dtype`, `int` or `bool`.")
        if isinstance(argument, int) and not isinstance(argument, bool):
            argument = _integer("template", argument)
        given.append((name, argument))
    return tuple(given)


def shapes(value: object) -> list[tuple[int, ...]]:
    """Return the shapes of the outputs."""
    result = []
    for item in _items("output_shapes", value):
        shape = tuple(_integer("output_shapes", axis) for axis in _items("output_shapes", item))
        if any(axis < 0 for axis in shape):
            raise mismatch(OP, "shapes without negative axes in `output_shapes`", shape)
        result.append(shape)
    return result


def dtypes(value: object) -> list[mx.Dtype]:
    """Return the dtypes of the outputs."""
    given = _items("output_dtypes", value)
    for item in given:
        if not isinstance(item, mx.Dtype):
            raise wrong_type(OP, "dtypes in `output_dtypes`", repr(item))
        type_name(item)
    return given


def sizes(name: str, value: object) -> tuple[int, int, int]:
    """Return a grid's or a threadgroup's threads by axis."""
    given = _items(name, value)
    if len(given) != 3:
        raise wrong_type(OP, f"`{name}` to be three integers", repr(value))
    x, y, z = (_integer(name, axis) for axis in given)
    if min(x, y, z) < (1 if name == "threadgroup" else 0):
        raise mismatch(OP, f"`{name}` to be positive", (x, y, z))
    return x, y, z


def counts(
    body: Body, inputs: Sequence[mx.array], output_shapes: Sequence[object], output_dtypes: Sequence[object]
) -> None:
    """Refuse other numbers of arrays than the kernel has names."""
    for name, expected, got in (
        ("inputs", body.inputs, inputs),
        ("output_shapes", body.outputs, output_shapes),
        ("output_dtypes", body.outputs, output_dtypes),
    ):
        if len(expected) != len(got):
            raise MetileError(
                f"[metal_kernel] Expected `{name}` to have size {len(expected)} but got size {len(got)}.\n"
            )


def on_gpu(stream: object) -> None:
    """Refuse a stream that names the CPU, as MLX does; a `mx.Stream` has no other device here."""
    if mx.gpu != mx.cpu and isinstance(stream, (mx.Device, mx.DeviceType)) and stream == mx.cpu:
        raise MetileError("[metal_kernel] Only supports the GPU.")


def fits(threadgroup: tuple[int, int, int], device: Device) -> None:
    """Refuse a threadgroup of more threads than the device, or a pipeline on it, allows."""
    threads = threadgroup[0] * threadgroup[1] * threadgroup[2]
    if threads > device.max_threads:
        raise MetileError(
            f"Thread group size ({threads}) is greater than  the maximum allowed threads per threadgroup"
            f" ({device.max_threads})."
        )


def evaluate(inputs: Sequence[mx.array]) -> None:
    """Evaluate the inputs: a kernel runs here when it is called, not when its outputs are.

    Raises:
        MetileError: `mx.compile` or `mx.vmap` is tracing one of them, which therefore has no values.
    """
    try:
        mx.eval(*inputs)
    except ValueError as error:
        if "function transformations" not in str(error):
            raise
        expected = "arrays with values (kernels run at once here; mx.disable_compile() or install() helps)"
        raise mismatch(OP, expected, "one that mx.compile or mx.vmap is tracing") from error


def math_mode(compile_options: object) -> str:
    """Return the math mode of `compile_options`, ``safe`` by default."""
    if compile_options is None:
        return "safe"
    if not isinstance(compile_options, dict):
        raise MetileError("[metal_kernel] Expected `compile_options` to be a dict.")
    for key in compile_options:
        if key != "math_mode":
            raise MetileError(f"[metal_kernel] Unknown compile option `{key}`.")
    mode = str(compile_options.get("math_mode", "safe"))
    if mode not in ("safe", "relaxed", "fast"):
        raise MetileError("[metal_kernel] Expected math_mode to be 'safe', 'relaxed', or 'fast'.")
    return mode


def header_ends(header: str) -> None:
    """Refuse a header whose last line would swallow the signature, which MLX puts right behind it."""
    last = header.rpartition("\n")[2].strip()
    if last.startswith("#") or "//" in last:
        raise mismatch(
            OP, "a header that ends with a line break, for the signature follows on its last line", repr(last)
        )
