"""The cap on file length, on this checkout and on files made for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def check(root: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "check_lines.py"), str(root)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", ["a.py", "kernels/a.metal", "kernels/host/a.cpp", "a.h", "a.cu"])
def test_a_file_above_the_cap_fails_by_name(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("x\n" * 400)
    assert check(tmp_path).returncode == 0
    (tmp_path / name).write_text("x\n" * 401)
    done = check(tmp_path)
    assert done.returncode == 1
    assert f"{name}: 401 lines" in done.stdout


@pytest.mark.parametrize("name", ["notes.md", "data.json", ".git/a.py", "build/a.py", "env/lib/a.py"])
def test_what_is_no_source_is_not_counted(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("x\n" * 401)
    if name.startswith("env/"):
        (tmp_path / "env" / "pyvenv.cfg").touch()
    assert check(tmp_path).returncode == 0


def test_this_checkout_is_below_the_cap() -> None:
    done = check(ROOT)
    assert done.returncode == 0, done.stdout
