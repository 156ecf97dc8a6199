"""What the nodes import of ComfyUI, which is no package: four modules with the interfaces they use.

``QuantizedTensor`` is comfy-kitchen's own. The cast does what ComfyUI's does of a weight on one
device: functions are called on the dense weight, and a weight of another dtype is made dense.
"""

import sys
import types
from enum import Enum
from typing import Any

import pytest
import torch
from torch import nn

CLIP_TYPES = (
    "STABLE_DIFFUSION", "SD3", "FLUX", "LTXV", "HUNYUAN_VIDEO", "PIXART", "LUMINA2", "WAN",
    "CHROMA", "QWEN_IMAGE", "FLUX2",
)  # fmt: skip


_CLIP_TYPE: Any = Enum("CLIPType", CLIP_TYPES)  # type: ignore[misc]  # from names


def cast_bias_weight(s, input, dtype, bias_dtype, offloadable):  # noqa: A002  ComfyUI's name
    assert offloadable, "what is not would be a copy of the weight that nobody frees"
    weight, functions = s.weight, s.weight_function
    if functions or weight.dtype != dtype:
        weight = weight.to(dtype)
        if hasattr(weight, "dequantize") and hasattr(weight, "params"):
            weight = weight.dequantize()
        for function in functions:
            weight = function(weight)
    bias = None if s.bias is None else s.bias.to(bias_dtype)
    return weight, bias, None


def uncast_bias_weight(s, weight, bias, stream):
    s.uncast = getattr(s, "uncast", 0) + 1


class _Cast:
    forward_comfy_cast_weights: Any
    comfy_cast_weights = True
    weight_function = ()
    bias_function = ()

    def reset_parameters(self):
        return None

    def forward(self, x):
        return self.forward_comfy_cast_weights(x)


class manual_cast:  # noqa: N801  ComfyUI's name
    class Linear(_Cast, nn.Linear):
        pass

    class Conv2d(_Cast, nn.Conv2d):
        pass

    class LayerNorm(nn.LayerNorm):
        pass


class Patcher:
    """A ModelPatcher: what it was made of, and a denoiser that computes nothing."""

    def __init__(self, state, options, disable_dynamic):
        self.state, self.options, self.is_static = state, options, disable_dynamic
        self.load_device = torch.device("cpu")
        self.model = types.SimpleNamespace(diffusion_model=Denoiser())


class Denoiser(nn.Module):
    """A model's forward as ComfyUI calls it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1), requires_grad=False)

    def forward(self, x, timesteps, context=None, transformer_options=None):
        return x


def install(monkeypatch, folders):
    """Let Python import ComfyUI's modules.

    Args:
        monkeypatch: undoes it.
        folders: of models, by ComfyUI's kinds.

    Returns:
        ``comfy.sd``, whose ``recognizes`` says whether it knows a model.
    """
    modules: dict[str, Any] = {
        name: types.ModuleType(name) for name in ("comfy", "comfy.ops", "comfy.sd", "folder_paths")
    }
    ops, sd = modules["comfy.ops"], modules["comfy.sd"]
    ops.cast_bias_weight, ops.uncast_bias_weight = cast_bias_weight, uncast_bias_weight
    ops.manual_cast = manual_cast
    sd.recognizes = True
    sd.CLIPType = _CLIP_TYPE
    sd.load_diffusion_model_state_dict = lambda state, model_options, disable_dynamic: (
        Patcher(state, model_options, disable_dynamic) if sd.recognizes else None
    )
    sd.load_text_encoder_state_dicts = lambda **given: given
    sd.VAE = _Vae
    modules["folder_paths"].get_folder_paths = lambda kind: [str(p) for p in folders.get(kind, ())]
    modules["comfy"].ops, modules["comfy"].sd = ops, sd
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    for name in [name for name in sys.modules if name.startswith("quantkit.comfyui.")]:
        monkeypatch.delitem(sys.modules, name)
    return sd


class _Vae:
    def __init__(self, sd):
        self.state = sd

    def throw_exception_if_invalid(self):
        assert self.state


def make_module(operations, dense):
    """Return the operations' module of a dense layer's kind and sizes, without weights."""
    if isinstance(dense, nn.Linear):
        return operations.Linear(dense.in_features, dense.out_features, dense.bias is not None)
    return operations.Conv2d(
        dense.in_channels, dense.out_channels, dense.kernel_size, stride=dense.stride,
        padding=dense.padding, bias=dense.bias is not None,
    )  # fmt: skip


def skip_without_kitchen():
    """Skip where comfy-kitchen is not installed."""
    pytest.importorskip("comfy_kitchen")
