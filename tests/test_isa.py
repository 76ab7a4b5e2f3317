"""Which instruction sets a machine has, and which one is chosen."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from metile.errors import MetileError
from metile.targets import isa
from metile.targets.cpu import CpuTarget
from metile.targets.isa import ISA_VARIABLE, ISAS, current_isa, supported_isas

ICE_LAKE = "fpu sse2 avx2 fma f16c bmi2 avx512f avx512bw avx512dq avx512vl"
COOPER_LAKE = f"{ICE_LAKE} avx512_bf16"
SAPPHIRE_RAPIDS = f"{COOPER_LAKE} amx_bf16 amx_tile"


def cpuinfo(monkeypatch: pytest.MonkeyPatch, text: str | None) -> None:
    """Have /proc/cpuinfo read as `text`, or fail to open."""

    def read_text(self: Path) -> str:
        assert str(self) == "/proc/cpuinfo"
        if text is None:
            raise FileNotFoundError(self)
        return text

    monkeypatch.setattr(isa.platform, "system", lambda: "Linux")
    monkeypatch.setattr(isa.Path, "read_text", read_text)


def names() -> list[str]:
    return [found.name for found in supported_isas()]


@pytest.mark.parametrize(
    ("text", "best"),
    [
        (f"processor : 0\nflags\t\t: {SAPPHIRE_RAPIDS}\n", "amx"),
        (f"processor : 0\nflags\t\t: {COOPER_LAKE}\n", "avx512_bf16"),
        (f"processor : 0\nflags\t\t: {ICE_LAKE}\n", "avx512"),
        ("flags : avx2 fma f16c bmi2\n", "avx2"),
        ("flags : avx2 f16c bmi2\n", "generic"),  # AVX2 without FMA
        ("flags : avx2x fma f16c bmi2\n", "generic"),  # a flag is a word, not a part of one
        ("processor : 0\nFeatures : fp asimd bf16\n", "neon"),
        ("nothing of use\n", "generic"),
        (None, "generic"),
    ],
)
def test_the_best_set_comes_first(monkeypatch: pytest.MonkeyPatch, text: str | None, best: str) -> None:
    monkeypatch.setattr(isa, "_tiles_permitted", lambda: True)
    cpuinfo(monkeypatch, text)
    assert names()[0] == best
    assert names()[-1] == "generic"


def test_tiles_that_the_system_refuses_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isa, "_tiles_permitted", lambda: False)
    cpuinfo(monkeypatch, f"flags : {SAPPHIRE_RAPIDS}\n")
    assert names() == ["avx512_bf16", "avx512", "avx2", "generic"]


def test_darwin_on_arm_has_neon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isa.platform, "system", lambda: "Darwin")
    monkeypatch.setattr(isa.platform, "machine", lambda: "arm64")
    assert names() == ["neon", "generic"]


@pytest.mark.parametrize("wanted", [found.name for found in supported_isas()])
def test_the_variable_forces_a_set(monkeypatch: pytest.MonkeyPatch, wanted: str) -> None:
    monkeypatch.setenv(ISA_VARIABLE, wanted)
    assert current_isa().name == wanted
    target = CpuTarget()
    assert target.isa.name == wanted
    assert target.limits.lanes == target.isa.lanes
    assert wanted in target.chip()


def test_without_the_variable_the_best_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ISA_VARIABLE, raising=False)
    assert current_isa() == supported_isas()[0]


def test_an_unknown_set_is_an_error_that_lists_this_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ISA_VARIABLE, "sse9")
    expected = rf"\[{ISA_VARIABLE}\] expected one of .*generic on this machine but got 'sse9'"
    with pytest.raises(MetileError, match=expected):
        current_isa()


def test_a_set_of_another_machine_is_refused() -> None:
    foreign = next(found for found in ISAS if found not in supported_isas())
    with pytest.raises(MetileError, match=rf"\[cpu\] expected .* but got {foreign.name}"):
        CpuTarget(foreign)


def test_names_and_macros_are_unique() -> None:
    for one, other in itertools.combinations(ISAS, 2):
        assert one.name != other.name
        assert one.macro != other.macro


def test_only_amx_has_tiles() -> None:
    assert [found.name for found in ISAS if found.has_tiles] == ["amx"]


def test_an_unknown_set_stops_a_program_with_one_line() -> None:
    program = "from metile.targets.cpu import CpuTarget; CpuTarget()"
    environment = {**os.environ, ISA_VARIABLE: "AVX2"}  # names are lower case
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith("but got 'AVX2'")
