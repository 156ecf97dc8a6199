"""Products of 16-bit inputs and packed weights, of few rows: the weights' bytes set their time."""

# ruff: noqa: PLR0917  operands stand in the order of the kernel arguments

import torch
from torch import Tensor

from quantkit.device.ops.axes import K, M, N
from quantkit.device.ops.checks import (
    IO_DTYPES,
    check_device,
    check_scale,
    expect,
    given,
    io_word,
)
from quantkit.device.ops.op import (
    Argument,
    Axis,
    Op,
    Operands,
    Options,
    Output,
    Problem,
    Variant,
)
from quantkit.device.ops.products.stored_weights import SUMMED, decode_int4, sample_codes
from quantkit.errors import KernelError, ShapeError
from quantkit.numerics.formats import E4M3FN, E5M2, INT4, INT8
from quantkit.numerics.nibbles import GROUP, MAX_FACTOR, unpack_nibbles
from quantkit.numerics.scales import decode

#: Rows of inputs up to which weights alone are worth a kernel: more rows use a dequantized weight
#: often enough, and take torch's GEMM.
MOST_ROWS = 64
#: Tokens of a block: of up to 16 rows, and of more.
_FEW = 16

#: Formats with a float16 scale for every 32 codes, as GGUF's blocks have them.
BLOCKS = ("q4_0", "q8_0")
#: In the order of kernels/include/config.h.
FORMATS = (E4M3FN.name, E5M2.name, INT8.name, INT4.name, *BLOCKS)
_PER_BYTE = {INT4.name: INT4.codes_per_byte, "q4_0": 2}

_IO = Axis("QK_IO", ("f16", "bf16"))
_FORMAT = Axis("QK_W_FORMAT", FORMATS)
_TOKENS = Axis("QK_TOKENS", ("m16", "m64"))


def gemm_w16(
    x: Tensor,
    w: Tensor,
    w_group: Tensor | None,
    w_scale: Tensor,
    bias: Tensor | None,
    w_format: str,
    *,
    precision: torch.dtype = torch.float32,
) -> Tensor:
    """Return ``x @ weight.T + bias``, rounded once to the dtype of ``x``.

    Args:
        x: (M, K) float16 or bfloat16, K a multiple of 32.
        w: (N, K) uint8 codes; of int4 and q4_0 (N, K / 2), two codes a byte.
        w_group: (N, K / 32) uint8, the bytes of int4's factors; None for other formats.
        w_scale: float32, one element or (N,); of q4_0 and q8_0 float16 (N, K / 32).
        bias: (N,) in the dtype of ``x``, or None.
        w_format: of w.
        precision: of products and sums; float64 makes them exact enough to judge the others by.

    Returns:
        (M, N) in the dtype of ``x``.
    """
    y = x.to(precision) @ _unscaled(w, w_group, w_scale, w_format).to(precision).T
    if w_format not in BLOCKS:
        y = y * w_scale.reshape(-1).to(precision)
    return (y if bias is None else y + bias.to(precision)).to(x.dtype)


def _unscaled(w: Tensor, w_group: Tensor | None, w_scale: Tensor, w_format: str) -> Tensor:
    """Return (N, K) weights before a scale of their channel: exact in float32."""
    if w_format == INT4.name:
        return decode(decode_int4(w, given(w_group)), INT8.name)
    if w_format not in BLOCKS:
        return decode(w, w_format)
    codes = unpack_nibbles(w) if w_format in _PER_BYTE else w.view(torch.int8)
    return codes.float() * w_scale.float().repeat_interleave(GROUP, dim=1)


def _check(op: Op, operands: Operands, options: Options) -> Problem:
    (x, w, w_group, w_scale, bias), (w_format,) = operands, options
    x, w, w_scale = given(x), given(w), given(w_scale)
    if w_format not in FORMATS:
        raise KernelError(f"{op.name}: format {w_format!r}, expected one of {', '.join(FORMATS)}")
    word = io_word(op.name, x.dtype)
    if word not in _IO.words:
        raise KernelError(f"{op.name}: x is {x.dtype}, expected float16 or bfloat16")
    if x.ndim != 2:
        raise ShapeError(f"{op.name}: x has shape {tuple(x.shape)}, expected (M, K)")
    (m, k), n = x.shape, w.shape[0]
    expect(op.name, "w", w, torch.uint8, (n, k // _PER_BYTE.get(w_format, 1)))
    _check_scales(op.name, (n, k), w_group, w_scale, w_format)
    if bias is not None:
        expect(op.name, "bias", bias, x.dtype, (n,))
    named = (("w", w), ("w_group", w_group), ("w_scale", w_scale), ("bias", bias))
    for name, tensor in named:
        if tensor is not None:
            check_device(op.name, name, tensor, x)
    sizes = {"m": m, "n": n, "k": k, "channels": int(w_scale.numel() > 1)}
    return Problem((word, w_format, "m16" if m <= _FEW else "m64"), sizes)


def _check_scales(
    op: str, shape: tuple[int, int], w_group: Tensor | None, w_scale: Tensor, w_format: str
) -> None:
    n, k = shape
    if (w_group is None) == (w_format == INT4.name):
        raise KernelError(f"{op}: w_group belongs to int4 weights, and to them alone")
    if w_group is not None:
        expect(op, "w_group", w_group, torch.uint8, (n, k // GROUP))
    if w_format in BLOCKS:
        expect(op, "w_scale", w_scale, torch.float16, (n, k // GROUP))
    else:
        check_scale(op, "w_scale", w_scale, n)


def _outputs(operands: Operands, options: Options) -> tuple[Output, ...]:
    del options
    x, w, *_ = operands
    x = given(x)
    return (((x.shape[0], given(w).shape[0]), x.dtype),)


def _sample(
    variant: Variant, sizes: tuple[int, int, int], generator: torch.Generator
) -> tuple[Operands, Options]:
    (m, n, k), fmt = sizes, variant.word("QK_W_FORMAT")
    dtype = IO_DTYPES[variant.word("QK_IO")]
    x = torch.randn(m, k, generator=generator).to(dtype)
    bias = torch.randn(n, generator=generator).to(dtype)
    if fmt in _PER_BYTE:
        w = torch.randint(256, (n, k // 2), generator=generator).to(torch.uint8)
    else:
        w = sample_codes((n, k), INT8.name if fmt in BLOCKS else fmt, generator)
    group, largest = None, 8.0 if fmt == "q4_0" else 127.0
    if fmt == INT4.name:
        factors = torch.randint(-MAX_FACTOR, MAX_FACTOR + 1, (n, k // GROUP), generator=generator)
        group = factors.to(torch.int8).view(torch.uint8)
    if fmt in BLOCKS:
        scale = (torch.randn(n, k // GROUP, generator=generator) / largest).half()
    else:
        largest = {E4M3FN.name: E4M3FN.max, E5M2.name: E5M2.max}.get(fmt, largest)
        scale = (0.5 + torch.rand(n, generator=generator)) / largest
    return (x, w, group, scale, bias), (fmt,)


OPS = (
    Op(
        name="gemm_w16",
        family="gemm_w16",
        source="gemm_w16.hip",
        formula=(
            "y[i, j] = sum_k(x[i, k] * w[j, k]) * w_scale[j] + bias[j]; int4: w[j, k] = "
            f"(code[j, k] - 8) * w_group[j, k / {GROUP}]; q4_0, q8_0: w[j, k] = "
            f"(code[j, k] - 8, or code[j, k]) * w_scale[j, k / {GROUP}], without w_scale[j]"
        ),
        schema=(
            "(Tensor x, Tensor w, Tensor? w_group, Tensor w_scale, Tensor? bias, str w_format) "
            "-> Tensor"
        ),
        axes=(_IO, _FORMAT, _TOKENS),
        args=(
            Argument("x", "io", "[m, k]"),
            Argument("w", "u8", "[n, k] or [n, k / 2]"),
            Argument("w_group", "u8", f"[n, k / {GROUP}]", null="the format has no factors"),
            Argument("w_scale", "f32", f"[1] or [n]; q4_0, q8_0: f16 [n, k / {GROUP}]"),
            Argument("bias", "io", "[n]", null="no bias"),
            Argument("y", "io", "[m, n]", written=True),
            *(M, N, K, Argument("channels", "i32")),
        ),
        k_multiple=GROUP,
        check=_check,
        outputs=_outputs,
        reference=gemm_w16,
        budget=SUMMED,
        sample=_sample,
    ),
)
