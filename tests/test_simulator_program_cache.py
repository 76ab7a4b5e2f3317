"""The cache of compiled programs: what belongs to a key, broken files, two processes at once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from metile.simulator import clang, program
from metile.simulator.clang import Build
from metile.simulator.program import Options, Program, compile_program
from metile.simulator.runtime import Buffer, launch
from metile.targets.compiler import CompileError

pytest.importorskip("ziglang")

HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"


def first(built: Program) -> float:
    """Run kernel ``k`` and return the float that it writes."""
    out = np.zeros(1, np.float32)
    launch(built, "k", {0: Buffer("y", out.view(np.uint8), output=True)}, (1, 1, 1), (1, 1, 1))
    return float(out[0])


TEXT = HEAD + "[[kernel]] void k(device float* y [[buffer(0)]]) { y[0] = 42; }"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own, with the precompiled prelude in it."""
    compile_program(TEXT)
    for path in clang.folder().glob("prelude-*"):
        (tmp_path / "simulator").mkdir(exist_ok=True)
        (tmp_path / "simulator" / path.name).write_bytes(path.read_bytes())
    monkeypatch.setenv("METILE_CACHE_DIR", str(tmp_path))
    return tmp_path / "simulator"


def forget() -> None:
    program._programs.clear()


def test_second_time_compiles_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = compile_program(TEXT)
    forget()
    monkeypatch.setattr(program, "compile_text", None)
    second = compile_program(TEXT)
    assert second.path == before.path
    assert first(second) == 42


@pytest.mark.parametrize("harm", [lambda data: data[:1000], lambda data: b"", lambda data: data[:-1] + b"?"])
def test_broken_library_is_compiled_again(cache: Path, harm: Callable[[bytes], bytes]) -> None:
    path = compile_program(TEXT).path
    whole = path.read_bytes()
    path.unlink()  # the loaded one stays as it is
    path.write_bytes(harm(whole))
    forget()
    assert first(compile_program(TEXT)) == 42
    assert clang.is_intact(path)


def test_broken_prelude_is_compiled_again(cache: Path) -> None:
    compile_program(TEXT)
    prelude = clang.precompiled_prelude(Build())
    prelude.write_bytes(prelude.read_bytes()[:5000])
    assert first(compile_program(TEXT.replace("42", "43"))) == 43
    assert clang.is_intact(prelude)


def test_cache_may_be_moved(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_program(TEXT)
    moved = cache.parent.with_name("moved")
    cache.parent.rename(moved)
    monkeypatch.setenv("METILE_CACHE_DIR", str(moved))
    before = clang.precompiled_prelude(Build()).stat().st_mtime_ns
    assert first(compile_program(TEXT.replace("42", "45"))) == 45
    assert clang.precompiled_prelude(Build()).stat().st_mtime_ns == before


def test_two_processes_at_once(cache: Path) -> None:
    code = (
        "from metile.simulator.program import compile_program\n"
        f"print(len([compile_program({TEXT!r}.replace('42', str(n))) for n in range(3)]))\n"
    )
    for path in cache.glob("*"):
        path.unlink()
    started = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=dict(os.environ)) for _ in range(2)
    ]
    assert [process.communicate()[0] for process in started] == [b"3\n", b"3\n"]
    left = [path.name for path in cache.iterdir() if path.suffix not in (".so", ".pch")]
    assert left == []
    assert all(clang.is_intact(path) for path in cache.iterdir() if path.suffix == ".pch")


def test_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("METILE_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(CompileError, match="expected a cache that can be written"):
        compile_program(TEXT.replace("42", "44"))


def test_everything_belongs_to_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    builds = [Build(check, once) for check in (False, True) for once in (False, True)]
    keys = {clang.key(build, "text") for build in builds}
    keys |= {clang.key(Build(), "other"), clang.key(Build(), "te", "xt")}
    for name in ("version", "processor", "prelude"):
        with monkeypatch.context() as patch:
            patch.setattr(clang, name, lambda: "changed")
            keys.add(clang.key(Build(), "text"))
    for name in ("_LANGUAGE", "_CODE", "DEFINES"):
        with monkeypatch.context() as patch:
            patch.setattr(clang, name, (*getattr(clang, name), "-changed"))
            keys.add(clang.key(Build(), "text"))
    assert len(keys) == 12
    with monkeypatch.context() as patch:
        patch.setattr(clang, "_CHECKED", (*clang._CHECKED, "-changed"))
        assert clang.key(Build(check=True), "text") not in keys
        assert clang.key(Build(), "text") in keys


def test_options_make_other_programs(tmp_path: Path) -> None:
    text = "#ifdef A\n#define V 1\n#else\n#include <mine.h>\n#endif\n" + (
        "constant int c [[function_constant(0)]];\n[[kernel]] void k(device float* y [[buffer(0)]]) { y[0] = V + c; }"
    )
    header = tmp_path / "mine.h"
    header.write_text("#define V 2\n")
    asked = [
        Options(constants={0: 0}, include=(tmp_path,)),
        Options(constants={0: 10}, include=(tmp_path,)),
        Options(constants={0: 0}, defines=("A",)),
    ]
    assert [first(compile_program(text, options=one)) for one in asked] == [2, 12, 1]
    header.write_text("#define V 3\n")
    assert first(compile_program(text, options=asked[0])) == 3


def test_options_are_hashable() -> None:
    assert hash(Options(constants={1: 2, 0: True})) == hash(Options(constants=((0, True), (1, 2))))


@pytest.mark.parametrize(
    ("text", "options", "once"),
    [
        ("simdgroup_matrix<float, 8, 8> m(0);", Options(), True),
        ("simdgroup_float8x8 m(0);", Options(), True),
        ("simdgroup_float8x8 m(0);", Options(check=True), False),
        ("simdgroup_float8x8 m(0);", Options(once_per_simdgroup=False), False),
        ("float m = 0;", Options(), False),
        ("float m = 0;", Options(once_per_simdgroup=True), True),
    ],
)
def test_matrices_once_per_simdgroup(
    text: str, options: Options, once: bool, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builds: list[Build] = []
    real = program.compile_text

    def record(unit: str, build: Build, *others: object) -> str:
        builds.append(build)
        return real(unit, build, *others)

    monkeypatch.setattr(program, "compile_text", record)
    compile_program(f"{HEAD}[[kernel]] void k(device float* y [[buffer(0)]]) {{ {text} (void)m; }}", options=options)
    assert [build.once_per_simdgroup for build in builds] == [once]
