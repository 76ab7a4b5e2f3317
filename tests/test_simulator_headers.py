"""Every kernel header that the installed MLX brings compiles, with instantiations of each kernel it holds."""

import re
from pathlib import Path

import mlx.core as mx
import pytest
from simulator_headers import AFTER_TEXT, BEFORE, BEFORE_TEXT, INSTANTIATIONS, TYPES

from metile.simulator import clang
from metile.simulator.clang import Build
from metile.simulator.parameters import entry_text
from metile.simulator.repair import compile_text
from metile.simulator.rewrite import rewrite

INCLUDE = Path(mx.__file__).parent / "include"
FOLDER = INCLUDE / "mlx" / "backend" / "metal" / "kernels"
KERNEL = re.compile(r"\[\[\s*kernel\b[^;{]*?\]\]\s*void\s+(\w+)\s*\(")
CONSTANT = re.compile(r"function_constant\((\d+)\)")
# nax: tensor operations of M5 GPUs, which are not simulated.
HEADERS = sorted(str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*.h") if "nax" not in path.name)


def kernels(header: str) -> list[str]:
    return sorted(set(KERNEL.findall(re.sub(r"//[^\n]*", "", (FOLDER / header).read_text()))))


def compile_header(header: str, build: Build) -> None:
    before = [] if header in ("bf16.h", "steel/defines.h") else ["utils.h", *BEFORE.get(header, ())]
    include = '#include "mlx/backend/metal/kernels/{}"\n'
    text = "#include <metal_stdlib>\nusing namespace metal;\n" + "".join(include.format(name) for name in before)
    text += BEFORE_TEXT.get(header, "") + include.format(header) + AFTER_TEXT.get(header, "")
    constants = dict.fromkeys(map(int, CONSTANT.findall((FOLDER / header).read_text())), 1)
    rewritten = rewrite(clang.preprocess(text, (INCLUDE,), (), "header"), constants)
    wanted = []
    for name, arguments in INSTANTIATIONS.get(header, {}).items():
        for one in dict.fromkeys(each.replace("{T}", kind) for each in arguments for kind in TYPES):
            wanted.append((f"{name}<{one}>" if one else name, rewritten.kernels[name]))
    body = "".join(entry_text(number, name, kernel.parameters) for number, (name, kernel) in enumerate(wanted))
    unit = f'{rewritten.text}\n# 1 "<entries>"\n{body}'
    compile_text(unit, build, ("-fsyntax-only",), text, "header", (INCLUDE,))


def test_every_kernel_has_an_instantiation():
    held = {header: kernels(header) for header in HEADERS}
    assert {header: names for header, names in held.items() if names} == {
        header: sorted(names) for header, names in INSTANTIATIONS.items()
    }


@pytest.mark.parametrize("header", HEADERS)
def test_header_compiles(header):
    compile_header(header, Build())


@pytest.mark.parametrize("header", [name for name in HEADERS if "steel" in name and "kernels/" in name])
def test_header_compiles_once_per_simdgroup(header):
    compile_header(header, Build(once_per_simdgroup=True))
