"""What ComfyUI makes of a quantized denoiser: a reader of its documented tensors, nothing shared
with quantkit's writer.

Names and joined rows are undone by diffusers' own converters of single files, which are given each
layer's number in place of its weights to learn whose scale belongs to which module.
"""

import json
from dataclasses import dataclass

import torch
from safetensors import safe_open
from torch import nn


@dataclass(frozen=True)
class Marked:
    """A layer with a comfy_quant tensor."""

    format: str
    weight: torch.Tensor
    weight_scale: torch.Tensor
    input_scale: torch.Tensor | None
    full_precision: bool

    def values(self):
        return self.weight.float() * self.weight_scale


def read(path):
    """Return (tensors that are not of marked layers, marked layers), as the contract reads them."""
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    layers = {}
    for name in [n.removesuffix(".comfy_quant") for n in tensors if n.endswith(".comfy_quant")]:
        told = json.loads(bytes(tensors.pop(f"{name}.comfy_quant").tolist()))
        layers[name] = _marked(
            told,
            tensors.pop(f"{name}.weight"),
            tensors.pop(f"{name}.weight_scale"),
            tensors.pop(f"{name}.input_scale", None),
        )
    # Codes without a marker would be taken for weights.
    assert {t.dtype for t in tensors.values()} <= {torch.float16, torch.bfloat16, torch.float32}
    assert not [name for name in tensors if name.endswith("_scale")]
    return tensors, layers


def _marked(told, weight, scale, input_scale):
    assert scale.dtype is torch.float32
    assert weight.ndim == 2
    if told["format"] == "int8_tensorwise":
        assert weight.dtype is torch.int8
        assert input_scale is None
        assert scale.shape in {(), (len(weight), 1)}
    else:
        assert told["format"] == "float8_e4m3fn"
        assert weight.dtype is torch.float8_e4m3fn
        assert scale.shape == ()
    if input_scale is not None:
        assert (input_scale.dtype, input_scale.shape) == (torch.float32, ())
    full = told.get("full_precision_matrix_mult", False)
    return Marked(told["format"], weight, scale, input_scale, full)


def load(path, model, config, *, prefix):
    """Return a model of diffusers that computes as ComfyUI does from the file.

    Args:
        path: the file.
        model: any of the class.
        config: its directory.
        prefix: what diffusers wants names to begin with.
    """
    tensors, layers = read(path)
    tensors = {name: value for name, value in tensors.items() if name not in {"v_pred", "ztsnr"}}

    def converted(weights):
        state = {
            prefix + name: value.float().clone() for name, value in {**tensors, **weights}.items()
        }
        return type(model).from_single_file(state, config=str(config), torch_dtype=torch.float32)

    dense = converted({f"{name}.weight": layer.values() for name, layer in layers.items()})
    numbered = converted(
        {
            f"{name}.weight": torch.full(layer.weight.shape, float(number))
            for number, (name, layer) in enumerate(layers.items(), 1000)
        }
    )
    known = dict(enumerate(layers.values(), 1000))
    for name, module in list(dense.named_modules()):
        if not isinstance(module, nn.Linear):
            continue
        number = numbered.get_submodule(name).weight
        layer = known.get(int(number[0, 0])) if bool((number == number[0, 0]).all()) else None
        if layer is not None:
            parent, _, child = name.rpartition(".")
            setattr(dense.get_submodule(parent), child, _Product(module, layer))
    return dense.eval()


class _Product(nn.Module):
    """A Linear whose input is cast as the marker says."""

    def __init__(self, linear, layer):
        super().__init__()
        self.linear, self.layer = linear, layer
        # diffusers looks at it.
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x):
        return self.linear(self._cast(x))

    def _cast(self, x):
        if self.layer.format == "int8_tensorwise":
            scale = x.abs().amax(dim=-1, keepdim=True).clamp(min=1e-30) / 127
            return (x / scale).round().clamp(-127, 127) * scale
        if self.layer.full_precision:
            return x
        scale = 1.0 if self.layer.input_scale is None else self.layer.input_scale
        codes = (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        return codes.float() * scale
