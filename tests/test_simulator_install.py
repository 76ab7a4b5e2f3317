"""Standing in for Metal: what other code sees while installed, and that nothing of it stays."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import mlx.core as mx
import pytest

from metile.errors import MetileError
from metile.simulator import FindingsError, custom, install, installed, is_installed, uninstall
from metile.simulator import settings as settings_module
from metile.simulator.settings import CHECK_VARIABLE
from metile.tracing import compiling

module: ModuleType = sys.modules["metile.simulator.install"]  # the function hides it
SEEN = [(mx.fast, "metal_kernel"), (mx.metal, "is_available"), (mx.metal, "device_info"), (mx, "device_info")]
SEEN += [(mx, "gpu")]


def state() -> list[Any]:
    return [*(getattr(owner, name) for owner, name in SEEN), compiling(), settings_module.current()]


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(CHECK_VARIABLE, raising=False)
    before = state()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "imported before the simulator")
        yield
    uninstall()
    after = state()
    assert [id(one) for one in before[:-2]] == [id(one) for one in after[:-2]]
    assert before[-2:] == after[-2:]


def double(x: mx.array) -> mx.array:
    """Do what other people's code does."""
    kernel = mx.fast.metal_kernel(
        name="double",
        input_names=["x"],
        output_names=["y"],
        source="uint i = thread_position_in_grid.x; y[i] = x[i] * 2;",
    )
    return kernel(
        inputs=[x],
        grid=(x.size, 1, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[x.shape],
        output_dtypes=[x.dtype],
        stream=mx.gpu,
    )[0]


def test_without_it_there_is_no_metal() -> None:
    assert not is_installed()
    assert not mx.metal.is_available()
    with pytest.raises(RuntimeError, match="No Metal back-end"):
        double(mx.arange(4))


def test_metal_seems_to_be_there() -> None:
    with installed("m3-max") as simulator:
        assert is_installed()
        assert mx.metal.is_available()
        assert mx.default_device() == mx.gpu
        assert double(mx.arange(40)).tolist() == list(range(0, 80, 2))
        assert simulator.launches["double"] == 1
        with mx.stream(mx.gpu):
            assert mx.add(mx.array(1), mx.array(2), stream=mx.gpu).item() == 3
        info = mx.device_info()
        assert info["device_name"] == "Simulated m3-max"
        assert 0 < info["max_recommended_working_set_size"] < info["memory_size"]
    assert not is_installed()
    assert not mx.metal.is_available()


def test_uninstall_puts_everything_back() -> None:
    before = state()
    install()
    inside = state()
    assert not any(one is other for one, other in zip(before[:5], inside[:5], strict=True))
    uninstall()
    assert [id(one) for one in before[:5]] == [id(one) for one in state()[:5]]
    uninstall()
    assert [id(one) for one in before[:5]] == [id(one) for one in state()[:5]]


def test_a_second_install_changes_settings_only() -> None:
    install("m1")
    double(mx.arange(3))
    inside = state()
    chosen = install("m2", check=True)
    assert [id(one) for one in inside[:5]] == [id(one) for one in state()[:5]]
    assert (chosen.device.name, chosen.check, chosen.launches["double"]) == ("m2", True, 1)
    uninstall()
    assert not is_installed()


def test_contexts_nest() -> None:
    with installed("m1") as outer:
        double(mx.arange(3))
        with installed("m2", check=True) as inner:
            double(mx.arange(3))
            assert settings_module.current() is inner
            assert inner.launches["double"] == 1
        assert is_installed()
        assert settings_module.current() is outer
        assert outer.launches["double"] == 2
    assert not is_installed()


def test_it_is_gone_after_an_error_too() -> None:
    with pytest.raises(KeyError), installed():
        raise KeyError
    assert not is_installed()
    with pytest.raises(MetileError, match="one of m1"), installed("m0"):
        pass
    assert not is_installed()


def test_the_mode_and_the_device_hold_for_every_kernel() -> None:
    source = "y[thread_position_in_grid.x] = x[thread_position_in_grid.x + 1];"
    call = {"inputs": [mx.zeros(9)], "output_shapes": [(9,)], "output_dtypes": [mx.float32], "grid": (9, 1, 1)}
    with installed(check=True):
        kernel = mx.fast.metal_kernel("over", ["x"], ["y"], source)
        with pytest.raises(FindingsError, match="out of bounds"):
            kernel(**call, threadgroup=(9, 1, 1))
    with installed(check=False):
        assert kernel(**call, threadgroup=(9, 1, 1))[0].shape == (9,)
    with installed(custom(pipeline_threads=8)), pytest.raises(ValueError, match=r"\(8\)"):
        mx.fast.metal_kernel("over", ["x"], ["y"], source)(**call, threadgroup=(9, 1, 1))


def test_compiled_functions_run_their_kernels() -> None:
    @mx.compile
    def function(x: mx.array) -> mx.array:
        return double(x) + 1

    with installed() as simulator:
        for count in (1, 2):
            assert function(mx.arange(3)).tolist() == [1, 3, 5]
            assert simulator.launches["double"] == count
        assert not compiling()
    assert compiling()


def test_compilation_stays_off_where_it_was_off() -> None:
    mx.disable_compile()
    try:
        with installed():
            assert not compiling()
        assert not compiling()
    finally:
        mx.enable_compile()


def test_real_metal_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_real_available", lambda: True)
    with pytest.raises(MetileError, match="expected a machine without Metal but got one with it"):
        install()
    assert not is_installed()


def test_modules_that_came_too_early_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    early, fine = ModuleType("mlx_lm.models.early"), ModuleType("mlx_lm.models.fine")
    early._step_kernel = None  # type: ignore[attr-defined]
    fine.kernel_size = 3  # type: ignore[attr-defined]
    for one in (early, fine):
        monkeypatch.setitem(sys.modules, one.__name__, one)
    with pytest.warns(UserWarning, match=r"imported before the simulator was installed.*mlx_lm\.models\.early") as seen:
        install()
    assert "models.fine" not in str(seen[0].message)


def test_a_fresh_process_uses_mlx_lm_as_on_a_mac() -> None:
    """Generation asks for the wired limit and for streams where there is Metal."""
    program = """
import warnings
warnings.simplefilter("error", UserWarning)
from metile.simulator import install
simulator = install(check=True)
import mlx.core as mx
from mlx_lm.generate import generate_step, wired_limit
from mlx_lm.models import qwen3_next
arguments = qwen3_next.ModelArgs(
    model_type="qwen3_next", hidden_size=32, num_hidden_layers=2, intermediate_size=32, num_attention_heads=2,
    linear_num_value_heads=2, linear_num_key_heads=1, linear_key_head_dim=32, linear_value_head_dim=16,
    linear_conv_kernel_dim=4, num_experts=0, num_experts_per_tok=0, decoder_sparse_step=1,
    shared_expert_intermediate_size=16, mlp_only_layers=[0, 1], moe_intermediate_size=16, rms_norm_eps=1e-6,
    vocab_size=50, num_key_value_heads=1, rope_theta=1e4, partial_rotary_factor=0.5, max_position_embeddings=64,
    head_dim=16, full_attention_interval=2)
mx.random.seed(0)
model = qwen3_next.Model(arguments)
model.eval()
with wired_limit(model):
    tokens = [token for token, _ in generate_step(mx.array([1, 2, 3, 4]), model, max_tokens=3)]
launched = sum(simulator.launches.values())
assert launched >= 3, simulator.launches
from mlx_lm.models import gated_delta
assert all(name.startswith("gated_delta_step") for name in simulator.launches)
print("tokens", len(tokens), "launches", launched)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("tokens 3 launches ")
