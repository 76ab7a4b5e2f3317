"""The compiler of the CPU target and its cache on disk."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from small_kernels import elementwise_source, linear_source

from metile.errors import MetileError
from metile.files import CACHE_VARIABLE, cache_root, data_root
from metile.targets import compiler
from metile.targets.base import Kernel
from metile.targets.compiler import CompileError, compile_library, find_compiler, sources_digest
from metile.targets.cpu import CpuTarget

ANSWER = 'extern "C" int answer() { return 42; }\n'

# Compiles one text as soon as its standard input closes, and prints the library's name.
BUILDER = """
import ctypes, sys
from metile.targets.compiler import compile_library, find_compiler
find_compiler()
print("ready", flush=True)
sys.stdin.read()
path = compile_library('extern "C" int answer() { return 42; }', (), "race")
assert ctypes.CDLL(str(path)).answer() == 42
print(path.name)
"""


@pytest.fixture
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Compile into an empty folder; zig's own cache stays, or it would build its runtime anew."""
    zig = cache_root() / "zig"
    root = tmp_path / "cache"
    root.mkdir()
    zig.mkdir(parents=True, exist_ok=True)
    (root / "zig").symlink_to(zig.resolve())
    monkeypatch.setenv(CACHE_VARIABLE, str(root))
    return root / "kernels"


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that gains the name of each library that is built."""
    built: list[str] = []
    build = compiler._build

    def counted(*arguments: object) -> None:
        built.append(Path(str(arguments[-1])).name)
        build(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(compiler, "_build", counted)
    return built


@pytest.fixture
def forget_compiler() -> Iterator[None]:
    """Look for the compiler afresh, in this test and after it."""
    find_compiler.cache_clear()
    yield
    find_compiler.cache_clear()


def test_a_hit_does_not_compile(fresh_cache: Path, builds: list[str]) -> None:
    path = compile_library(ANSWER, (), "answer")
    written = path.stat().st_mtime_ns
    assert compile_library(ANSWER, (), "answer") == path
    assert len(builds) == 1
    assert path.stat().st_mtime_ns == written
    assert path.parent == fresh_cache
    assert path.name.startswith("answer-")
    assert ctypes.CDLL(str(path)).answer() == 42
    assert [entry.name for entry in fresh_cache.iterdir()] == [path.name]  # no build folder stays


def test_text_flags_and_name_each_make_another_library(fresh_cache: Path, builds: list[str]) -> None:
    paths = {
        compile_library(ANSWER, (), "answer"),
        compile_library(ANSWER + "\n", (), "answer"),
        compile_library(ANSWER, ("-DX",), "answer"),
        compile_library(ANSWER, (), "other"),
    }
    assert len(paths) == len(builds) == 4


def test_a_broken_text_gives_the_first_error_line(fresh_cache: Path) -> None:
    text = "int f() { return missing; }\nint g() { return absent; }\n"
    with pytest.raises(CompileError, match=r"^\[compile\] .*error: .*'missing'") as caught:
        compile_library(text, (), "broken")
    assert "\n" not in str(caught.value)
    assert "absent" not in str(caught.value)
    assert list(fresh_cache.iterdir()) == []


def test_a_broken_kernel_is_a_rejected_candidate_among_good_ones() -> None:
    good = elementwise_source("good", "y_[i] = 1.0f;", inputs=())
    broken = elementwise_source("broken", "y_[i] = no_such_name;", inputs=())
    results = CpuTarget().compile_all([good, broken, good])
    assert isinstance(results[1], CompileError)
    assert "no_such_name" in str(results[1])
    assert [getattr(result, "source", None) for result in results] == [good, None, good]


def test_a_compiler_that_hangs_is_an_error(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(*_: object, **__: object) -> None:
        raise subprocess.TimeoutExpired("zig", 120)

    find_compiler()
    monkeypatch.setattr(compiler.subprocess, "run", hang)
    with pytest.raises(CompileError, match=r"expected a result in 120 s but got none for slow-"):
        compile_library(ANSWER, (), "slow")


def test_threads_that_compile_the_same_text_all_get_it(fresh_cache: Path) -> None:
    with ThreadPoolExecutor(4) as threads:
        paths = set(threads.map(lambda _: compile_library(ANSWER, (), "threads"), range(4)))
    assert list(fresh_cache.iterdir()) == list(paths)


def test_threads_that_compile_the_same_kernel_share_it() -> None:
    target = CpuTarget()
    kernels: list[Kernel | CompileError] = target.compile_all([linear_source()] * 4)
    assert all(kernel is kernels[0] for kernel in kernels)
    assert target.compile(linear_source()) is kernels[0]


def test_processes_that_compile_the_same_text_all_get_it(fresh_cache: Path) -> None:
    command = [sys.executable, "-c", BUILDER]
    processes = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    outputs = [process.communicate()[0] for process in processes]  # closes each one's input
    assert [process.returncode for process in processes] == [0, 0]
    assert outputs == [f"{entry.name}\n" for entry in fresh_cache.iterdir()] * 2


@pytest.mark.usefixtures("forget_compiler")
def test_no_compiler_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compiler, "zig_command", lambda: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    expected = r"\[cpu\] expected a compiler \(pip install ziglang, or clang\+\+ on PATH\) but got none"
    with pytest.raises(MetileError, match=expected):
        compile_library(ANSWER, (), "none")


@pytest.mark.usefixtures("forget_compiler")
def test_a_clang_on_path_serves_where_ziglang_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fresh_cache: Path
) -> None:
    zig = compiler.zig_command()
    if zig is None:
        pytest.skip("no ziglang to stand for clang++")
    clang = tmp_path / "path" / "clang++"
    clang.parent.mkdir()
    clang.write_text(f'#!/bin/sh\nexec {" ".join(zig)} "$@"\n')
    clang.chmod(0o755)
    monkeypatch.setattr(compiler, "zig_command", lambda: None)
    monkeypatch.setenv("PATH", str(clang.parent))
    found = find_compiler()
    assert found.command == (str(clang),)
    assert found.flags(("-march=x86{sep}64",))[-1] == "-march=x86-64"
    assert ctypes.CDLL(str(compile_library(ANSWER, (), "clang"))).answer() == 42


@pytest.mark.usefixtures("forget_compiler")
def test_a_ziglang_that_does_not_run_is_passed_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compiler, "zig_command", lambda: (str(tmp_path / "zig"), "c++"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MetileError, match="expected a compiler"):
        find_compiler()


def test_the_sources_digest_follows_every_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = sources_digest.__wrapped__
    copy = tmp_path / "kernels"
    shutil.copytree(data_root("kernels"), copy)
    original = digest()
    monkeypatch.setattr(compiler, "data_root", lambda kind: tmp_path / kind)
    assert digest() == original  # where the files lie does not matter

    header = copy / "tile" / "schedule.h"
    text = header.read_text()
    header.write_text(text + "\n")
    changed = digest()
    header.write_text(text)
    assert digest() == original
    header.rename(header.with_name("schedule2.h"))
    renamed = digest()
    header.with_name("schedule2.h").rename(header)
    (copy / "new.metal").touch()
    assert len({original, changed, renamed, digest()}) == 4


def test_a_changed_source_file_compiles_anew(
    fresh_cache: Path, builds: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kernels").mkdir()
    header = tmp_path / "kernels" / "number.h"
    monkeypatch.setattr(compiler, "data_root", lambda kind: tmp_path / kind)
    monkeypatch.setattr(compiler, "sources_digest", sources_digest.__wrapped__)
    text = '#include "number.h"\nextern "C" int answer() { return NUMBER; }\n'
    for number in (1, 2, 1):
        header.write_text(f"#define NUMBER {number}\n")
        assert ctypes.CDLL(str(compile_library(text, (), "number"))).answer() == number
    assert len(builds) == 2


def test_a_cache_that_cannot_be_written_rejects_the_candidate(fresh_cache: Path) -> None:
    fresh_cache.touch()  # a file where the folder should be
    with pytest.raises(CompileError, match=r"expected a cache that can be written but got .*kernels"):
        compile_library(ANSWER, (), "unwritable")
