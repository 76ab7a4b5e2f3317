"""`mx.compile` on a machine without a compiler: through ziglang's clang, or off with a line that says so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from metile.files import CACHE_VARIABLE
from metile.toolchain import Toolchain, ensure_compile

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="MLX calls g++ on Linux only")

# A tiny llama's logits with `mx.compile` as ensure_compile leaves it, swiglu compiled, then with it off.
PROGRAM = """
import sys
import mlx.core as mx
from mlx_lm.models import llama
from mlx_lm.sample_utils import make_sampler
from metile import toolchain

{before}
found = toolchain.ensure_compile()
assert toolchain.ensure_compile() is found
mx.random.seed(0)
model = llama.Model(llama.ModelArgs(
    model_type="llama", hidden_size=64, num_hidden_layers=2, intermediate_size=96, num_attention_heads=2,
    rms_norm_eps=1e-5, vocab_size=50,
))
tokens = mx.array([[3, 1, 4, 1, 5]])
logits = model(tokens)[:, -1]
token = make_sampler(temp=0.7, top_p=0.9, min_p=0.01)(logits - mx.logsumexp(logits)).item()
assert 0 <= token < 50
compiles = toolchain.compiles()
mx.disable_compile()
assert mx.allclose(logits, model(tokens)[:, -1], rtol=1e-4, atol=1e-5).item()
print(found.compiler, compiles)
"""
HIDE_ZIGLANG = "toolchain.zig_command = lambda: None"


def run(folder: Path, *, before: str = "", compiler: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    """Run PROGRAM with a PATH that holds nothing but `compiler`, a script to go by the name of g++."""
    path, temporary = folder / "path", folder / "tmp"
    path.mkdir()
    temporary.mkdir()  # where MLX keeps what it compiled
    if compiler:
        (path / "g++").write_text(compiler)
        (path / "g++").chmod(0o755)
    environment = {**os.environ, "PATH": str(path), "TMPDIR": str(temporary), **variables}
    return subprocess.run(
        [sys.executable, "-c", PROGRAM.format(before=before)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parent.parent,
    )


def test_without_a_compiler_ziglang_takes_its_place(tmp_path: Path) -> None:
    pytest.importorskip("ziglang")
    done = run(tmp_path, **{CACHE_VARIABLE: str(tmp_path / "a cache")})  # the shim quotes its paths
    assert (done.returncode, done.stdout) == (0, "ziglang True\n"), done.stderr
    assert done.stderr == ""
    libraries = list((tmp_path / "tmp").rglob("*.so"))
    assert len(libraries) >= 2  # swiglu and the sampler's
    assert not list((tmp_path / "tmp").rglob("*.o"))
    assert os.access(tmp_path / "a cache" / "bin" / "g++", os.X_OK)


def test_without_any_compiler_compile_is_off_and_a_line_says_so(tmp_path: Path) -> None:
    done = run(tmp_path, before=HIDE_ZIGLANG)
    assert (done.returncode, done.stdout) == (0, "none False\n"), done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("mx.compile is off: no g++ on PATH, and no ziglang package (pip install")


def test_a_shim_that_cannot_compile_turns_compile_off(tmp_path: Path) -> None:
    before = "toolchain.zig_command = lambda: ('/nonexistent/zig', 'c++')"
    done = run(tmp_path, before=before, **{CACHE_VARIABLE: str(tmp_path / "cache")})
    assert (done.returncode, done.stdout) == (0, "none False\n"), done.stderr
    assert done.stderr.startswith("mx.compile is off")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "cache" / "bin" / "g++.works").exists()


def test_a_cache_that_cannot_be_written_turns_compile_off(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = run(tmp_path, **{CACHE_VARIABLE: str(tmp_path / "file")})
    assert (done.returncode, done.stdout) == (0, "none False\n"), done.stderr
    assert "ziglang's clang cannot take its place" in done.stderr


def test_asked_too_late_it_says_so(tmp_path: Path) -> None:
    pytest.importorskip("ziglang")
    done = run(tmp_path, before="assert not toolchain.compiles()")
    assert (done.returncode, done.stdout) == (0, "none False\n"), done.stderr
    assert "MLX had looked for it before" in done.stderr


def test_a_g_plus_plus_is_left_alone() -> None:
    check = "assert path == os.environ['PATH']"
    program = f"import os; path = os.environ['PATH']\n{PROGRAM.format(before='')}\n{check}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    if ensure_compile().compiler != "g++":
        pytest.skip("no g++ here")
    assert (done.returncode, done.stdout) == (0, "g++ True\n"), done.stderr


def test_off_linux_and_with_compile_disabled_it_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = ensure_compile.__wrapped__
    monkeypatch.setenv("MLX_DISABLE_COMPILE", "1")
    assert fresh() == Toolchain("mlx")
    monkeypatch.delenv("MLX_DISABLE_COMPILE")
    monkeypatch.setattr("metile.toolchain.platform.system", lambda: "Darwin")
    monkeypatch.setenv("PATH", "")
    assert fresh() == Toolchain("mlx")
