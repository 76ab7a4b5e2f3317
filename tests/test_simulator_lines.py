"""Source lines of addresses, against functions that return the address they were called from."""

from __future__ import annotations

import ctypes
import random
import subprocess
from pathlib import Path

import pytest

from metile.simulator.lines import Place, find_place, find_places
from metile.simulator.runtime import image_range
from metile.targets.compiler import find_compiler

SOURCE = """extern "C" __attribute__((noinline)) void* site() { return __builtin_return_address(0); }
static void* volatile keep;
# 10 "inner.metal"
#define INLINE static inline __attribute__((always_inline))
INLINE void* inner(int& n) {
  void* p = site();
  n++;
  return p;
}
# 3 "prelude-0123456789abcdef.h"
INLINE void* wrapped(int& n) {
  return inner(n);
}
INLINE void* own(int& n) {
  void* p = site();
  n++;
  return p;
}
# 100 "kernel.metal"
extern "C" void* plain(int n) {
  void* p = site();
  keep = &n;
  return p;
}
extern "C" void* once(int n) {
  void* p = inner(n);
  keep = &n;
  return p;
}
extern "C" void* twice(int n) {
  void* p = n > 3 ? wrapped(n) : nullptr;
  keep = &n;
  return p;
}
extern "C" void* hidden(int n) {
  void* p = own(n);
  keep = &n;
  return p;
}
"""
EXPECTED = {
    "plain": [("kernel.metal", 101)],
    "once": [("inner.metal", 12), ("kernel.metal", 106)],
    "twice": [("inner.metal", 12), ("prelude-0123456789abcdef.h", 4), ("kernel.metal", 111)],
    "hidden": [("prelude-0123456789abcdef.h", 7), ("kernel.metal", 116)],
}


def _compiled(folder: Path, *flags: str) -> Path:
    source, built = folder / "lines.cpp", folder / "lines.so"
    source.write_text(SOURCE)
    command = [*find_compiler().command, "-shared", "-fPIC", "-fno-sanitize=all", "-nostdlib", *flags]
    subprocess.run([*command, "-o", str(built), str(source)], check=True, capture_output=True)
    return built


def _address(library: Path, function: str) -> int:
    call = getattr(ctypes.CDLL(str(library)), function)
    call.restype = ctypes.c_void_p
    return int(call(5)) - 1 - image_range(str(library))[0]


@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize("level", ["-O1", "-O2"])
def test_lines_and_inlined_calls(tmp_path: Path, version: int, level: str) -> None:
    library = _compiled(tmp_path, f"-gdwarf-{version}", "-gline-tables-only", level)
    for function, expected in EXPECTED.items():
        places = find_places(library, _address(library, function))
        assert [(Path(place.file).name, place.line) for place in places] == expected, function


@pytest.mark.parametrize("version", [4, 5])
def test_full_debug_information_is_read_too(tmp_path: Path, version: int) -> None:
    library = _compiled(tmp_path, f"-gdwarf-{version}", "-g", "-O2")
    for function, expected in EXPECTED.items():
        places = find_places(library, _address(library, function))
        assert [(Path(place.file).name, place.line) for place in places] == expected, function


def test_the_prelude_is_skipped(tmp_path: Path) -> None:
    library = _compiled(tmp_path, "-gline-tables-only", "-O2")
    assert find_place(library, _address(library, "hidden")) == Place("kernel.metal", 116)
    assert find_place(library, _address(library, "twice")) == Place("inner.metal", 12)
    assert str(Place("kernel.metal", 116)) == "kernel.metal:116"


def test_addresses_without_a_line(tmp_path: Path) -> None:
    library = _compiled(tmp_path, "-gline-tables-only", "-O2")
    assert find_place(library, 0) is None
    assert find_place(library, 1 << 40) is None


def test_files_without_lines(tmp_path: Path) -> None:
    bare = _compiled(tmp_path, "-g0", "-O2")
    assert find_place(bare, _address(bare, "plain")) is None
    text = tmp_path / "text.so"
    text.write_text("not a library")
    assert find_place(text, 0) is None
    assert find_place(tmp_path / "missing.so", 0) is None


def test_damaged_files_give_no_error(tmp_path: Path) -> None:
    whole = bytearray(_compiled(tmp_path, "-gline-tables-only", "-O2").read_bytes())
    chance = random.Random(0)
    for number in range(60):
        damaged = bytearray(whole[: chance.randrange(len(whole))] if number % 2 else whole)
        for _ in range(40):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256) if damaged else 0
        path = tmp_path / f"damaged{number}.so"
        path.write_bytes(damaged)
        place = find_place(path, chance.randrange(1 << 13))
        assert place is None or isinstance(place.line, int)
