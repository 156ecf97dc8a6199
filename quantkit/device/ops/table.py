"""The operations. A new one is a file with its rows, and that file's rows here."""

from quantkit.device.ops.attention import (
    attention_codes,
    coded_attention,
    head_measures,
    heads,
    joint_heads,
    joint_projections,
    projections,
    stream_codes,
)
from quantkit.device.ops.norms import group_norm, observe, quantize
from quantkit.device.ops.op import Op, Variant, all_variants
from quantkit.device.ops.products import (
    conv,
    geglu,
    gemm,
    project_gelu,
    quantize_windows,
    weight_only,
)
from quantkit.errors import KernelError

OPS: dict[str, Op] = {
    op.name: op
    for rows in (
        quantize.OPS,
        quantize_windows.OPS,
        group_norm.OPS,
        gemm.OPS,
        project_gelu.OPS,
        geglu.OPS,
        conv.OPS,
        weight_only.OPS,
        coded_attention.OPS,
        attention_codes.OPS,
        heads.OPS,
        head_measures.OPS,
        joint_heads.OPS,
        stream_codes.OPS,
        projections.OPS,
        observe.OPS,
        joint_projections.OPS,
    )
    for op in rows
}


def find_op(name: str) -> Op:
    """Return the operation called ``name``.

    Raises:
        KernelError: there is none.
    """
    if name not in OPS:
        raise KernelError(f"operation {name!r}: unknown, expected one of {', '.join(OPS)}")
    return OPS[name]


#: family, formats of the codes of inputs and weights, whether weights are 2:4 -> the operation
_BY_KIND: dict[tuple[str, str, str, bool], str] = {
    (op.family, x_format, w_format, op.sparse): op.name
    for op in OPS.values()
    for x_format in op.words("QK_X_FORMAT")
    for w_format in op.words("QK_W_FORMAT") or ("",)
}


def name_for(family: str, x_format: str, w_format: str = "", *, sparse: bool = False) -> str:
    """Return the name of the operation of a family on codes of these formats.

    Args:
        family: quantize_static, group_norm_codes, gemm, geglu, conv, ...
        x_format: of the codes that are read, or made of 16 bit.
        w_format: of the weights' codes; empty for operations without weights.
        sparse: weights are 2:4.
    """
    return _BY_KIND[family, x_format, w_format, sparse]


def attention_for(qk_format: str, pv: str | None) -> str:
    """Return the name of attention on codes of queries and keys.

    Args:
        qk_format: of these.
        pv: of probabilities and values; None: float16.
    """
    return name_for("attention" if pv else "attention_f16", qk_format)


def is_operation(family: str, x_format: str, w_format: str = "", *, sparse: bool = False) -> bool:
    """Tell whether ``name_for`` has a name for that."""
    return (family, x_format, w_format, sparse) in _BY_KIND


def default_variants() -> tuple[Variant, ...]:
    """Return what an inference program needs: e4m3fn codes, 16-bit input and output."""
    every = (v for op in OPS.values() for v in all_variants(op))
    return tuple(v for v in every if "e5m2" not in v.words and v.word("QK_IO") != "f32")
