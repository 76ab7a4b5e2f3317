"""The wheel: what is inside, and that a kernel runs from it where nothing else of metile is."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

import metile
from metile.files import data_root

ROOT = Path(__file__).resolve().parent.parent

pytestmark = pytest.mark.skipif(not (ROOT / "pyproject.toml").is_file(), reason="needs a checkout")

# Compares a kernel from the installed package with numpy, and prints where the package and its kernels lie.
PROGRAM = """
import mlx.core as mx
import numpy as np
import metile
from metile.files import data_root
from metile.ops.linear import LinearKey
from metile.targets.base import KernelSource, Output
from metile.targets.cpu import CpuTarget
from metile.targets.simulated import SimulatedTarget

source = KernelSource(
    name="packaged",
    program="linear.metal",
    body='''const Matrix<const device float> weights[] = {matrix_of<const device float>(w)};
  linear_matrix<float, Store, 32, 32, 1, 1, 1, 0>(
      matrix_of<const device float>(x), weights, matrix_of<device float>(y), Store{}, outer_k,
      schedule_hilbert, group);''',
    inputs=("x", "w"),
    outputs=("y",),
    numbers=("outer_k",),
    scratch="Accumulator<float, 1, 32, 32, 1, 1, 1, 0>::bytes(outer_k) + Stage<float, 32, 0>::bytes(outer_k)",
)
rng = np.random.default_rng(0)
x, w = rng.standard_normal((70, 127), np.float32), rng.standard_normal((65, 127), np.float32)
kernel = CpuTarget().compile(source)
outputs = [Output((70, 65), mx.float32)]
y = kernel([mx.array(x), mx.array(w)], outputs, groups=9, numbers=[127], poison=True)[0]
assert np.allclose(np.array(y), x @ w.T, atol=1e-4)
simulated, key = SimulatedTarget(), LinearKey("store", 4, 65, 127, "float32")
candidate = key.space(simulated.limits)[0]
inputs = [mx.array(x[:3]), mx.array(w)]
y = key.launch(simulated.compile(key.source(candidate)), candidate, inputs)[0]
assert np.allclose(np.array(y), x[:3] @ w.T, atol=1e-4)
print(metile.__file__, data_root("kernels"), sep="\\n")
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from the sdist, with the backend that is installed, so without a network."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_the_wheel_is_pure_and_carries_the_version(wheel: Path) -> None:
    assert wheel.name == f"metile-{metile.__version__}-py3-none-any.whl"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == metile.__version__


def test_nothing_lies_beside_the_package(names: set[str]) -> None:
    tops = {name.partition("/")[0] for name in names}
    assert tops == {"metile", f"metile-{metile.__version__}.dist-info"}


@pytest.mark.parametrize("kind", ["kernels", "suites"])
def test_every_data_file_is_inside(names: set[str], kind: str) -> None:
    root = data_root(kind)
    files = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
    assert files
    assert {f"metile/data/{kind}/{file}" for file in files} <= names


def test_every_module_is_inside_with_its_types_and_licence(names: set[str]) -> None:
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "metile").rglob("*.py")}
    assert modules <= names
    assert "metile/py.typed" in names
    assert any(re.fullmatch(r"metile-.*\.dist-info/licenses/LICENSE", name) for name in names)
    assert not any(name.startswith(("tests/", "tools/")) or "__pycache__" in name for name in names)


def make_environment(folder: Path) -> Path:
    """Make an environment that borrows this one's packages, all but metile; return its Python."""
    venv.create(folder, with_pip=False, symlinks=os.name != "nt")
    python = folder / "bin" / "python"
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    # A line of a .pth file only adds to the path: an editable install's own .pth in there is not read, and
    # what is installed here comes first.
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def test_a_kernel_runs_from_the_wheel_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    python = make_environment(tmp_path / "env")
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps"]
    done = subprocess.run(
        [*install, "--no-index", "--force-reinstall", "--ignore-installed", str(wheel)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [str(python), "-c", PROGRAM],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    package, kernels = map(Path, done.stdout.split("\n")[:2])
    assert package.is_relative_to(tmp_path / "env")
    assert kernels == package.parent / "data" / "kernels"
