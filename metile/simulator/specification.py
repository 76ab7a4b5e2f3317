"""What a command line, or a comment in a ``.metal`` file, says about a run.

The comment is ``// metile:`` and words of the form ``key=value``; several such lines add up::

    // metile: kernel=scale grid=1024,1,1 threadgroup=256,1,1
    // metile: buffer0=float32:1024:random buffer1=float32:1024:empty constant0=true
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from metile.errors import mismatch
from metile.simulator.file import Empty, find_dtype

OP = "simulator"
_COMMENT = re.compile(r"^\s*//\s*metile:(.*)$", re.M)
_WORD = re.compile(r"(?P<key>[a-z_]+?)(?P<index>\d*)=(?P<value>.+)")
_INDEXED = ("buffer", "constant", "threadgroup_memory")
_PLAIN = ("kernel", "grid", "threadgroup")


@dataclass
class Specification:
    """How a kernel of a file is to be run.

    Attributes:
        kernel: its name; empty where the file has only one.
        grid: threads of the grid.
        threadgroup: threads of a threadgroup.
        buffers: text of each buffer by index.
        constants: text of each function constant by index.
        threadgroup_memory: bytes of each threadgroup argument by index.
    """

    kernel: str = ""
    grid: str = ""
    threadgroup: str = ""
    buffers: dict[int, str] = field(default_factory=dict)
    constants: dict[int, str] = field(default_factory=dict)
    threadgroup_memory: dict[int, str] = field(default_factory=dict)

    def add(self, key: str, index: str, value: str) -> None:
        """Note one word; a later one takes an earlier one's place."""
        if key in _PLAIN and not index:
            setattr(self, key, value)
        elif key in _INDEXED and index:
            getattr(self, key if key == "threadgroup_memory" else f"{key}s")[int(index)] = value
        else:
            known = (*_PLAIN, *(f"{name}N" for name in _INDEXED))
            raise mismatch(OP, f"one of {', '.join(known)}", repr(f"{key}{index}={value}"))

    def add_pairs(self, key: str, pairs: Iterable[str]) -> None:
        """Note options of the form ``INDEX=value``."""
        for pair in pairs:
            index, equals, value = pair.partition("=")
            if not equals or not index.isdigit():
                raise mismatch(OP, f"--{key.replace('_', '-')} INDEX=VALUE", repr(pair))
            self.add(key, index, value)


def read_comments(text: str) -> Specification:
    """Return what the ``// metile:`` comments of a file say."""
    found = Specification()
    for comment in _COMMENT.findall(text):
        try:
            words = shlex.split(comment)
        except ValueError as error:
            raise mismatch(
                OP, "words of the form key=value after // metile:", f"{comment.strip()!r} ({error})"
            ) from None
        for word in words:
            match = _WORD.fullmatch(word)
            if match is None:
                raise mismatch(OP, "words of the form key=value after // metile:", repr(word))
            found.add(match["key"], match["index"], match["value"])
    return found


def read_sizes(name: str, text: str) -> tuple[int, int, int]:
    """Return ``X``, ``X,Y`` or ``X,Y,Z`` as three numbers.

    Raises:
        MetileError: it is not of that form.
    """
    if not text:
        raise mismatch(OP, f"--{name} X,Y,Z (or {name}=X,Y,Z in a // metile: comment)", "none")
    words = text.replace("x", ",").split(",")
    if len(words) > 3 or not all(word.strip().isdigit() for word in words):
        raise mismatch(OP, f"--{name} to be X,Y,Z", repr(text))
    x, y, z = [*map(int, words), 1, 1][:3]
    return x, y, z


def read_scalar(text: str) -> bool | int | float:
    """Return ``true``, ``false``, an integer or a float."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    raise mismatch(OP, "true, false or a number", repr(text))


def read_buffer(text: str, seed: int) -> Any:
    """Return the array that ``DTYPE:SHAPE:FILL`` describes, or that a ``.npy`` file holds.

    Args:
        text: FILL is ``arange``, ``zeros``, ``ones``, ``random``, ``empty`` or a number; SHAPE is as in ``32x64``.
        seed: of ``random``.
    """
    if text.endswith(".npy"):
        return _load(Path(text))
    form = "DTYPE:SHAPE:FILL, such as float32:32x64:random, or a .npy file"
    parts = text.split(":")
    if len(parts) != 3 or not re.fullmatch(r"\d+(x\d+)*", parts[1]):
        raise mismatch(OP, f"a buffer as {form}", repr(text))
    dtype, shape = find_dtype(parts[0]), tuple(map(int, parts[1].split("x")))
    return Empty(shape, dtype) if parts[2] == "empty" else _filled(parts[2], shape, dtype, seed)


def _load(path: Path) -> Any:
    try:
        array = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise mismatch(OP, "a .npy file that can be read", f"{path} ({error})") from None
    find_dtype(array.dtype)
    return array


def _filled(fill: str, shape: tuple[int, ...], dtype: mx.Dtype, seed: int) -> mx.array:
    count = math.prod(shape)
    if fill == "arange":
        values = mx.arange(count)
    elif fill == "random":
        generator = np.random.default_rng(seed)
        floating = mx.issubdtype(dtype, mx.inexact)
        numbers = generator.standard_normal(count) if floating else generator.integers(0, 100, count)
        values = mx.array(numbers.astype(np.float32 if floating else np.int32))
    elif fill in ("zeros", "ones"):
        values = mx.full((count,), int(fill == "ones"))
    else:
        values = mx.full((count,), read_scalar(fill))
    return values.astype(dtype).reshape(shape)
