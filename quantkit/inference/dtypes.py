"""One compute dtype for all components of a pipeline with a packed denoiser.

Without a ``torch_dtype``, transformers loads a text encoder in its saved dtype and diffusers a UNet
in float32; the two then meet in one multiply and fail. Packed pipelines agree instead: the denoiser
decides, everything else that was loaded with it follows. Codes and scales are never cast.
"""

import functools
import itertools
import logging
from types import ModuleType
from typing import Any

import torch
from torch import nn

from quantkit.errors import InputError

_log = logging.getLogger(__name__)

#: What packed layers take and give.
COMPUTE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def default_dtype(device: torch.device) -> torch.dtype:
    """Return the compute dtype when none was asked for: float32 on CPU, float16 on a GPU."""
    return torch.float32 if device.type == "cpu" else torch.float16


def check_dtype(dtype: object, where: str) -> torch.dtype:
    """Return ``dtype`` if packed layers compute in it.

    Raises:
        InputError: any other.
    """
    if dtype not in COMPUTE_DTYPES:
        raise InputError(
            f"{where}: torch_dtype {dtype}, wanted float16, bfloat16 or float32; packed weights "
            "keep their own format whatever it is"
        )
    assert isinstance(dtype, torch.dtype)
    return dtype


def agree(pipe: Any, *, passed: frozenset[str] = frozenset()) -> None:
    """Cast the components of a pipeline to the compute dtype of its packed denoiser.

    Args:
        pipe: a DiffusionPipeline; one without packed components is left alone.
        passed: names of components that the caller made and handed in: they stay as they are.
    """
    modules = {n: m for n, m in pipe.components.items() if isinstance(m, nn.Module)}
    wanted = next((d for d in map(_packed_dtype, modules.values()) if d is not None), None)
    if wanted is None:
        return
    for name, module in modules.items():
        found = _dtype_of(module)
        if name not in passed and found not in (None, wanted):
            _log.info("%s: cast from %s to %s, the denoiser's", name, found, wanted)
            _cast(module, wanted)


def register(module: ModuleType) -> None:
    """Let ``DiffusionPipeline.from_pretrained`` end with ``agree``; twice does no harm.

    Args:
        module: ``diffusers.pipelines.pipeline_utils``.
    """
    pipeline = module.DiffusionPipeline
    original = pipeline.from_pretrained.__func__
    if hasattr(original, "quantkit_original"):
        return

    @functools.wraps(original)
    def from_pretrained(cls: type, *args: Any, **kwargs: Any) -> Any:
        pipe = original(cls, *args, **kwargs)
        passed = frozenset(name for name, v in kwargs.items() if isinstance(v, nn.Module))
        agree(pipe, passed=passed)
        return pipe

    from_pretrained.quantkit_original = original  # type: ignore[attr-defined]
    pipeline.from_pretrained = classmethod(from_pretrained)


def _packed_dtype(module: nn.Module) -> torch.dtype | None:
    quantizer = getattr(module, "hf_quantizer", None)
    return getattr(quantizer, "compute_dtype", None)


def _dtype_of(module: nn.Module) -> torch.dtype | None:
    dtype = getattr(module, "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) and dtype.is_floating_point else None


def _cast(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast as ``from_pretrained`` would have: what the model keeps in float32 stays float32."""
    kept = set(getattr(module, "_keep_in_fp32_modules", None) or ())
    if _packed_dtype(module) is not None or not kept or dtype is torch.float32:
        module.to(dtype)
        return
    tensors = itertools.chain(module.named_parameters(), module.named_buffers())
    for name, tensor in tensors:
        if tensor.is_floating_point() and not kept.intersection(name.split(".")):
            tensor.data = tensor.data.to(dtype)
