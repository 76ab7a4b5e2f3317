"""Small launches under compute-sanitizer, and the script that runs everything on a GPU, both without one."""

from __future__ import annotations

import ctypes
import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from metile.ops.attention import AttentionKey
from metile.ops.attention_space import AttentionTile
from metile.ops.linear import LinearKey
from metile.ops.linear_tile import LinearTile
from metile.ops.norm import NormKey
from metile.targets.base import Output
from metile.targets.cuda_device import CudaDevice
from metile.targets.nvrtc import Binary

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks"
sys.path.insert(0, str(FOLDER))

gpu_record: Any = importlib.import_module("gpu_record")
gpu_sanitize: Any = importlib.import_module("gpu_sanitize")

HOPPER = CudaDevice("NVIDIA H200", (9, 0), (13, 0), 32, 1024, 232448, 65536, 132, 60 << 20)


# ---- the sanitizer ----


class FakeGpu:
    """Memory and launches of a driver, kept to be looked at; each result is filled with 1.0 in float32."""

    def __init__(self) -> None:
        self.memory: dict[int, bytes] = {}
        self.launched: list[tuple[Any, ...]] = []
        self.freed: list[int] = []

    def filled(self, data: bytes) -> Any:
        address = 0x1000 * (len(self.memory) + 1)
        self.memory[address] = data
        return ctypes.c_uint64(address)

    def taken(self, pointer: Any, size: int) -> bytes:
        assert self.memory[pointer.value] == b"\xff" * size
        return np.ones(size // 4, np.float32).tobytes()

    def call(self, function: str, *arguments: Any) -> None:
        if function == "cuLaunchKernel":
            self.launched.append(arguments)
        if function == "cuMemFree_v2":
            self.freed.append(arguments[0].value)


CASES: dict[str, tuple[Any, Any]] = {
    "plain": (LinearKey("store", 3, 24, 40, "float32"), LinearTile("rows", 1, 8, 1, 2, 1, 0, "linear")),
    "views": (AttentionKey(1, 40, 4, 2, 64, "float32"), AttentionTile("rows", 1, 32, 4)),
}


@pytest.mark.parametrize("case", list(CASES))
def test_a_small_launch_has_the_parameters_of_its_text(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    programs: list[Any] = []
    taken: list[list[Any]] = []

    class Kernel(gpu_sanitize.SmallKernel):  # type: ignore[misc]
        def parameters(self, *given: Any) -> list[Any]:
            taken.append(super().parameters(*given))
            return taken[-1]

    def compiled(program: Any, architecture: str) -> Binary:
        programs.append(program)
        return Binary(b"cubin", (96,))

    monkeypatch.setattr(gpu_sanitize, "compile_program", compiled)
    key, candidate = CASES[case]
    gpu, inputs = FakeGpu(), key.example(key.rows, seed=0)
    (y,) = key.launch(Kernel(gpu, key.source(candidate), "sm_90a"), candidate, inputs)
    assert (y == 1).all()
    (arguments,), (parameters,), (program,) = gpu.launched, taken, programs
    assert arguments[1:4] == ({"plain": 9, "views": 2}[case], 1, 1)
    assert arguments[4:7] == (32 * key.source(candidate).simdgroups, 1, 1)
    assert arguments[7] == 96
    assert 'extern "C" __global__' in program.text
    texts = program.text.rpartition("metile_small(")[2].partition(")")[0].split(", ")
    assert list(arguments[9]) == [ctypes.addressof(value) for value in parameters]
    for value, text in zip(parameters, texts, strict=True):
        if "Strides" in text:
            assert ctypes.sizeof(value) == 8 * gpu_sanitize.AXES
        elif "*" in text:
            assert value.value in gpu.memory
        else:
            assert isinstance(value, ctypes.c_int)
    strides = [list(value)[:4] for value, text in zip(parameters, texts, strict=True) if "Strides" in text]
    assert strides == ([] if case == "plain" else [[256, 64, 64, 1], [3840, 1920, 64, 1], [3840, 1920, 64, 1]])
    assert sorted(gpu.freed) == sorted(gpu.memory)
    sizes = [len(data) for data in gpu.memory.values()]
    for nbytes in [*(array.nbytes for array in inputs), y.nbytes]:
        assert nbytes in sizes


def test_arrays_are_the_bytes_they_are_made_of() -> None:
    for dtype in (mx.bfloat16, mx.float16, mx.float32):
        array = mx.random.normal((3, 5), key=mx.random.key(0)).astype(dtype)
        raw = gpu_sanitize.bytes_of(array)
        assert len(raw) == array.nbytes
        assert mx.array_equal(gpu_sanitize.array_of(raw, Output((3, 5), dtype)), array)


@pytest.mark.parametrize(
    ("text", "summary", "clean"),
    [
        ("a\n========= ERROR SUMMARY: 0 errors\n", "ERROR SUMMARY: 0 errors", True),
        ("========= ERROR SUMMARY: 10 errors\n", "ERROR SUMMARY: 10 errors", False),
        ("= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", "RACECHECK SUMMARY: 0 hazards", True),
        ("Device not supported", "no summary: Device not supported", False),
    ],
)
def test_what_a_tool_says_is_read(text: str, summary: str, clean: bool) -> None:
    result = gpu_record.sanitized(text, "memcheck", 7)
    assert result.summary.startswith(summary)
    assert gpu_sanitize.is_clean(result) == clean


def test_a_tool_is_run_and_its_summary_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_sanitize, "TOOLKITS", (str(tmp_path),))
    monkeypatch.setenv("PATH", "/nowhere")
    missing = gpu_sanitize.sanitize("memcheck", 1, 5)
    assert missing.summary == "compute-sanitizer is not on this machine"
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    tool = tmp_path / "compute-sanitizer"
    tool.write_text('#!/bin/sh\necho "7 kernels tried, 0 failed"\necho "= ERROR SUMMARY: 0 errors"\n')
    tool.chmod(0o755)
    clean = gpu_sanitize.sanitize("memcheck", 1, 5)
    assert (clean.kernels, clean.summary) == (7, "ERROR SUMMARY: 0 errors")
    assert capsys.readouterr().out == ""
    tool.write_text('#!/bin/sh\necho "7 kernels tried, 1 failed"\necho "= ERROR SUMMARY: 2 errors"\n')
    assert not gpu_sanitize.is_clean(gpu_sanitize.sanitize("racecheck", 1, 5))
    assert "1 failed" in capsys.readouterr().out
    tool.write_text("#!/bin/sh\nexec sleep 20\n")
    assert gpu_sanitize.sanitize("racecheck", 1, 0.3).summary == "no end within 0 s"


def test_every_family_is_among_the_small_launches() -> None:
    pairs = list(gpu_sanitize.chosen(2, HOPPER.limits))
    families = {key.family for key, _ in pairs}
    quantized = {"affine_swiglu", "affine_matmul", "block_scaled"}
    assert families == {"dense_swiglu", "dense_matmul", "rms_norm", "add_rms_norm", "attention", *quantized}
    programs = {candidate.program for key, candidate in pairs if not isinstance(key, NormKey)}
    assert programs == {"rows", "matrix"}


# ---- the script ----


def script(folder: Path, python: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    stand_in = folder / "python"
    stand_in.write_text(f"#!/bin/sh\n{python}\n")
    stand_in.chmod(0o755)
    command = ["sh", str(FOLDER / "gpu_run.sh"), *arguments]
    environment = {**os.environ, "PYTHON": str(stand_in)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_the_script_runs_its_parts_in_order(tmp_path: Path) -> None:
    done = script(tmp_path, 'echo "ran $*"', "300", str(tmp_path / "out"))
    assert done.returncode == 0, done.stdout + done.stderr
    log = (tmp_path / "out" / "run.log").read_text()
    ran = [line.split()[1:] for line in log.splitlines() if line.startswith("ran ")]
    assert [words[0].rpartition("/")[2] for words in ran[1:]] == ["gpu_sanitize.py", "gpu_check.py", "gpu_kernels.py", "-m"]  # fmt: skip  # noqa: E501
    tune = ran[-1]
    assert tune[:6] == ["-m", "metile.tune", "--target", "cuda", "--suite", "bf16-dense"]
    assert tune[tune.index("--model") + 1] == "random:qwen2.5-1.5b"
    assert int(tune[tune.index("--search-seconds") + 1]) in range(190, 201)
    assert "not clean: nothing" in log


def test_a_part_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    python = 'case "$*" in *gpu_check*) echo broken; exit 3 ;; *) echo "ran $*" ;; esac'
    done = script(tmp_path, python, "100", str(tmp_path / "out"), "check", "nope", "kernels")
    assert done.returncode == 1
    log = (tmp_path / "out" / "run.log").read_text()
    assert "== check ended with 3" in log
    assert "== kernels ended with 0" in log
    assert log.rstrip().endswith("not clean: check nope")
    assert "metile.tune" not in log


def test_no_time_runs_nothing(tmp_path: Path) -> None:
    done = script(tmp_path, 'echo "ran $*"', "5", str(tmp_path / "out"), "tune")
    assert done.returncode == 1
    assert "tune: no time is left" in done.stdout
    assert "ran -m" not in done.stdout


def test_the_script_lets_the_package_be_found(tmp_path: Path) -> None:
    code = "import importlib.metadata, metile, os; print(importlib.metadata.version('metile'), metile.__file__)"
    python = f'exec {sys.executable} -c "{code}"'
    done = script(tmp_path, python, "60", str(tmp_path / "out"), "check")
    assert done.returncode == 0, done.stdout
    assert f"{FOLDER.parent}/metile/__init__.py" in done.stdout
