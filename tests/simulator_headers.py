"""What to include before MLX's kernel headers, and one or more instantiations of each kernel in them."""

from __future__ import annotations

STEEL = ("steel/gemm/gemm.h",)
CONV = ("steel/conv/conv.h", "steel/gemm/gemm.h")
REDUCE = ("atomic.h", "reduction/ops.h")
# MLX's sources include these before a header, which does not always include what it needs itself.
BEFORE: dict[str, tuple[str, ...]] = {
    "binary.h": ("binary_ops.h",),
    "binary_two.h": ("binary_ops.h",),
    "fp_quantized.h": (*STEEL, "quantized_utils.h"),
    "indexing/masked_scatter.h": ("indexing/indexing.h",),
    "indexing/scatter.h": REDUCE,
    "indexing/scatter_axis.h": REDUCE,
    "quantized.h": (*STEEL, "quantized_utils.h"),
    "reduce.h": REDUCE,
    "reduction/ops.h": ("atomic.h",),
    "reduction/reduce_all.h": REDUCE,
    "reduction/reduce_col.h": REDUCE,
    "reduction/reduce_init.h": REDUCE,
    "reduction/reduce_row.h": REDUCE,
    "searchsorted.h": ("sort.h",),
    "steel/conv/kernels/steel_conv.h": CONV,
    "steel/conv/kernels/steel_conv_3d.h": CONV,
    "steel/conv/kernels/steel_conv_general.h": CONV,
    "steel/conv/loader.h": CONV,
    "steel/conv/loaders/loader_channel_l.h": CONV,
    "steel/conv/loaders/loader_channel_n.h": CONV,
    "steel/conv/loaders/loader_general.h": CONV,
    "steel/gemm/kernels/steel_gemm_fused.h": STEEL,
    "steel/gemm/kernels/steel_gemm_gather.h": STEEL,
    "steel/gemm/kernels/steel_gemm_masked.h": STEEL,
    "steel/gemm/kernels/steel_gemm_segmented.h": STEEL,
    "steel/gemm/kernels/steel_gemm_splitk.h": STEEL,
    "ternary.h": ("ternary_ops.h",),
    "unary.h": ("unary_ops.h",),
}

_BINARY = {
    **dict.fromkeys(("binary_ss", "binary_sv", "binary_vs", "binary_vv", "binary_sv2", "binary_vs2", "binary_vv2"), ""),
    **dict.fromkeys(("binary_g_nd1", "binary_g_nd2", "binary_g_nd3"), ", int"),
    "binary_g": ", 4, int",
}
_OPERATIONS = (
    *(f"{{T}}, {{T}}, {op}" for op in ("Add", "Divide", "Remainder", "LogAddExp", "Maximum", "Power", "FloorDivide")),
    *(f"{{T}}, bool, {op}" for op in ("Equal", "NaNEqual", "Less", "LogicalAnd")),
    *("float, float, ArcTan2", "complex64_t, complex64_t, Power", "complex64_t, complex64_t, Multiply"),
    *("int, int, BitwiseXor", "uint8_t, uint8_t, LeftShift", "int64_t, int64_t, Remainder", "uint, uint, FloorDivide"),
)
_UNARY = (
    *[
        "Abs",
        "ArcCos",
        "ArcCosh",
        "ArcSin",
        "ArcSinh",
        "ArcTan",
        "ArcTanh",
        "Ceil",
        "Cos",
        "Cosh",
        "Erf",
        "ErfInv",
        "Exp",
        "Expm1",
        "Floor",
        "Log",
        "Log2",
        "Log10",
    ],
    *["Log1p", "Negative", "Round", "Rsqrt", "Sigmoid", "Sign", "Sin", "Sinh", "Sqrt", "Square", "Tan", "Tanh"],
)
_UNARY_ARGUMENTS = (
    *(f"{{T}}, {{T}}, {op}" for op in _UNARY),
    *(f"complex64_t, complex64_t, {op}" for op in ("Exp", "Sqrt", "Conjugate", "Log", "Sin", "Tanh", "Abs", "Rsqrt")),
    *("complex64_t, float, Real", "int, int, Abs", "uint, uint, BitwiseInvert", "bool, bool, LogicalNot"),
    *("float, uint8_t, ToFP8", "bfloat16_t, uint8_t, ToFP8", "uint8_t, bfloat16_t, FromFP8", "uint8_t, float, FromFP8"),
)
_COPIES = (
    *("{T}, float", "{T}, half", "{T}, bfloat16_t", "{T}, int", "{T}, bool", "{T}, complex64_t", "int64_t, {T}"),
    *("bool, {T}", "uint8_t, {T}", "complex64_t, complex64_t"),
)
_COPY_TAILS = {
    **dict.fromkeys(("copy_s", "copy_v", "copy_s2", "copy_v2"), ""),
    **dict.fromkeys(("copy_g_nd1", "copy_g_nd2", "copy_g_nd3", "copy_gg_nd1", "copy_gg_nd2", "copy_gg_nd3"), ", int"),
    **dict.fromkeys(("copy_gg_dynamic_nd1", "copy_gg_dynamic_nd2", "copy_gg_dynamic_nd3"), ", int"),
    **dict.fromkeys(("copy_g", "copy_gg", "copy_gg_dynamic"), ", 2, int"),
}
_REDUCTIONS = (
    *("{T}, {T}, Sum<{T}>", "{T}, {T}, Prod<{T}>", "{T}, {T}, Min<{T}>", "{T}, {T}, Max<{T}>"),
    *("bool, bool, And<bool>", "bool, bool, Or<bool>", "complex64_t, complex64_t, Sum<complex64_t>"),
    *("int64_t, int64_t, Max<int64_t>", "uint8_t, int32_t, Sum<int32_t>"),
)
_SCANS = (
    *("{T}, {T}, CumSum<{T}>", "{T}, {T}, CumMax<{T}>", "{T}, {T}, CumLogaddexp<{T}>"),
    *("int64_t, int64_t, CumProd<int64_t>", "complex64_t, complex64_t, CumSum<complex64_t>"),
)
_TILE = "{T}, 64, 64, 16, 2, 2"
_GEMM = (f"{_TILE}, false, true", f"{_TILE}, true, false")
_MASKED = tuple(
    f"{{T}}, {masks}64, 64, 16, 2, 2, false, true, {aligned}"
    for masks, aligned in (
        ("bool, bool, ", "true, true"),
        ("{T}, {T}, ", "false, false"),
        ("nomask_t, bool, ", "true, true"),
    )
)
_QUANTIZED = (("64", "4"), ("32", "8"), ("128", "3"), ("64", "5"), ("64", "6"), ("64", "2"))
_MX = (("32", "4"), ("32", "8"), ("16", "4"))


def _each(names: dict[str, str], arguments: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    return {name: tuple(one + tail for one in arguments) for name, tail in names.items()}


def _formats(pairs: tuple[tuple[str, str], ...], tail: str) -> tuple[str, ...]:
    return tuple(f"{{T}}, {group}, {bits}{tail}" for group, bits in pairs)


def _quantized(prefix: str, pairs: tuple[tuple[str, str], ...]) -> dict[str, tuple[str, ...]]:
    tails = {
        "qmv_quad": ", 64, false",
        "qmv_fast": ", false",
        "qmv": ", true",
        "qmv_wide": ", 4, 8, false",
        "qvm": ", false",
        "qvm_split_k": ", 8",
        "qmm_t": ", true, false",
        "qmm_t_splitk": ", false",
        "qmm_n": ", false",
        "gather_qmv_fast": "",
        "gather_qmv": "",
        "gather_qvm": "",
        "gather_qmm_t": ", true",
        "gather_qmm_n": "",
        "gather_qmm_rhs": ", 16, 32, 32, 1, 2, true",
    }
    return {f"{prefix}_{name}": _formats(pairs, tail) for name, tail in tails.items()}


# Template arguments of each kernel by header; {T} stands for float, half and bfloat16_t in turn. "" is no template.
INSTANTIATIONS: dict[str, dict[str, tuple[str, ...]]] = {
    "arange.h": {"arange": ("{T}", "int", "uint8_t", "int64_t")},
    "binary.h": _each(_BINARY, _OPERATIONS),
    "binary_two.h": _each(_BINARY, ("{T}, {T}, DivMod", "int, int, DivMod")),
    "copy.h": _each(_COPY_TAILS, _COPIES),
    "cross_entropy.h": {"cross_entropy": ("{T}",), "cross_entropy_vjp": ("{T}",)},
    "dot.h": {"dot_product": ("{T}, 8, 1024, 32",)},
    "fft.h": {
        "generate_bluestein_twiddles": ("",),
        "fft": ("256, float2, float2", "256, float, float2", "256, float2, float"),
        "rader_fft": ("256, float2, float2", "256, float, float2"),
        "bluestein_fft": ("256, float2, float2", "256, float2, float"),
        "four_step_fft": ("256, float2, float2, 0", "256, float2, float2, 1", "256, float, float2, 0, true"),
    },
    "fp_quantized.h": {
        **_quantized("fp", _MX),
        **dict.fromkeys(
            ("fp_quantize", "fp_dequantize", "fp_quantize_dequantize"), (*_formats(_MX, ", false"), "{T}, 16, 4, true")
        ),
    },
    "gated_delta_update.h": {
        "gated_delta_fused_chunk": ("{T}, 128, 128, 16, 32, 16",),
        "gated_delta_seq": ("{T}, 128, 128, 16, 32, 0",),
    },
    "gated_delta_update_vjp.h": {"gated_delta_vjp_seq": ("{T}, 128, 128, 16, 32, 16",)},
    "gemv.h": {
        **dict.fromkeys(
            ("gemv", "gemv_t"), ("{T}, 4, 1, 1, 32, 4, 4, true, true", "complex64_t, 1, 4, 4, 8, 4, 4, false, false")
        ),
        **dict.fromkeys(("gemv_gather", "gemv_t_gather"), ("{T}, 4, 1, 1, 32, 4, 4",)),
        **dict.fromkeys(("gemv_wide", "gemv_wide_gather"), ("{T}, 4, 8",)),
    },
    "gemv_masked.h": dict.fromkeys(
        ("gemv_masked", "gemv_t_masked"),
        ("{T}, bool, bool, 2, 2, 4, 8, 4, 4, true", "{T}, {T}, nomask_t, 1, 1, 4, 8, 4, 4, false"),
    ),
    "hadamard.h": {"hadamard_n": ("{T}, 256, 16, 4",), "hadamard_m": ("{T}, 64, 12, 4", "{T}, 64, 20, 4")},
    "indexing/gather_axis.h": {
        "gather_axis": ("{T}, uint32_t, int, true, true", "int64_t, int64_t, int64_t, false, true")
    },
    "indexing/gather_front.h": {"gather_front": ("{T}, uint32_t, int, 2", "bool, int64_t, int64_t, 4")},
    "indexing/masked_scatter.h": {"masked_assign_impl": ("{T}, true", "complex64_t, false")},
    "indexing/scatter.h": {
        "slice_update_op_impl": (
            *("{T}, int, Sum<{T}>, true, true, false, 4, 1", "{T}, int64_t, Max<{T}>, false, false, true, 1, 0"),
            "int, int, Prod<int>, false, true, false, 1, 2",
        )
    },
    "indexing/scatter_axis.h": {
        "scatter_axis": ("{T}, uint32_t, int, Sum<{T}>, true, true", "{T}, int, int64_t, None, false, true")
    },
    "logsumexp.h": {"logsumexp": ("{T}",), "logsumexp_looped": ("{T}",)},
    "quantized.h": {
        **_quantized("affine", _QUANTIZED),
        "affine_quantize": _formats(_QUANTIZED, ""),
        "affine_dequantize": _formats(_QUANTIZED, ""),
    },
    "reduction/reduce_all.h": {"all_reduce": _REDUCTIONS},
    "reduction/reduce_col.h": {
        **dict.fromkeys(("col_reduce_small", "col_reduce_longcolumn"), tuple(f"{one}, int, 1" for one in _REDUCTIONS)),
        **dict.fromkeys(
            ("col_reduce_looped", "col_reduce_2pass"), tuple(f"{one}, int, 2, 32, 32" for one in _REDUCTIONS)
        ),
    },
    "reduction/reduce_init.h": {"init_reduce": ("{T}, Sum<{T}>", "bool, And<bool>", "int, Max<int>")},
    "reduction/reduce_row.h": {
        **dict.fromkeys(("row_reduce_small", "row_reduce_looped"), tuple(f"{one}, int, 2" for one in _REDUCTIONS)),
        "row_reduce_simple": _REDUCTIONS,
    },
    "scan.h": dict.fromkeys(
        ("contiguous_scan", "strided_scan"),
        tuple(f"{one}, 4, {ways}" for one in _SCANS for ways in ("true, false", "false, true")),
    ),
    "sdpa_blocked.h": {"sdpa_blocked_scale_copy": ("{T}",), "sdpa_blocked_causal_mask": ("{T}",)},
    "sdpa_vector.h": {
        "sdpa_vector": ("{T}, 64", "{T}, 256", "{T}, 192, 128"),
        "sdpa_vector_2pass_1": ("{T}, 128",),
        "sdpa_vector_2pass_1_gqa": ("{T}, 128, 128, 4, 2",),
        "sdpa_vector_2pass_2": ("{T}, 128",),
    },
    "searchsorted.h": {"searchsorted": ("{T}, true", "int, false")},
    "softmax.h": dict.fromkeys(("softmax_single_row", "softmax_looped"), ("{T}", "{T}, float")),
    "sort.h": {
        **dict.fromkeys(
            ("block_sort", "block_sort_nc"),
            ("{T}, uint, true, 128, 4", "{T}, {T}, false, 128, 8", "int64_t, uint, true, 64, 4"),
        ),
        **dict.fromkeys(("mb_block_sort", "mb_block_partition", "mb_block_merge"), ("{T}, uint, true, 128, 4",)),
    },
    "steel/attn/kernels/steel_attention.h": {
        "attention": (
            "{T}, 32, 32, 64, 64, 4, 1",
            "{T}, 32, 16, 128, 128, 4, 1, bool",
            "{T}, 32, 16, 128, 128, 4, 1, {T}",
        )
    },
    "steel/conv/kernels/steel_conv.h": {
        "implicit_gemm_conv_2d": (_TILE, "{T}, 32, 32, 16, 2, 2, 4", f"{_TILE}, 0, true")
    },
    "steel/conv/kernels/steel_conv_3d.h": {"implicit_gemm_conv_3d": (_TILE, f"{_TILE}, true")},
    "steel/conv/kernels/steel_conv_general.h": {"implicit_gemm_conv_2d_general": (_TILE,)},
    "steel/gemm/kernels/steel_gemm_fused.h": {"gemm": (*_GEMM, "complex64_t, 64, 32, 8, 4, 1, false, false")},
    "steel/gemm/kernels/steel_gemm_gather.h": {
        "gather_mm": _GEMM,
        "gather_mm_rhs": ("{T}, 16, 64, 16, 1, 2, false, false", "{T}, 16, 64, 16, 1, 2, false, true"),
    },
    "steel/gemm/kernels/steel_gemm_masked.h": {"block_masked_gemm": _MASKED},
    "steel/gemm/kernels/steel_gemm_segmented.h": {"segmented_mm": _GEMM},
    "steel/gemm/kernels/steel_gemm_splitk.h": {
        "gemm_splitk": ("{T}, float, 32, 32, 16, 2, 2, false, true, true, false",),
        "gemm_splitk_accum": ("float, {T}",),
        "gemm_splitk_accum_axpby": ("float, {T}",),
    },
    "ternary.h": {
        **dict.fromkeys(("ternary_v", "ternary_v2"), ("{T}, Select, false, true", "complex64_t, Select, true, false")),
        **dict.fromkeys(("ternary_g_nd1", "ternary_g_nd2", "ternary_g_nd3"), ("{T}, Select, int", "bool, Select")),
        "ternary_g": ("{T}, Select, 2, int",),
    },
    "unary.h": {
        "unary_v": _UNARY_ARGUMENTS,
        "unary_v2": _UNARY_ARGUMENTS,
        "unary_g": tuple(f"{one}, 2, int" for one in _UNARY_ARGUMENTS),
    },
}
# What MLX writes into the source before a header, and kernels it writes itself around one.
BEFORE_TEXT = {"hadamard.h": "METAL_FUNC void hadamard_radix_m(thread float* x) { x[0] = x[0] + x[1]; }\n"}
_INDICES = """
    const constant int* idx_shapes [[buffer(7)]], const constant int64_t* idx_strides [[buffer(8)]],
    const constant bool* idx_contigs [[buffer(9)]], const constant int& idx_ndim [[buffer(10)]],
    const device int* idx0 [[buffer(20)]], const device int* idx1 [[buffer(21)]],
"""
AFTER_TEXT = {
    "indexing/gather.h": f"""
[[kernel]] void gather2(
    const device bfloat16_t* src [[buffer(0)]], device bfloat16_t* out [[buffer(1)]],
    const constant int* src_shape [[buffer(2)]], const constant int64_t* src_strides [[buffer(3)]],
    const constant size_t& src_ndim [[buffer(4)]], const constant int* slice_sizes [[buffer(5)]],
    const constant int* axes [[buffer(6)]], {_INDICES}
    uint3 index [[thread_position_in_grid]], uint3 grid_dim [[threads_per_grid]]) {{
  Indices<int, 2> idxs{{ {{idx0, idx1}}, idx_shapes, idx_strides, idx_contigs, idx_ndim}};
  return gather_impl<bfloat16_t, int, 2, 2, int64_t>(
      src, out, src_shape, src_strides, src_ndim, slice_sizes, axes, idxs, index, grid_dim);
}}
""",
    "indexing/scatter.h": f"""
[[kernel]] void scatter2(
    const device float* updates [[buffer(1)]], device mlx_atomic<float>* out [[buffer(2)]],
    const constant int* upd_shape [[buffer(3)]], const constant int64_t* upd_strides [[buffer(4)]],
    const constant size_t& upd_ndim [[buffer(5)]], const constant size_t& upd_size [[buffer(6)]],
    const constant int* out_shape [[buffer(11)]], const constant int64_t* out_strides [[buffer(12)]],
    const constant size_t& out_ndim [[buffer(13)]], const constant int* axes [[buffer(14)]],
    const constant size_t& idx_size [[buffer(15)]], {_INDICES}
    uint2 gid [[thread_position_in_grid]]) {{
  Indices<int, 2> idxs{{ {{idx0, idx1}}, idx_shapes, idx_strides, idx_contigs, idx_ndim}};
  return scatter_impl<float, int, Sum<float>, 2, false, 4, int>(
      updates, out, upd_shape, upd_strides, upd_ndim, upd_size, out_shape, out_strides, out_ndim, axes, idx_size,
      idxs, gid);
}}
""",
}
TYPES = ("float", "half", "bfloat16_t")
