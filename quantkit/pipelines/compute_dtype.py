"""The default compute dtype, the same for original and packed pipelines."""

import logging
from collections.abc import Collection

import torch

_LOG = logging.getLogger("quantkit")


def usual_dtype(stored: Collection[str], device: torch.device) -> torch.dtype:
    """Return float32 on the CPU, else the denoiser's own 16-bit dtype.

    Models that were trained in bfloat16 overflow in float16, as FLUX does in some layers.

    Args:
        stored: dtypes of the denoiser's tensors as files name them; float16 without BF16 in it.
        device: where it runs; one that has no bfloat16 gets float16, with a warning.
    """
    if device.type == "cpu":
        return torch.float32
    if "BF16" not in stored:
        return torch.float16
    if has_bfloat16(device):
        return torch.bfloat16
    _LOG.warning("%s: no bfloat16, the model's type; computes in float16, may overflow", device)
    return torch.float16


def has_bfloat16(device: torch.device) -> bool:
    """Tell whether a GPU computes in bfloat16 itself: NVIDIA from Ampere on, AMD."""
    with torch.cuda.device(device):
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
