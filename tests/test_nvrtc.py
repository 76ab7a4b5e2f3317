"""NVRTC and its cache: what is found is compiled, what is broken is compiled again, and errors say what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from metile.files import CACHE_VARIABLE
from metile.targets import nvrtc
from metile.targets.compiler import CompileError
from metile.targets.nvrtc import Binary, Program, compile_all, compile_program

GOOD = Program(
    "good",
    "__device__ constexpr int bytes() { return 4096; }\n__device__ constexpr int less() { return -7; }\n"
    'extern "C" __global__ void good(float* y, int n) { y[threadIdx.x] = n; }\n',
    ("bytes", "less"),
)


def _found() -> bool:
    try:
        nvrtc.library()
    except CompileError:
        return False
    return True


needs_nvrtc = pytest.mark.skipif(not _found(), reason="needs NVRTC: pip install nvidia-cuda-nvrtc")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    return tmp_path / "cuda"


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stand in for NVRTC, and return the names of what was compiled."""
    names: list[str] = []

    def compiled(program: Program, options: tuple[str, ...]) -> Binary:
        names.append(program.name)
        if "error" in program.text:
            raise CompileError("[cuda] error")
        return Binary(program.text.encode() + options[0].encode() + b"\n\0", (len(program.text),))

    monkeypatch.setattr(nvrtc, "_compile", compiled)
    monkeypatch.setattr(nvrtc, "version", lambda: (13, 0))
    return names


def test_a_program_is_compiled_once(counted: list[str], cache: Path) -> None:
    program = Program("k", "text", ("bytes",))
    first = compile_program(program, "sm_80")
    assert compile_program(program, "sm_80") == first == Binary(b"text--gpu-architecture=sm_80\n\0", (4,))
    assert counted == ["k"]
    assert [path.name[:8] for path in cache.iterdir()] == ["k-sm_80-"]


@pytest.mark.parametrize(
    "other",
    [Program("k", "texts", ("bytes",)), Program("k", "text", ("more",)), Program("k", "text", ("bytes",), ("-G",))],
    ids=["text", "constants", "options"],
)
def test_another_program_is_another_file(other: Program, counted: list[str], cache: Path) -> None:
    compile_program(Program("k", "text", ("bytes",)), "sm_80")
    compile_program(other, "sm_80")
    compile_program(other, "sm_90a")
    assert len(counted) == len(list(cache.iterdir())) == 3


@pytest.mark.parametrize("damage", [b"", b"{", b'{"sha256": 1}\n', b'{"constants": [1], "sha256": ""}\nx', None])
def test_a_broken_file_is_compiled_again(damage: bytes | None, counted: list[str], cache: Path) -> None:
    program = Program("k", "text", ("bytes",))
    first = compile_program(program, "sm_80")
    (file,) = cache.iterdir()
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] if damage is None else damage)
    assert compile_program(program, "sm_80") == first
    assert counted == ["k", "k"]
    assert file.read_bytes() == whole


def test_a_cache_that_cannot_be_written_is_an_error(counted: list[str], cache: Path) -> None:
    cache.write_text("a file where a folder should be")
    with pytest.raises(CompileError, match="a cache that can be written"):
        compile_program(Program("k", "text", ("bytes",)), "sm_80")
    assert counted == ["k"]


def test_many_are_compiled_and_a_rejected_one_gives_its_error(counted: list[str]) -> None:
    programs = [Program(f"k{i}", "error" if i % 3 == 1 else f"text {i}", ("bytes",)) for i in range(9)]
    results = compile_all(programs, "sm_80", threads=3)
    assert sorted(counted) == [program.name for program in programs]
    for index, result in enumerate(results):
        assert isinstance(result, CompileError if index % 3 == 1 else Binary)
    assert results[3].cubin.startswith(b"text 3")


def test_errors_of_a_log_are_told_in_short() -> None:
    log = "k.cu(1): warning: odd\nk.cu(2): error: no x\n  x = 1;\n\nk.cu(3): error: no y\nk.cu(4): error: no z\n"
    assert nvrtc._first_errors(log) == "k.cu(2): error: no x; k.cu(3): error: no y"
    assert nvrtc._first_errors("\nptxas fatal\n") == "ptxas fatal"
    assert nvrtc._first_errors("") == "no message"


def test_a_library_is_looked_for_in_packages_and_toolkits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "lib64"
    folder.mkdir()
    for name in ("libnvrtc.so.13", "libnvrtc-builtins.so.13.0", "libnvrtc.alt.so.13", "libnvrtc.so.12.9"):
        (folder / name).touch()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    ours = [path.name for path in nvrtc.library_paths() if path.parent == folder]
    assert ours == ["libnvrtc.so.13", "libnvrtc.so.12.9"]


def test_no_library_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "library_paths", lambda: iter(()))
    monkeypatch.setattr(nvrtc.ctypes.util, "find_library", lambda name: None)
    nvrtc.library.cache_clear()
    with pytest.raises(CompileError, match=r"\[cuda\] expected NVRTC \(pip install nvidia-cuda-nvrtc\) but got none"):
        nvrtc.library()


@needs_nvrtc
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a"])
def test_nvrtc_compiles_and_tells_constants(architecture: str) -> None:
    binary = compile_program(GOOD, architecture)
    assert binary.constants == (4096, -7)
    assert binary.cubin[:4] == b"\x7fELF"
    assert b"good" in binary.cubin
    assert compile_program(GOOD, architecture) == binary


@needs_nvrtc
def test_nvrtc_rejects_with_its_first_errors() -> None:
    text = 'extern "C" __global__ void bad(float* y) {\n  y[0] = left;\n  y[1] = right;\n  y[2] = up;\n}\n'
    with pytest.raises(CompileError) as caught:
        compile_program(Program("bad", text), "sm_80")
    message = str(caught.value)
    assert message.startswith("[cuda] bad.cu(2): error: ")
    assert "left" in message
    assert "right" in message
    assert "up" not in message
    with pytest.raises(CompileError):
        compile_program(GOOD, "sm_1")
