"""The CUDA target without a GPU: its texts, its launches as MLX would get them, and what a driver says.

Where NVRTC is found, what the target compiles is really compiled; everywhere, launches are recorded, not run.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from metile.errors import MetileError
from metile.ops.attention import AttentionKey
from metile.ops.attention_space import AttentionTile
from metile.ops.linear import LinearKey
from metile.ops.linear_tile import LinearTile
from metile.ops.norm import NormKey, NormTile
from metile.search import CompilesMany
from metile.targets import choose_target, cuda_modules, nvrtc
from metile.targets.base import KernelSource, Output, Target
from metile.targets.compiler import CompileError
from metile.targets.cuda import CudaKernel, CudaTarget, Machine, knows_numbers
from metile.targets.cuda_device import CudaDevice
from metile.targets.cuda_text import checked_view_text, kernel_text, view_text
from metile.targets.nvrtc import Binary, Program

HOPPER = CudaDevice("NVIDIA H200", (9, 0), (13, 0), 32, 1024, 232448, 65536, 132, 60 << 20)
ROWS = LinearTile("rows", 1, 32, 1, 8, 2, 0, "linear")
MATRIX = LinearTile("matrix", 16, 32, 1, 2, 1, 64, "linear")
LINEAR = LinearKey("bias", 16, 96, 256, "bfloat16")
ATTENTION = AttentionKey(1, 256, 4, 2, 64, "float16")
SOURCE = KernelSource("k", "norm.metal", "y.data[0] = count;", ("x", "w"), ("y",), ("count", "depth"), "4 * depth",
                      (), ("depth",), 2)  # fmt: skip


@dataclass
class World:
    """A GPU that records: programs that were compiled, launches with what MLX would be told, modules that it found."""

    scratch: int = 64
    programs: list[Program] = field(default_factory=list)
    launches: list[dict[str, Any]] = field(default_factory=list)
    texts: list[dict[str, Any]] = field(default_factory=list)
    rejects: Callable[[Program], bool] = lambda program: False
    fails: str = ""
    looks_for_modules: bool = True
    loaded: dict[str, bytes] = field(default_factory=dict)

    @property
    def machine(self) -> Machine:
        return Machine(HOPPER, self._launch, self._jit, self._compile)

    @property
    def target(self) -> CudaTarget:
        return CudaTarget(self.machine)

    def _compile(self, program: Program, architecture: str) -> Binary:
        assert architecture == "sm_90a"
        self.programs.append(program)
        if self.rejects(program):
            raise CompileError("[cuda] error: rejected")
        return Binary(f"cubin {len(self.programs)}".encode(), (self.scratch,))

    def _launch(self, **launch: Any) -> list[mx.array]:
        if self.fails:
            raise RuntimeError(self.fails)
        offered = cuda_modules.folder() / f"{launch.get('name', '')}_553e93901e462a6e.ptx"
        if launch.get("compiled_source") == b"" and launch["name"] not in self.loaded:
            if not self.looks_for_modules or not offered.is_file():
                raise RuntimeError("Failed to load compiled kernel")
            self.loaded[launch["name"]] = offered.read_bytes()
        self.launches.append(launch)
        kinds = zip(launch["output_shapes"], launch["output_dtypes"], strict=True)
        return [mx.full(shape, launch.get("init_value", 1.0), dtype) for shape, dtype in kinds]

    def _jit(self, **text: Any) -> Callable[..., list[mx.array]]:
        self.texts.append(text)
        return self._launch


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what MLX looks for out of its own folder."""
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", str(tmp_path / "modules"))
    cuda_modules.folder().mkdir()


@pytest.fixture
def world() -> World:
    return World()


def test_the_target_is_one(world: World) -> None:
    target: Target = world.target
    assert (target.name, target.timed, target.chip()) == ("cuda", True, "NVIDIA H200")
    assert isinstance(target, CompilesMany)
    assert target.prepare([mx.zeros((8,))]) == 0
    limits = target.limits
    assert limits.is_gpu
    assert (limits.lanes, limits.threads, limits.threadgroup_bytes) == (32, 1024, 232448)
    assert (limits.tile_rows, limits.tile_dtypes) == (16, ("bfloat16", "float16"))


def test_a_launch_is_what_the_text_expects(world: World) -> None:
    inputs = LINEAR.example(13, seed=0)
    kernel = world.target.compile(LINEAR.source(MATRIX))
    (y,) = LINEAR.launch(kernel, MATRIX, [inputs[0].reshape(1, 13, 256), *inputs[1:]])
    assert y.shape == (1, 13, 96)
    assert y.dtype == mx.bfloat16
    first, launch = world.launches
    groups, shapes = 3, [3, 1, 13, 256, 0, 2, 96, 256, 0, 0, 1, 96, 0, 0, 0, 3, 1, 13, 96, 0]
    assert list(launch["scalars"]) == [groups, 64, 64, 0, *shapes]
    assert (launch["grid"], launch["threadgroup"]) == ((groups * 64, 1, 1), (64, 1, 1))
    assert launch["shared_memory"] == first["shared_memory"] == 64
    assert launch["ensure_row_contiguous"]
    assert "init_value" not in launch
    # The binary is found once, by a launch that finds no threadgroup to run; nothing is ever handed over.
    assert (first["compiled_source"], launch["compiled_source"]) == (b"", b"")
    assert world.loaded == {launch["name"]: b"cubin 1"}
    assert list(cuda_modules.folder().iterdir()) == []
    assert first["name"] == launch["name"]
    assert set(first["scalars"]) == {0}
    (program,) = world.programs
    parameters = re.search(rf"{launch['name']}\(([^)]*)\)", program.text)
    assert parameters is not None
    kinds = [parameter.rsplit(" ", 1)[0] for parameter in parameters[1].split(", ")]
    assert kinds == ["const void*"] * 3 + ["void*"] + ["int"] * len(launch["scalars"])
    assert parameters[1].startswith("const void* x_data, const void* w0_data, const void* extra_data, void* y_data, ")
    assert "__launch_bounds__(64)" in program.text


def test_an_mlx_that_looks_for_no_modules_is_handed_the_binary(world: World) -> None:
    world.looks_for_modules = False
    kernel = world.target.compile(SOURCE)
    for _ in range(2):
        kernel([mx.zeros((1,))] * 2, [Output((1,), mx.float32)], groups=1, numbers=(0, 0))
    assert [launch["compiled_source"] for launch in world.launches] == [b"cubin 1"] * 3


def test_a_folder_that_cannot_be_written_does_not_matter(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, data: bytes) -> None:
        raise OSError(f"{path} {len(data)}")

    monkeypatch.setattr("metile.targets.cuda_modules.write_atomic", refuse)
    kernel = world.target.compile(SOURCE)
    kernel([mx.zeros((1,))] * 2, [Output((1,), mx.float32)], groups=1, numbers=(0, 0))
    assert [launch["compiled_source"] for launch in world.launches] == [b"cubin 1"] * 2


def test_a_poisoned_launch_begins_with_nan(world: World) -> None:
    key = NormKey(True, 4, 96, 1e-5, "float16")
    results = key.launch(
        world.target.compile(key.source(NormTile(1, 1))), NormTile(1, 1), key.example(3, 0), poison=True
    )
    assert math.isnan(world.launches[-1]["init_value"])
    assert all(mx.isnan(result).all() for result in results)


def test_no_threadgroups_is_no_launch(world: World) -> None:
    kernel = world.target.compile(SOURCE)
    outputs = [Output((0, 4), mx.float16)]
    inputs = [mx.zeros((0, 4)), mx.zeros((4,))]
    for results in (kernel(inputs, outputs, groups=0, numbers=(1, 2)),
                    kernel.bind(outputs, groups=0, numbers=(1, 2))(inputs)):  # fmt: skip
        assert [(array.shape, array.dtype) for array in results] == [((0, 4), mx.float16)]
    assert world.launches == []


def test_a_bound_launch_follows_the_shapes_it_gets(world: World) -> None:
    kernel = world.target.compile(SOURCE)
    call = kernel.bind([Output((2,), mx.float32)], groups=5, numbers=(7, 16))
    for length in (3, 4, 3):
        assert len(call([mx.zeros((length,)), mx.zeros((1, 1))])) == 1
    scalars = [list(launch["scalars"]) for launch in world.launches[1:]]
    expected = [[5, 7, 16, 1, length, 0, 0, 0, 2, 1, 1, 0, 0, 1, 2, 0, 0, 0] for length in (3, 4, 3)]
    assert scalars == expected
    assert len(world.programs) == 1


def test_more_axes_than_four_are_folded(world: World) -> None:
    kernel = world.target.compile(SOURCE)
    kernel([mx.zeros((2, 3, 1, 4, 5)), mx.zeros((1,))], [Output((1,), mx.float32)], groups=1, numbers=(0, 0))
    assert list(world.launches[-1]["scalars"][3:8]) == [4, 6, 1, 4, 5]


def test_each_depth_of_a_slice_is_a_form(world: World) -> None:
    kernel = world.target.compile(LINEAR.source(MATRIX))
    assert world.programs == []  # no depth is known before a launch
    inputs = LINEAR.example(16, seed=0)
    for depth in (64, 32, 64):
        tile = LinearTile("matrix", 16, 32, 1, 2, 1, depth, "linear")
        LINEAR.launch(kernel, tile, inputs)
    assert len(world.programs) == 2
    assert len({launch["name"] for launch in world.launches}) == 2
    assert "constexpr Index outer_k = 64;" in world.programs[0].text


def test_many_kernels_are_compiled_for_what_launches_want(world: World) -> None:
    target = world.target
    world.rejects = lambda program: "outer_k = 16;" in program.text or "epilogue = 9" in program.text
    kernels = target.compile_all([LINEAR.source(MATRIX), LINEAR.source(ROWS)])
    assert all(isinstance(kernel, CudaKernel) for kernel in kernels)
    assert len(world.programs) == 2 + 1  # both depths that tiles of the kernel may have
    LINEAR.launch(kernels[0], MATRIX, LINEAR.example(16, seed=0))  # type: ignore[arg-type]
    assert len(world.programs) == 3
    with pytest.raises(CompileError, match="rejected"):
        LINEAR.launch(kernels[0], LinearTile("matrix", 16, 32, 1, 2, 1, 16, "linear"), LINEAR.example(16, 0))  # type: ignore[arg-type]
    world.rejects = lambda program: True
    (error,) = target.compile_all([NormKey(False, 1, 64, 1e-5, "float32").source(NormTile(1, 1))])
    assert isinstance(error, CompileError)


def test_forms_are_compiled_as_they_are_wanted(world: World) -> None:
    world.rejects = lambda program: "outer_k = 32;" in program.text
    source, norm = LINEAR.source(MATRIX), NormKey(False, 1, 64, 1e-5, "float32").source(NormTile(1, 1))
    kernels = world.target.compile_forms([(source, [64]), (source, [32]), (norm, []), (LINEAR.source(ROWS), [0])])
    assert [isinstance(kernel, CompileError) for kernel in kernels] == [False, True, False, False]
    assert len(world.programs) == 4
    LINEAR.launch(kernels[0], MATRIX, LINEAR.example(16, seed=0))  # type: ignore[arg-type]
    assert len(world.programs) == 4


def test_a_kernel_is_compiled_once(world: World) -> None:
    target = world.target
    source = NormKey(False, 1, 64, 1e-5, "float32").source(NormTile(1, 1))
    assert target.compile(source) is target.compile(source)
    assert len(world.programs) == 1


def test_more_threadgroup_memory_than_there_is_is_rejected() -> None:
    world = World(scratch=HOPPER.threadgroup_bytes + 1)
    with pytest.raises(CompileError, match="at most 232448 bytes of threadgroup memory but got 232449"):
        world.target.compile(NormKey(False, 1, 64, 1e-5, "float32").source(NormTile(1, 1)))


def test_a_binary_that_the_driver_rejects_is_a_rejected_kernel(world: World) -> None:
    kernel = world.target.compile(SOURCE)
    world.fails = "Failed to load compiled k kernel"
    with pytest.raises(CompileError, match="Failed to load"):
        kernel([mx.zeros((1,))] * 2, [Output((1,), mx.float32)], groups=1, numbers=(0, 0))


def test_wrong_launches_are_refused(world: World) -> None:
    kernel = world.target.compile(SOURCE)
    output = [Output((1,), mx.float32)]
    for inputs, numbers in (([mx.zeros((1,))], (1, 2)), ([mx.zeros((1,))] * 2, (1,))):
        with pytest.raises(MetileError, match=r"\[k\] expected numbers"):
            kernel(inputs, output, groups=1, numbers=numbers)
    with pytest.raises(MetileError, match="threads"):
        kernel([mx.zeros((1,))] * 2, output, groups=1 << 26, numbers=(1, 2))


def attention(world: World, tokens: int = 200) -> None:
    tile = AttentionTile("rows", 1, 32, 4)
    q, k, v = ATTENTION.example(1, seed=0)
    kernel = world.target.compile(ATTENTION.source(tile))
    ATTENTION.attend(kernel, tile, [q, k[..., :tokens, :], v[..., :tokens, :]], scale=0.125, causal=True)


def test_whole_arrays_need_no_views(world: World) -> None:
    tile = AttentionTile("rows", 1, 32, 4)
    kernel = world.target.compile(ATTENTION.source(tile))
    ATTENTION.attend(kernel, tile, ATTENTION.example(1, seed=0), scale=0.125, causal=True, tokens=33, whole=True)
    assert world.texts == []
    assert list(world.launches[-1]["scalars"][3:6]) == [4, 33, 1]
    assert "strided_array(" not in world.programs[-1].text.rpartition("__global__")[2]


def test_views_are_launched_with_their_strides(world: World) -> None:
    attention(world, 100)
    (text,), (launch,) = world.texts, world.launches
    assert text["input_names"] == ["sizes", "q_data", "k_data", "v_data"]
    assert text["output_names"] == ["y_data"]
    assert not text["ensure_row_contiguous"]
    assert text["shared_memory"] == 64
    for name in ("q", "k", "v"):
        assert f"{name}_data_strides" in text["source"]
    for word in ("_shape", "_ndim"):  # which would change MLX's signature
        assert not re.search(rf"_data{word}\b", text["source"])
    sizes, _, k, _ = launch["inputs"]
    assert sizes.dtype == mx.int32
    assert sizes.tolist()[6:21] == [4, 1, 4, 1, 64, 4, 1, 2, 100, 64, 4, 1, 2, 100, 64]
    assert k.shape == (1, 2, 100, 64)
    assert launch["threadgroup"] == (128, 1, 1)
    assert launch["grid"] == (2 * 128, 1, 1)


def test_the_text_for_views_says_what_mlx_leaves_out(world: World) -> None:
    attention(world)
    header: str = world.texts[0]["header"]
    assert "#define METILE_VIEWS" in header
    assert header.rstrip().endswith("__launch_bounds__(128)")
    assert "//" not in header
    assert '#include "' not in header


def test_inputs_that_are_no_views_are_made_contiguous(world: World) -> None:
    source = dataclasses.replace(SOURCE, strided=SOURCE.inputs[:1])
    kernel = world.target.compile(source)
    arrays, outputs = [mx.zeros((1, 3, 128)), mx.zeros((128, 8)).T], [Output((1,), mx.float16)]
    kernel(arrays, outputs, groups=1, numbers=(0, 0))
    other = world.launches[0]["inputs"][2]
    assert other.shape == (8, 128)
    assert memoryview(other).c_contiguous
    with pytest.raises(MetileError, match="at most 4 axes"):
        kernel([mx.zeros((1,) * 5), arrays[1]], outputs, groups=1, numbers=(0, 0))


def test_which_kernels_know_numbers() -> None:
    assert knows_numbers(LINEAR.source(MATRIX))
    assert not knows_numbers(LINEAR.source(ROWS))
    assert knows_numbers(SOURCE)
    with pytest.raises(MetileError, match=r"expected values of \('depth',\)"):
        kernel_text(SOURCE, (), "k")


# ---- without a GPU ----


@pytest.mark.skipif(mx.cuda.is_available(), reason="this machine has an NVIDIA GPU")
def test_cuda_cannot_be_chosen_without_a_gpu() -> None:
    with pytest.raises(MetileError, match=r"mlx\[cuda13\].* but got cuda"):
        choose_target("cuda")


# ---- what NVRTC says ----


def _nvrtc() -> bool:
    try:
        nvrtc.library()
    except CompileError:
        return False
    return True


@pytest.mark.skipif(not _nvrtc(), reason="needs NVRTC: pip install nvidia-cuda-nvrtc")
@pytest.mark.parametrize("view", [False, True], ids=["plain", "views"])
def test_texts_compile_and_tell_their_threadgroup_memory(view: bool) -> None:
    if view:
        source = ATTENTION.source(AttentionTile("rows", 1, 32, 4))
        program = Program(source.name, checked_view_text(source, (), "k"), ("metile_scratch",))
        assert view_text(source, ()).header in program.text
    else:
        source = LINEAR.source(MATRIX)
        program = Program(source.name, kernel_text(source, (64,), "k"), ("metile_scratch",), ("--device-as-default-execution-space",))  # fmt: skip  # noqa: E501
    binary = nvrtc.compile_program(program, "sm_90a" if not view else "sm_90")
    # Eight slices of 16 rows of x and 32 of weights, 64 deep.
    assert binary.constants[0] == 8 * (16 + 32) * 64 * 2 if not view else binary.constants[0] > 0
