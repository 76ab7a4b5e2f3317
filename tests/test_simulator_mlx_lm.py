"""Kernels of the installed mlx-lm, unmodified, on the simulator, against plain MLX in float32."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace

import mlx.core as mx
import pytest

from metile.simulator import installed
from metile.simulator.settings import Settings

MODULES = ("gated_delta", "ssm", "bitlinear_layers", "rwkv7", "deepseek_v41", "kimi_k3")
DTYPES = [mx.float32, mx.float16, mx.bfloat16]
TOLERANCE = {mx.float32: 1e-5, mx.float16: 3e-3, mx.bfloat16: 2.5e-2}  # of the largest element
BATCH, TIME = 2, 3


@pytest.fixture(scope="module")
def models() -> Iterator[SimpleNamespace]:
    """Import the modules anew where Metal seems to be there; afterwards they are as if never imported."""
    names = [f"mlx_lm.models.{name}" for name in MODULES]
    before = {name: sys.modules.pop(name, None) for name in names}
    package = importlib.import_module("mlx_lm.models")
    attributes = {name: vars(package).get(name) for name in MODULES}
    with installed():
        yield SimpleNamespace(**{name: importlib.import_module(f"mlx_lm.models.{name}") for name in MODULES})
    for name, module in before.items():
        sys.modules.pop(name, None)
        if module is not None:
            sys.modules[name] = module
    for name, value in attributes.items():
        if value is not None:
            setattr(package, name, value)


@pytest.fixture(params=[False, True], ids=["fast", "checked"])
def simulator(models: SimpleNamespace, request: pytest.FixtureRequest) -> Iterator[Settings]:
    """Count the launches of a test, in either mode."""
    mx.random.seed(3)
    with installed(check=request.param) as settings:
        yield settings


def near(got: mx.array, want: mx.array, dtype: mx.Dtype) -> None:
    assert got.shape == want.shape
    scale = mx.abs(want).max().item()
    assert scale > 0.05  # otherwise nothing is compared
    error = mx.abs(got.astype(mx.float32) - want).max().item()
    assert error <= TOLERANCE[dtype] * scale


def normal(*shape: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.random.normal(shape).astype(dtype)


def wide(*arrays: mx.array) -> list[mx.array]:
    return [array.astype(mx.float32) for array in arrays]


def gated_delta_inputs(
    models: SimpleNamespace, dtype: mx.Dtype, keys: int, vector: bool
) -> tuple[list[mx.array], mx.array]:
    """Return q, k, v, g, beta and the state; two value heads share a key head."""
    heads = (BATCH, TIME, 4)
    q, k = models.gated_delta.normalize_qk(
        normal(BATCH, TIME, 2, keys), normal(BATCH, TIME, 2, keys), inv_scale=keys**-0.5, eps=1e-6
    )
    v, beta = normal(*heads, 16), mx.sigmoid(normal(*heads))
    g = mx.sigmoid(normal(*heads, keys) if vector else normal(*heads))
    return [q.astype(dtype), k.astype(dtype), v.astype(dtype), g, beta.astype(dtype)], normal(BATCH, 4, 16, keys)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
@pytest.mark.parametrize("vector", [False, True], ids=["scalar", "vector"])
def test_gated_delta(models: SimpleNamespace, simulator: Settings, vector: bool, masked: bool, dtype: mx.Dtype) -> None:
    module: ModuleType = models.gated_delta
    inputs, state = gated_delta_inputs(models, dtype, 64, vector)
    mask = mx.array([[True, False, True], [True, True, False]]) if masked else None
    y, after = module.gated_delta_kernel(*inputs, state, mask)
    want_y, want_after = module.gated_delta_ops(*wide(*inputs), state, mask)
    if mask is not None:
        want_y = mx.where(mask[..., None, None], want_y, 0)  # the kernel writes zeros where nothing is
    near(y, want_y, dtype)
    near(after, want_after, dtype)
    assert y.dtype == dtype
    name = "gated_delta_step" + "_vec" * vector + "_mask" * masked
    assert dict(simulator.launches) == {name: 1}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gated_delta_packed_is_its_comparator_bit_for_bit(
    models: SimpleNamespace, simulator: Settings, dtype: mx.Dtype
) -> None:
    module: ModuleType = models.gated_delta
    inputs, state = gated_delta_inputs(models, dtype, 128, False)
    packed = module.gated_delta_kernel(*inputs, state)
    comparator = module.gated_delta_kernel_xtree(*inputs, state)
    unpacked = module.gated_delta_kernel_unpacked(*inputs, state)
    reference = module.gated_delta_ops(*wide(*inputs), state)
    for index in range(2):
        assert mx.array_equal(packed[index], comparator[index])
        for result in (packed, unpacked):
            near(result[index], reference[index], dtype)
    names = ("gated_delta_step_packed_btree", "gated_delta_step_xtree", "gated_delta_step")
    assert dict(simulator.launches) == dict.fromkeys(names, 1)


def test_gated_delta_update_picks_the_kernel_by_itself(models: SimpleNamespace, simulator: Settings) -> None:
    module: ModuleType = models.gated_delta
    (q, k, v, *_), state = gated_delta_inputs(models, mx.float32, 64, False)
    a, b = normal(BATCH, TIME, 4), normal(BATCH, TIME, 4)
    gates = (a, b, normal(4), normal(4))
    y, after = module.gated_delta_update(q, k, v, *gates, state)
    assert dict(simulator.launches) == {"gated_delta_step": 1}
    want_y, want_after = module.gated_delta_update(q, k, v, *gates, state, use_kernel=False)
    near(y, want_y, mx.float32)
    near(after, want_after, mx.float32)
    assert dict(simulator.launches) == {"gated_delta_step": 1}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("groups", [1, 2])
def test_ssm(models: SimpleNamespace, simulator: Settings, groups: int, dtype: mx.Dtype) -> None:
    module: ModuleType = models.ssm
    heads, width, states = 4, 16, 64
    x, a_log, d = normal(BATCH, 1, heads, width, dtype=dtype), normal(heads, dtype=dtype), normal(heads, dtype=dtype)
    b, c = (normal(BATCH, 1, groups, states, dtype=dtype) for _ in range(2))
    dt, bias = normal(BATCH, 1, heads, dtype=dtype), normal(heads, dtype=dtype)
    state = normal(BATCH, heads, width, states, dtype=dtype)
    arguments = (x, a_log, b, c, d, dt, bias, state)
    y, after = module.ssm_update(*arguments)
    assert dict(simulator.launches) == {"ssm_kernel": 1}
    want_y, want_after = module.ssm_attn(*wide(*arguments))
    near(y, want_y, dtype)
    near(after, want_after, dtype)
    assert y.dtype == after.dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("inverted", [False, True])
def test_bitlinear(models: SimpleNamespace, simulator: Settings, inverted: bool, dtype: mx.Dtype) -> None:
    layer = models.bitlinear_layers.BitLinear(160, 12, bias=False, invert_weight_scales=inverted)
    layer.weight = mx.random.randint(0, 256, layer.weight.shape).astype(mx.uint8) & 0xAA  # 0 or 2: minus one or one
    layer.weight_scale = mx.array([0.375], dtype)
    x = normal(2, 3, 160, dtype=dtype)
    y = layer(x)
    rows = [((layer.weight >> (2 * part)) & 3).astype(mx.float32) - 1 for part in range(4)]
    scale = 1 / 0.375 if inverted else 0.375
    near(y, x.astype(mx.float32) @ mx.concatenate(rows).T * scale, dtype)
    assert y.dtype == dtype
    assert dict(simulator.launches) == {"bitlinear_matmul": 1}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rwkv7(models: SimpleNamespace, simulator: Settings, dtype: mx.Dtype) -> None:
    module: ModuleType = models.rwkv7
    heads, width = 2, 64
    r, k, v = (normal(BATCH, TIME, heads, width, dtype=dtype) * 0.5 for _ in range(3))
    w = mx.sigmoid(normal(BATCH, TIME, heads, width)).astype(dtype)
    a, b = (normal(BATCH, TIME, heads, width, dtype=dtype) * 0.1 for _ in range(2))
    state = normal(BATCH, heads, width, width, dtype=dtype)
    y, after = module.wkv7_kernel(r, w, k, v, a, b, state)
    want, (want_state,) = [], wide(state)
    for t in range(TIME):
        step, want_state = module._wkv7_step_ops(*wide(*(one[:, t] for one in (r, w, k, v, a, b))), want_state)
        want.append(step)
    near(y, mx.stack(want, axis=1).squeeze(-1), dtype)
    near(after, want_state, dtype)
    assert y.dtype == dtype
    assert dict(simulator.launches) == {"wkv7_kernel": 1}


def test_sinkhorn_of_deepseek(models: SimpleNamespace, simulator: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    module: ModuleType = models.deepseek_v41
    comb = mx.sigmoid(normal(2, 5, 4, 4))
    sinkhorn: Callable[[], mx.array] = lambda: module._sinkhorn(comb, iters=4, eps=mx.array([1e-6]))  # noqa: E731
    got = sinkhorn()
    assert dict(simulator.launches) == {"deepseek_v41_sinkhorn": 1}
    monkeypatch.setattr(module, "_sinkhorn_kernel", None)
    near(got, sinkhorn(), mx.float32)


def test_residual_mix_of_kimi(models: SimpleNamespace, simulator: Settings) -> None:
    module: ModuleType = models.kimi_k3
    raw, partial, weight = normal(3, 1, 2, 96), normal(1, 2, 96), normal(96)
    inverse = mx.rsqrt(mx.mean(raw * raw, axis=-1) + 1e-5)
    blocks = SimpleNamespace(raw=raw, inv_rms=inverse)
    got = module._attn_res_mix(blocks, partial, weight, 1e-5)
    assert dict(simulator.launches) == {"attnres_mix": 1}
    near(got, module._attn_res_mix(blocks, partial, weight, 1e-5, use_kernel=False), mx.float32)
    assert dict(simulator.launches) == {"attnres_mix": 1}


def test_the_modules_are_the_installed_ones(models: SimpleNamespace) -> None:
    for name, module in vars(models).items():
        assert "site-packages" in module.__file__, name
