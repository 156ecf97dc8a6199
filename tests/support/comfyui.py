"""What ComfyUI makes of a quantized denoiser: its loader's part here, comfy-kitchen does the rest.

ComfyUI is no package. Its loader reads a marker for each layer and hands the layer's tensors to a
layout of comfy-kitchen, which is one, and which dequantizes and multiplies here as it does there.

Names and joined rows are undone by diffusers' own converters of single files, which are given each
row's layer and number in place of its weights to learn which rows of what belong to which module.
"""

import json
from dataclasses import dataclass

import torch
from safetensors import safe_open
from torch import nn
from torch.nn.functional import linear

#: The marker's format -> comfy-kitchen's layout, and the dtype of its codes.
LAYOUTS = {
    "float8_e4m3fn": ("TensorCoreFP8Layout", torch.float8_e4m3fn),
    "int8_tensorwise": ("TensorWiseINT8Layout", torch.int8),
    "asym_w4a8_int8": ("AsymW4A8Int8Layout", torch.int8),
}
#: Names of the file -> the layout's; the first is the scale.
PARTS = {
    "asym_w4a8_int8": {
        "weight_s_rel": "scale",
        "weight_s_channel": "s_channel",
        "weight_codebook": "codebook",
    },
}
#: What the loader takes from the marker.
KEYS = {
    "int8_tensorwise": ("convrot", "convrot_groupsize"),
    "asym_w4a8_int8": ("group_size", "convrot_groupsize"),
}


@dataclass(frozen=True)
class Marked:
    """A layer with a comfy_quant tensor."""

    #: of the marker
    told: dict
    weight: torch.Tensor
    #: by the layout's names
    parts: dict
    input_scale: torch.Tensor | None

    @property
    def weight_scale(self):
        return self.parts["scale"]

    @property
    def format(self):
        return self.told["format"]

    @property
    def full_precision(self):
        return self.told.get("full_precision_matrix_mult", False)

    def tensor(self):
        """The weight as comfy-kitchen has it, whose products are in float32."""
        from comfy_kitchen.tensor import QuantizedTensor, get_layout_class

        name, _ = LAYOUTS[self.format]
        rows, columns = self.weight.shape
        params = get_layout_class(name).Params(
            **self.parts,
            orig_dtype=torch.float32,
            orig_shape=(rows, columns * (2 if self.format == "asym_w4a8_int8" else 1)),
            **{key: self.told[key] for key in KEYS.get(self.format, ()) if key in self.told},
        )
        return QuantizedTensor(self.weight, name, params)

    def values(self):
        return self.tensor().dequantize()


def read(path):
    """Return (tensors that are not of marked layers, marked layers), as the loader takes them."""
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    layers = {}
    for name in [n.removesuffix(".comfy_quant") for n in tensors if n.endswith(".comfy_quant")]:
        told = json.loads(tensors.pop(f"{name}.comfy_quant").numpy().tobytes())
        names = PARTS.get(told["format"], {"weight_scale": "scale"})
        layers[name] = _marked(
            told,
            tensors.pop(f"{name}.weight"),
            {theirs: tensors.pop(f"{name}.{ours}") for ours, theirs in names.items()},
            tensors.pop(f"{name}.input_scale", None),
        )
    # Codes without a marker would be taken for weights.
    assert {t.dtype for t in tensors.values()} <= {torch.float16, torch.bfloat16, torch.float32}
    assert not [name for name in tensors if ".weight_" in name or name.endswith("_scale")]
    return tensors, layers


def _marked(told, weight, parts, input_scale):
    _, dtype = LAYOUTS[told["format"]]
    assert weight.ndim == 2
    # The loader casts, and would take other codes for numbers.
    assert weight.dtype is dtype
    if "s_channel" not in parts:
        assert parts["scale"].dtype is torch.float32
    if dtype is torch.int8:
        # The loader knows no such tensor of it.
        assert input_scale is None
    if input_scale is not None:
        assert (input_scale.dtype, input_scale.shape) == (torch.float32, ())
    return Marked(told, weight, parts, input_scale)


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
            f"{name}.weight": _numbered(layer.values().shape, number)
            for number, (name, layer) in enumerate(layers.items(), 1000)
        }
    )
    known = dict(enumerate(layers.values(), 1000))
    for name, module in list(dense.named_modules()):
        if not isinstance(module, nn.Linear):
            continue
        numbers = numbered.get_submodule(name).weight
        layer = known.get(int(numbers[0, 0])) if bool((numbers[:, 0] >= 1000).all()) else None
        if layer is not None:
            parent, _, child = name.rpartition(".")
            product = _Product(module, layer, numbers[:, 1].long())
            setattr(dense.get_submodule(parent), child, product)
    return dense.eval()


def _numbered(shape, number):
    """A weight whose rows say their layer and their number."""
    rows = torch.zeros(shape)
    rows[:, 0], rows[:, 1] = number, torch.arange(len(rows))
    return rows


class _Product(nn.Module):
    """A Linear that is some rows of a layer of the file, multiplied by comfy-kitchen."""

    def __init__(self, module, layer, rows):
        super().__init__()
        self.layer, self.rows, self.quantized = layer, rows, layer.tensor()
        # diffusers looks at them.
        self.weight, self.bias = module.weight, module.bias

    def forward(self, x):
        found = self._multiplied(x.flatten(0, -2)).unflatten(0, x.shape[:-1])[..., self.rows]
        return found if self.bias is None else found + self.bias

    def _multiplied(self, x):
        from comfy_kitchen.tensor import QuantizedTensor

        if self.layer.full_precision:
            return linear(x, self.quantized.dequantize())
        name, _ = LAYOUTS[self.layer.format]
        if name == "TensorCoreFP8Layout":
            # Layouts of integers take the input as it is.
            x = QuantizedTensor.from_float(x, name, scale=self.layer.input_scale)
        return linear(x, self.quantized)
