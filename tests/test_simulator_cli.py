"""The command: run, check, devices, what a file's comments say, and errors of one line."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from metile.errors import MetileError
from metile.simulator.__main__ import main
from metile.simulator.devices import DEVICES
from metile.simulator.file import Empty
from metile.simulator.specification import read_buffer, read_comments, read_scalar, read_sizes

SCALE = """// Scales a vector.
// metile: grid=10 threadgroup=4
// metile: buffer0=float32:10:arange buffer1=float32:10:empty constant1=3
#include <metal_stdlib>
using namespace metal;
constant int factor [[function_constant(1)]];
kernel void scale(device const float* x, device float* y, uint i [[thread_position_in_grid]]) {
  y[i] = x[i] * factor;
}
"""
RACE = """// metile: grid=64,1,1 threadgroup=64,1,1 buffer0=int32:64:arange buffer1=int32:64:empty
#include <metal_stdlib>
using namespace metal;
kernel void reverse(device const int* x, device int* y, uint i [[thread_position_in_threadgroup]]) {
  threadgroup int shared[64];
  threadgroup int last;
  shared[i] = x[i];
  last = 7;
  BARRIER
  y[i] = shared[63 - i];
}
"""
FIXED = RACE.replace("BARRIER", "threadgroup_barrier(mem_flags::mem_threadgroup);")


@pytest.fixture
def scale(tmp_path: Path) -> str:
    path = tmp_path / "scale.metal"
    path.write_text(SCALE)
    return str(path)


def written(tmp_path: Path, text: str, name: str = "k.metal") -> str:
    path = tmp_path / name
    path.write_text(text)
    return str(path)


def test_run_prints_what_was_written(scale: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", scale, "--print", "4"]) == 0
    assert capsys.readouterr().out == "buffer 1: float32 10: 0 3 6 9 ...\n"


def test_options_go_before_comments(scale: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--kernel", "scale", "--grid", "3,1,1", "--threadgroup", "2", "--constant", "1=-2"]
    options += ["--buffer", "0=float32:3:1.5", "--buffer", "1=float32:3x1:empty", "--device", "m3-max"]
    assert main(["run", scale, *options]) == 0
    assert capsys.readouterr().out == "buffer 1: float32 3x1: -3 -3 -3\n"


def test_outputs_are_saved_and_files_read(scale: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x, y = tmp_path / "x.npy", tmp_path / "y.npy"
    np.save(x, np.linspace(0, 1, 10, dtype=np.float32))
    assert main(["run", scale, "--buffer", f"0={x}", "--save", f"1={y}", "--print", "0"]) == 0
    assert np.array_equal(np.load(y), np.load(x) * 3)


def test_bfloat16_is_saved_exactly(tmp_path: Path) -> None:
    path = written(tmp_path, "kernel void k(device bfloat* y, uint i [[thread_position_in_grid]]) { y[i] = 0.1bf; }")
    options = ["--grid", "3", "--threadgroup", "3", "--buffer", "0=bfloat16:3:empty"]
    assert main(["run", path, *options, "--save", f"0={tmp_path / 'y.npy'}"]) == 0
    assert np.load(tmp_path / "y.npy").tolist() == mx.full((3,), 0.1, mx.bfloat16).tolist()


def test_check_is_silent_about_a_sound_kernel(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", written(tmp_path, FIXED)]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[-1] == "nothing found"
    assert out[:-1]
    assert all(re.match(r"benign: .*k\.metal:8: ", line) for line in out[:-1])


def test_check_lists_findings_with_file_and_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, RACE.replace("BARRIER", ""))
    assert main(["check", path]) == 1
    out = capsys.readouterr().out.splitlines()
    found = [line for line in out if re.match(r"k\.metal:(7|10): race", line)]
    assert found, out
    assert re.fullmatch(r"\d+ findings?", out[-1])
    assert main(["run", path]) == 0  # which checks nothing


@pytest.mark.parametrize(
    ("change", "options", "said"),
    [
        ("last = 7;", ["--pipeline-threads", "32"], "at most 32 threads per threadgroup but got 64"),
        ("last = nothing;", [], "k.metal:8"),
        ("while (last != 8) last = 7;", ["--time-limit", "0.3"], "at most 0.3 s"),
        ("threadgroup int big[8192]; big[i] = 1; last = 7;", [], "at most 32768 bytes of threadgroup memory"),
        ("last = 7; double d = i; y[i] = d;", ["--strict"], "k.metal:8"),
    ],
)
def test_check_reports_faults_limits_and_rejected_text(
    change: str, options: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", written(tmp_path, FIXED.replace("last = 7;", change)), *options]) == 1
    out, err = capsys.readouterr()
    assert said in out
    assert not err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--grid", "a"], "--grid to be X,Y,Z but got 'a'"),
        (["--grid", "1,2,3,4"], "--grid to be X,Y,Z"),
        (["--threadgroup", "0"], "`threadgroup` to be positive"),
        (["--buffer", "0"], "--buffer INDEX=VALUE but got '0'"),
        (["--buffer", "0=float32:10"], "a buffer as DTYPE:SHAPE:FILL"),
        (["--buffer", "0=double:10:ones"], "a dtype that Metal has"),
        (["--buffer", "0=none.npy"], "a .npy file that can be read but got none.npy"),
        (["--buffer", "0=float32:10:some"], "true, false or a number but got 'some'"),
        (["--buffer", "7=float32:10:ones"], "but got 7"),
        (["--constant", "1=x"], "true, false or a number but got 'x'"),
        (["--kernel", "other"], "one of the kernels scale but got 'other'"),
        (["--device", "m0"], "one of m1"),
        (["--pipeline-threads", "0"], "pipeline_threads to be a positive integer"),
        (["--save", "0=x.npy"], "a buffer that was written (1) but got '0=x.npy'"),
        (["--save", "1=/nowhere/x.npy"], "a file that can be written"),
    ],
)
@pytest.mark.parametrize("command", ["run", "check"])
def test_bad_usage_is_one_line(
    command: str, arguments: list[str], said: str, scale: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, scale, *arguments]) == 2
    out, err = capsys.readouterr()
    assert said in err
    assert err.count("\n") == 1
    assert not out


def test_files_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    binary = tmp_path / "binary.metal"
    binary.write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "none.metal", tmp_path, binary):
        assert main(["check", str(path)]) == 2
        assert capsys.readouterr().err.startswith("[simulator] expected a file that can be read but got")


def test_missing_sizes_are_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", written(tmp_path, "kernel void k(device int* y) { *y = 1; }")]) == 2
    assert "expected --grid X,Y,Z (or grid=X,Y,Z in a // metile: comment) but got none" in capsys.readouterr().err


@pytest.mark.parametrize("comment", ["grid", "speed=3", "buffer=float32:1:ones", "grid0=3", "a='b"])
def test_comments_that_say_nothing(comment: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", written(tmp_path, f"// metile: {comment}\nkernel void k() {{}}\n")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_comments_add_up() -> None:
    found = read_comments("// metile: kernel='f<int, 3>' grid=1\nint x;\n  // metile: grid=2 threadgroup_memory0=64\n")
    assert (found.kernel, found.grid, found.threadgroup, found.threadgroup_memory) == ("f<int, 3>", "2", "", {0: "64"})
    assert read_comments("/* metile: grid=1 */ int y; // metile: grid=3\n").grid == ""


def test_devices_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["devices"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == list(DEVICES)
    assert lines[1].split() == ["m1", "apple7", "8", "68.25", "1024", "32768"]


@pytest.mark.parametrize("arguments", [[], ["walk"], ["run"], ["run", "x.metal", "--speed", "3"]])
def test_commands_that_do_not_parse(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2


def test_it_runs_as_a_module(scale: str) -> None:
    command = [sys.executable, "-m", "metile.simulator"]
    done = subprocess.run([*command, "check", scale], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "nothing found\n", "")
    done = subprocess.run([*command, "check", "none"], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)


def test_values_on_the_command_line() -> None:
    assert read_sizes("grid", "4") == (4, 1, 1)
    assert read_sizes("grid", "4x5") == (4, 5, 1)
    assert [read_scalar(word) for word in ("true", "False", "-3", "1e-3")] == [True, False, -3, 0.001]
    assert read_buffer("int8:2x3:arange", 0).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert read_buffer("bool:2:ones", 0).tolist() == [True, True]
    assert read_buffer("float16:2:-0.5", 0).tolist() == [-0.5, -0.5]
    assert read_buffer("uint32:4:empty", 0) == Empty((4,), mx.uint32)
    first, again, other = (read_buffer("bfloat16:64:random", seed) for seed in (1, 1, 2))
    assert mx.array_equal(first, again)
    assert not mx.array_equal(first, other)
    assert read_buffer("int32:64:random", 0).max().item() > 50
    with pytest.raises(MetileError, match="true, false or a number"):
        read_scalar("yes")
