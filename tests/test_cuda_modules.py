"""Where MLX finds a binary, and that nothing of it stays there."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

from metile.targets import cuda_modules


def test_where_mlx_looks_for_modules(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("MLX_PTX_CACHE_DIR", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert cuda_modules.folder() == tmp_path / "mlx" / mx.__version__ / "ptx"  # type: ignore[attr-defined]
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", str(tmp_path / "own"))
    assert cuda_modules.folder() == tmp_path / "own"


@pytest.mark.parametrize("raises", [False, True])
def test_a_binary_is_there_only_as_long_as_it_is_offered(
    raises: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", str(tmp_path / "own"))
    try:
        with cuda_modules.offered("kernel", b"cubin"):
            files = {path.name: path.read_bytes() for path in cuda_modules.folder().iterdir()}
            # std::hash of nothing, as libstdc++ computes it on every 64-bit machine
            assert files == {
                "kernel_553e93901e462a6e.ptx": b"cubin",
                "kernel_553e93901e462a6e.txt": b"kernel\tkernel\n",
            }
            if raises:
                raise RuntimeError("the driver rejects it")
    except RuntimeError:
        assert raises
    assert list(cuda_modules.folder().iterdir()) == []
