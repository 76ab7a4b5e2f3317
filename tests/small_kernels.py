"""Kernels for the tests of the CPU target, each as small as its test allows."""

from __future__ import annotations

import mlx.core as mx

from metile.targets.base import KERNEL_TYPES, KernelSource, Output

BLOCK = 32


def linear_source(dtype: mx.Dtype = mx.float32) -> KernelSource:
    """Return y = x · wᵀ in blocks of 32 x 32; its one number is the depth of a slice of k."""
    t = KERNEL_TYPES[dtype]
    tile = f"{BLOCK}, {BLOCK}, 1, 1, 1, 0"
    return KernelSource(
        name=f"test_linear_{t}",
        program="linear.metal",
        body=f"""const Matrix<const device {t}> weights[] = {{matrix_of<const device {t}>(w)}};
  linear_matrix<{t}, Store, {tile}>(
      matrix_of<const device {t}>(x), weights, matrix_of<device {t}>(y), Store{{}}, outer_k,
      schedule_linear, group);""",
        inputs=("x", "w"),
        outputs=("y",),
        numbers=("outer_k",),
        scratch=f"Accumulator<{t}, 1, {tile}>::bytes(outer_k) + Stage<{t}, {BLOCK}, 0>::bytes(outer_k)",
    )


def linear(kernel: object, x: mx.array, w: mx.array, **options: bool) -> mx.array:
    """Launch a kernel of `linear_source` on x [..., K] and w [N, K]."""
    rows = x.size // x.shape[-1] if x.size else 0
    groups = -(-rows // BLOCK) * -(-w.shape[0] // BLOCK)
    outputs = [Output((*x.shape[:-1], w.shape[0]), x.dtype)]
    return kernel([x, w], outputs, groups=groups, numbers=[w.shape[1]], **options)[0]  # type: ignore[operator]


def elementwise_source(name: str, statement: str, *, inputs: tuple[str, ...] = ("x",)) -> KernelSource:
    """Return a kernel whose group i runs `statement` with pointers named as its arrays, in float32."""
    pointers = "\n  ".join(f"const float* {array}_ = static_cast<const float*>({array}.data);" for array in inputs)
    body = f"""{pointers}
  float* y_ = static_cast<float*>(y.data);
  const uint i = group.index;
  {statement}"""
    return KernelSource(name=name, program="linear.metal", body=body, inputs=inputs, outputs=("y",))
