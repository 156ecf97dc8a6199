"""ComfyUI's quantized denoisers: one file in the original layout, with a marker for each layer."""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quantkit.errors import ModelError
from quantkit.interchange.denoiser import Denoiser
from quantkit.interchange.layer_codes import LayerCodes
from quantkit.interchange.layout_names import layout_of_model, original_tensors
from quantkit.interchange.targets import Target
from quantkit.interchange.tensor_export import FilePlan
from quantkit.interchange.tensor_plan import Entry, plan_tensors
from quantkit.numerics.codebook_int4 import GROUP, TABLE
from quantkit.numerics.formats import E4M3FN, INT4, INT8
from quantkit.storage.jsonfile import read_json

#: By the word in the marker.
_FORMATS = {"float8_e4m3fn": E4M3FN, "int8_tensorwise": INT8, "asym_w4a8_int8": INT4}
#: Native FP8 products want K and, of NVIDIA's, N as multiples of it.
_NATIVE = 16

COMFYUI = Target(
    "ComfyUI's FP8",
    formats=(E4M3FN,),
    one_scale=(E4M3FN,),
    static="pow2",
    inputs="inputs stay in 16 bit",
    cure="pack with recipe comfyui",
)
#: A file may have layers in FP8 and in int8: the marker says which.
COMFYUI_INT8 = Target(
    "ComfyUI's int8",
    formats=(INT8, E4M3FN),
    may_rotate=(INT8,),
    one_scale=(E4M3FN,),
    static="pow2",
    inputs="ComfyUI scales inputs in int8 by row",
    cure="pack with recipe comfyui-int8",
)
#: Layers in 4 bits are for rotated inputs alone, so their codes are rounded here.
COMFYUI_W4A8 = Target(
    "ComfyUI's w4a8",
    formats=(INT4, INT8, E4M3FN),
    may_rotate=(INT8,),
    must_rotate=(INT4,),
    one_scale=(E4M3FN,),
    static="pow2",
    inputs="ComfyUI scales inputs in int8 by row",
    cure="export the 16-bit model by recipe comfyui-w4a8",
)


def plan_comfyui(
    source: Denoiser, target: Target, *, requantize: bool, scheduler: Mapping[str, Any]
) -> FilePlan:
    """Return the plan of the file.

    Args:
        source: a denoiser of a published architecture.
        target: ``COMFYUI``, ``COMFYUI_INT8`` or ``COMFYUI_W4A8``.
        requantize: convert what the target does not hold.
        scheduler: the config of the pipeline's scheduler; empty for a denoiser alone.

    Raises:
        ModelError: of no known layout, or with widths that ComfyUI does not recognize.
        CheckpointError: a layer that the target does not hold.
    """
    _refuse_widths(source)
    layout = layout_of_model(source.class_name, source.shapes)
    originals = original_tensors(layout, source.shapes)
    entries = plan_tensors(source, originals, target, requantize=requantize)
    is_sdxl = layout.architecture == "sdxl"
    return FilePlan(
        source,
        target,
        entries,
        _lay_out,
        layout.architecture,
        # Names without a prefix: with one, ComfyUI drops the empty tensors.
        extra={name: torch.empty(0) for name in prediction_marks(scheduler)} if is_sdxl else {},
        notes=tuple(_notes(entries, scheduler, is_sdxl=is_sdxl)),
        read=_read,
    )


def prediction_marks(scheduler: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of empty tensors that mark an SDXL model's prediction type for ComfyUI."""
    if scheduler.get("prediction_type") == "v_prediction":
        yield "v_pred"
        if scheduler.get("rescale_betas_zero_snr") is True:
            yield "ztsnr"


def _notes(
    entries: Sequence[Entry], scheduler: Mapping[str, Any], *, is_sdxl: bool
) -> Iterator[str]:
    if not is_sdxl and list(prediction_marks(scheduler)):
        yield "the model predicts v: set ModelSamplingDiscrete to v_prediction in ComfyUI"
    fp8 = [entry for entry in entries if entry.fmt is E4M3FN]
    if bare := sum(not _multiplies_in_fp8(entry.shape, static=entry.static) for entry in fp8):
        yield f"{bare} weights are multiplied in 16 bit: no static input scale, or odd sizes"


def _multiplies_in_fp8(shape: Sequence[int], *, static: bool) -> bool:
    # Without a scale, inputs would be cast at scale 1.
    return static and not any(size % _NATIVE for size in shape)


def _lay_out(layer: str, codes: LayerCodes) -> dict[str, Tensor]:
    rows = {INT8: _int8_tensors, INT4: _w4a8_tensors}.get(codes.fmt, _fp8_tensors)
    return {f"{layer}.{part}": tensor for part, tensor in rows(codes).items()}


def _int8_tensors(codes: LayerCodes) -> dict[str, Tensor]:
    rotation = {"convrot": True, "convrot_groupsize": codes.rotation} if codes.rotation else {}
    return {
        "weight": codes.codes,
        "weight_scale": codes.scale.reshape(-1, 1),
        "comfy_quant": _marker(format="int8_tensorwise", **rotation),
    }


def _w4a8_tensors(codes: LayerCodes) -> dict[str, Tensor]:
    assert codes.groups is not None
    sizes = {"group_size": GROUP, "convrot_groupsize": codes.rotation}
    return {
        "weight": codes.codes,
        "weight_s_rel": codes.groups,
        "weight_s_channel": codes.scale,
        "weight_codebook": TABLE,
        "comfy_quant": _marker(format="asym_w4a8_int8", **sizes),
    }


def _fp8_tensors(codes: LayerCodes) -> dict[str, Tensor]:
    mark = partial(_marker, format="float8_e4m3fn")
    tensors = {"weight": codes.codes, "weight_scale": codes.scale[0]}
    if not _multiplies_in_fp8(codes.codes.shape, static=codes.input_scale is not None):
        return {**tensors, "comfy_quant": mark(full_precision_matrix_mult=True)}
    return {**tensors, "input_scale": torch.tensor(codes.input_scale), "comfy_quant": mark()}


def _read(parts: Mapping[str, Tensor]) -> Tensor:
    """Return the weight of a layer's tensors in the file."""
    told = json.loads(parts["comfy_quant"].numpy().tobytes())
    rotation, groups = told.get("convrot_groupsize", 0), parts.get("weight_s_rel")
    scale = parts["weight_scale" if groups is None else "weight_s_channel"].reshape(-1)
    fmt = _FORMATS[told["format"]]
    return LayerCodes(fmt, parts["weight"], scale, groups=groups, rotation=rotation).values()


def _marker(**told: str | bool | int) -> Tensor:
    text = json.dumps(told, separators=(",", ":"), sort_keys=True).encode()
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _refuse_widths(source: Denoiser) -> None:
    widths = read_json(source.path / "config.json").get("block_out_channels")
    if isinstance(widths, list) and any(width % widths[0] for width in widths):
        raise ModelError(
            f"{source.path}: widths of blocks {', '.join(map(str, widths))}: ComfyUI recognizes "
            "only multiples of the first; export to sdnq, which has no such rule"
        )
