"""Speeds of the menu's tiles, and matrix instructions, by target and operation."""

from collections.abc import Sequence

#: operation -> a number per tile of the menu
TileSpeed = tuple[tuple[str, tuple[float, ...]], ...]

#: How names of operations that multiply end: codes and, but for dense weights, these.
_KINDS = ("fp8", "fp8_sparse", "int8", "int8_sparse", "w4a8")
#: Products that may be added to something.
_ADDED = ("gemm", "conv")
#: Products that end in codes -> the kinds that have them, on the first two tiles alone.
_ENDS_IN_CODES = {
    "project_gelu": _KINDS,
    "project_codes": _KINDS,
    "project_values": ("fp8", "int8"),
    "project_heads": ("fp8", "fp8_sparse", "int8"),
}


def _tile_speed(
    gemm: Sequence[tuple[float, ...]], conv: Sequence[tuple[float, ...]], gated: int | None = None
) -> TileSpeed:
    """Return the rows of all products.

    Args:
        gemm: by kind, of GEMMs whatever their end.
        conv: by kind.
        gated: tiles of GEGLU; None: all.
    """
    gemms = dict(zip(_KINDS, gemm, strict=True))
    convs = dict(zip(_KINDS, conv, strict=True))
    found = {f"gemm_{kind}": tiles for kind, tiles in gemms.items()}
    found |= {f"conv_{kind}": tiles for kind, tiles in convs.items()}
    found |= {f"{op}_residual": tiles for op, tiles in found.items()}
    found |= {f"geglu_{kind}": tiles[:gated] for kind, tiles in gemms.items()}
    for end, kinds in _ENDS_IN_CODES.items():
        found |= {f"{end}_{kind}": gemms[kind][:2] for kind in kinds}
    return tuple(found.items())


def without_first(speeds: TileSpeed, *ops: str) -> TileSpeed:
    """Return the rows without the largest tile of operations whose names begin so."""
    return tuple(
        (op, (0.0, *tiles[1:]) if tiles and op.startswith(ops) else tiles) for op, tiles in speeds
    )


# Not measured. t0, t1 and t3: what `kernels check` says that issue and LDS allow. t2 and t4 are
# bound by the weights they read; these figures give t4, whose blocks are smaller, all M <= 16.
# int8's instructions take fragments and cycles as FP8's do.
_GFX12_DENSE, _GFX12_SPARSE = (0.87, 0.80, 0.25, 0.88, 0.27), (0.75, 0.61, 0.25, 0.77, 0.27)
_GFX12_CONV = ((0.80, 0.68, 0.25, 0.81), (0.63, 0.48, 0.25, 0.65))
GFX12_TILES = _tile_speed(
    gemm=(*(_GFX12_DENSE, _GFX12_SPARSE) * 2, (0.79, 0.68, 0.25, 0.84)),
    conv=(*_GFX12_CONV * 2, (0.73, 0.59, 0.25, 0.77)),
)
# Not measured: the same figures. FP8 is widened to float16, which takes more cycles than the
# products; 2:4 codes are spread in registers.
GFX11_TILES = _tile_speed(
    gemm=(
        *((0.44, 0.34, 0.20), (0.40, 0.29, 0.17)),
        *((0.94, 0.91, 0.20), (0.76, 0.62, 0.17), (0.92, 0.86, 0.20)),
    ),
    conv=(
        *((0.39, 0.34, 0.20), (0.34, 0.29, 0.17)),
        *((0.92, 0.87, 0.20), (0.75, 0.60, 0.17), (0.90, 0.83, 0.20)),
    ),
)
# Not measured: the same figures, of dot4. 2:4 codes are spread in registers, once for eight lanes
# each, and 128x128 of them spills, as an activation after the sums of 128x128 does (43 registers).
GFX10_TILES = without_first(
    _tile_speed(
        gemm=((), (), (0.89, 0.83, 0.20), (0.0, 0.34, 0.17), (0.87, 0.79, 0.20)),
        conv=((), (), (0.87, 0.80, 0.20), (0.0, 0.33, 0.17), (0.85, 0.76, 0.20)),
    ),
    "project_gelu",
)
# TFLOP/s of GEMMs at M x N x K = 8448x8192x2048 on an H200, which emulates these instructions.
# GEGLU has no t2 there: of a wave's 32 rows a lane would have two codes, which are no word.
_SM89 = (*((221.0, 237.0, 156.0), (13.0, 57.0, 86.0)) * 2, (221.0, 237.0, 156.0))
SM89_TILES = _tile_speed(_SM89, _SM89, gated=2)


def _instructions(
    fp8: tuple[str, str], int8: tuple[str, str], **others: str
) -> tuple[tuple[str, str], ...]:
    """Return the matrix instruction of every operation that has one.

    Args:
        fp8: of products of FP8 with dense and with 2:4 weights.
        int8: likewise; int4 weights are int8 when they multiply.
        others: operation -> instruction.
    """
    by_kind = dict(zip(_KINDS, (*fp8, *int8, int8[0]), strict=True))
    products = dict.fromkeys(("gemm", "conv", "geglu"), _KINDS) | _ENDS_IN_CODES
    found = {f"{op}_{kind}": by_kind[kind] for op, kinds in products.items() for kind in kinds}
    found |= {f"{op}_residual": how for op, how in found.items() if op.startswith(_ADDED)}
    return tuple((found | others).items())


# {w} and {x}: fp8 for e4m3fn, bf8 for e5m2; {io}: f16 or bf16.
GFX12_MATRIX = _instructions(
    fp8=("v_wmma_f32_16x16x16_{w}_{x}", "v_swmmac_f32_16x16x32_{w}_{x}"),
    int8=("v_wmma_i32_16x16x16_iu8", "v_swmmac_i32_16x16x32_iu8"),
    gemm_w16="v_wmma_f32_16x16x16_{io}",
    attention_fp8="v_wmma_f32_16x16x16_fp8_fp8",
    attention_int8="v_wmma_i32_16x16x16_iu8",
    attention_fp8_codes="v_wmma_f32_16x16x16_fp8_fp8",
    attention_int8_codes="v_wmma_i32_16x16x16_iu8",
    attention_fp8_f16="v_wmma_f32_16x16x16_f16",
    attention_int8_f16="v_wmma_f32_16x16x16_f16",
)
GFX11_MATRIX = _instructions(
    fp8=("v_wmma_f32_16x16x16_f16", "v_wmma_f32_16x16x16_f16"),
    int8=("v_wmma_i32_16x16x16_iu8", "v_wmma_i32_16x16x16_iu8"),
    gemm_w16="v_wmma_f32_16x16x16_{io}",
)
GFX10_MATRIX = _instructions(fp8=("", ""), int8=("v_dot4c_i32_i8", "v_dot4c_i32_i8"))
SM89_MATRIX = _instructions(
    fp8=("QMMA", "QMMA"),
    int8=("IMMA", "IMMA"),
    gemm_w16="HMMA",
    attention_fp8="QMMA",
    attention_int8="IMMA",
    attention_fp8_codes="QMMA",
    attention_int8_codes="IMMA",
)
