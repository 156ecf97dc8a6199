"""One compute dtype for all components of a pipeline with a packed component.

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

from quantkit.checkpoint.spec import QUANT_METHOD
from quantkit.errors import InputError
from quantkit.inference.layers.layer_summary import iterate_packed, modules_of
from quantkit.inference.loading import byte_exact_save, saving
from quantkit.inference.loading.size_limits import limited_to_files

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
            f"{where}: torch_dtype {dtype}, expected float16, bfloat16 or float32; packed weights "
            "keep their own format whatever it is"
        )
    assert isinstance(dtype, torch.dtype)
    return dtype


def agree(pipe: Any, *, passed: frozenset[str] = frozenset(), level: int = logging.INFO) -> None:
    """Cast the components of a pipeline to the compute dtype of its packed denoiser.

    They save as they were, too: see ``restoring``.

    Args:
        pipe: a DiffusionPipeline; one without packed components is left alone.
        passed: names of components that the caller made and handed in: they stay as they are.
        level: how loudly to log a cast.
    """
    modules = {name: m for name, m in modules_of(pipe).items() if name not in passed}
    found = {name: _quantizer(module) for name, module in modules.items()}
    # A packed text encoder follows, too.
    denoisers_first = sorted(found, key=lambda name: not hasattr(modules[name], "save_config"))
    quantizers = [found[name] for name in denoisers_first if found[name] is not None]
    if not quantizers:
        return
    expected, root = quantizers[0].compute_dtype, quantizers[0].files[0].parent.parent
    for name, module in modules.items():
        dtype = _dtype_of(module)
        if dtype not in (None, expected):
            _log.log(level, "%s: cast from %s to %s, the denoiser's", name, dtype, expected)
            _cast(module, expected)
        if found[name] is None:
            byte_exact_save.install(module, root / name)
    saving.install_in_pipeline(pipe, root)


def register(module: ModuleType) -> None:
    """Let ``DiffusionPipeline.from_pretrained`` end with ``agree``; idempotent.

    And build nothing that is larger than the files of a packed directory.

    Args:
        module: ``diffusers.pipelines.pipeline_utils``.
    """
    pipeline = module.DiffusionPipeline
    original = pipeline.from_pretrained.__func__
    if hasattr(original, "quantkit_original"):
        return

    @functools.wraps(original)
    def from_pretrained(cls: type, *args: Any, **kwargs: Any) -> Any:
        given = args[0] if args else kwargs.get("pretrained_model_name_or_path")
        with limited_to_files(given):
            pipe = original(cls, *args, **kwargs)
        passed = frozenset(name for name, v in kwargs.items() if isinstance(v, nn.Module))
        asked = kwargs.get("dtype", kwargs.get("torch_dtype"))
        # A dtype per component was meant to be kept: say that it is not.
        agree(
            pipe, passed=passed, level=logging.WARNING if isinstance(asked, dict) else logging.INFO
        )
        return pipe

    from_pretrained.quantkit_original = original  # type: ignore[attr-defined]
    pipeline.from_pretrained = classmethod(from_pretrained)


def _quantizer(module: nn.Module) -> Any:
    """Return the QuantkitQuantizer that loaded the module, or None."""
    quantizer = getattr(module, "hf_quantizer", None)
    method = getattr(getattr(quantizer, "quantization_config", None), "quant_method", None)
    return quantizer if method == QUANT_METHOD else None


def _dtype_of(module: nn.Module) -> torch.dtype | None:
    dtype = getattr(module, "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) and dtype.is_floating_point else None


def _cast(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast as ``from_pretrained`` would have: modules that the model keeps in float32 stay so."""
    kept = set(getattr(module, "_keep_in_fp32_modules", None) or ())
    if not kept or dtype is torch.float32:
        nn.Module.to(module, dtype)  # diffusers' own to() warns of every cast
        return
    tensors = itertools.chain(module.named_parameters(), module.named_buffers())
    for name, tensor in tensors:
        if tensor.is_floating_point() and not kept.intersection(name.split(".")):
            tensor.data = tensor.data.to(dtype)
    for _, name, layer in iterate_packed(module):
        if not kept.intersection(name.split(".")):
            layer.compute_dtype = dtype
