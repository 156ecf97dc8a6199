"""Components that diffusers reads with SDNQ: a directory, weights under their own names."""

from typing import Any

from torch import Tensor

from quantkit.interchange.denoiser import Denoiser
from quantkit.interchange.layer_codes import LayerCodes
from quantkit.interchange.targets import Target
from quantkit.interchange.tensor_export import FilePlan
from quantkit.interchange.tensor_plan import Entry, plan_tensors, unchanged
from quantkit.numerics.formats import E4M3FN, INT8

#: SDNQ's names of formats.
_DTYPES = {E4M3FN: "float8_e4m3fn", INT8: "int8"}

SDNQ = Target(
    "SDNQ",
    formats=(E4M3FN, INT8),
    convolutions=True,
    scale="scale",
    inputs="inputs stay in 16 bit, or SDNQ scales them itself",
    cure="pack with recipe fp8",
)


def plan_sdnq(source: Denoiser, *, requantize: bool) -> FilePlan:
    """Return the plan of a component's weight file.

    Raises:
        CheckpointError: a layer that SDNQ does not hold.
    """
    entries = plan_tensors(source, unchanged(source.shapes), SDNQ, requantize=requantize)
    return FilePlan(source, SDNQ, entries, _lay_out, source.class_name)


def sdnq_config(plan: FilePlan) -> dict[str, Any]:
    """Return the ``quantization_config`` of a component's config.json."""
    coded = {entry.name: _DTYPES[entry.fmt] for entry in plan.entries if entry.fmt is not None}
    main = max(_DTYPES.values(), key=lambda dtype: list(coded.values()).count(dtype))
    others = {dtype: [n for n, d in coded.items() if d == dtype] for dtype in _DTYPES.values()}
    return {
        "quant_method": "sdnq",
        "weights_dtype": main,
        "group_size": -1,
        "quant_conv": True,
        "use_svd": False,
        # Else SDNQ would add names of its own to those that are not converted.
        "add_skip_keys": False,
        "minimum_allowed_numel": 0,
        "minimum_allowed_channel_size": 0,
        "dequantize_fp32": True,
        "modules_dtype_dict": {d: names for d, names in others.items() if names and d != main},
        "modules_to_not_convert": [e.name for e in plan.entries if _is_kept(e)],
    }


def _lay_out(layer: str, codes: LayerCodes) -> dict[str, Tensor]:
    scale = codes.scale.reshape(-1, *[1] * (codes.codes.ndim - 1))
    return {f"{layer}.weight": codes.codes, f"{layer}.scale": scale}


def _is_kept(entry: Entry) -> bool:
    """Tell whether a tensor may be the weight of a layer that SDNQ would convert."""
    return entry.fmt is None and entry.name.endswith(".weight") and len(entry.shape) > 1
