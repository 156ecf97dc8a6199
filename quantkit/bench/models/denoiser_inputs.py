"""Inputs of any denoiser, by the names of its forward's parameters and its config.

``quantkit.bench.models.class_inputs`` has a row for a class that takes more, or takes it otherwise.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.bench.models.class_inputs import CLASSES
from quantkit.bench.models.input_call import Call, Maker
from quantkit.errors import ModelError

#: Parameters of classes whose latents are rows of tokens.
_OF_TOKENS = {"img_ids", "img_shapes", "position_ids"}


def _latents(call: Call) -> Tensor:
    channels = call.width("in_channels", "in_visual_dim")
    if "3D" in call.class_name or "Motion" in call.class_name:
        return call.normal(call.batch, channels, call.frames, call.size, call.size)
    return call.normal(call.batch, channels, call.size, call.size)


def _token_latents(call: Call) -> Tensor:
    return call.normal(call.batch, call.side**2, call.width("in_channels"))


def _image_places(call: Call) -> Tensor:
    axes = len(call.config.axes_dims_rope)
    places = torch.zeros(call.side, call.side, axes)
    places[..., 1] += torch.arange(call.side)[:, None]
    places[..., 2] += torch.arange(call.side)[None, :]
    return places.reshape(-1, axes).to(call.normal(1))


def _text_places(call: Call) -> Tensor:
    return torch.zeros(call.tokens, len(call.config.axes_dims_rope)).to(call.normal(1))


def _pooled(call: Call) -> Tensor | None:
    if call.config.get("pooled_projection_dim", call.config.get("in_text_dim2")) is None:
        return None
    return call.normal(call.batch, call.width("pooled_projection_dim", "in_text_dim2"))


def _guidance(call: Call) -> Tensor | None:
    # FLUX.2 has no such key in its first configs, and guidance always.
    return call.full(3.5) if call.config.get("guidance_embeds", True) else None


def _vision(call: Call) -> Tensor | None:
    if call.config.get("image_dim") is None:
        return None
    # Tokens of CLIP ViT-H/14.
    return call.normal(call.batch, 257, call.config.image_dim)


def _labels(call: Call) -> Tensor | None:
    if call.config.get("class_embed_type") in {"projection", "simple_projection"}:
        return call.normal(call.batch, call.config.projection_class_embeddings_input_dim)
    classes = call.config.get("num_class_embeds")
    return None if classes is None else call.numbers(call.batch, below=classes)


def _added(call: Call) -> dict[str, Tensor] | None:
    config = call.config
    match config.get("addition_embed_type"):
        case "text_time":
            pooled = (
                config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
            )
            side = 8.0 * call.size
            return {
                "text_embeds": call.normal(call.batch, pooled),
                "time_ids": call.rows(side, side, 0, 0, side, side),
            }
        case "image" | "image_hint":
            return {"image_embeds": call.normal(call.batch, config.encoder_hid_dim)}
        case _:
            return None


#: Inputs of all classes that have a parameter of this name, with a default or without.
_GIVEN: dict[str, Maker] = {
    "sample": _latents,
    "hidden_states": _latents,
    # A fraction, as flow matching counts: others read it as a late step of a thousand, but where
    # it is multiplied by a thousand, 500 is no float16.
    "timestep": lambda call: call.full(0.5),
    "timesteps": lambda call: call.full(0.5),
    "timestep_ratio": lambda call: call.full(0.5),
    "encoder_hidden_states": Call.text,
    "encoder_hidden_states_image": _vision,
    "pooled_projections": _pooled,
    "guidance": _guidance,
    "img_ids": _image_places,
    "txt_ids": _text_places,
    "img_shapes": lambda call: [[(1, call.side, call.side)]] * call.batch,
    "class_labels": _labels,
    "added_cond_kwargs": _added,
    "return_dict": lambda _: False,
}
#: Inputs of classes that do not run without.
_REQUIRED: dict[str, Maker] = {
    "timestep_r": lambda call: call.full(0.5),
    "r_timestep": lambda call: call.full(0.5),
    "encoder_attention_mask": Call.seen,
    "original_size": lambda call: call.rows(8.0 * call.size, 8.0 * call.size),
    "target_size": lambda call: call.rows(8.0 * call.size, 8.0 * call.size),
    "crop_coords": lambda call: call.rows(0, 0),
}


def make_inputs(model: nn.Module, batch: int, size: int, device: torch.device) -> dict[str, Any]:
    """Return keyword arguments of one denoising step, which returns a tuple or a tensor.

    Args:
        model: a denoiser of diffusers.
        batch: latents at once; 2 is one picture with guidance.
        size: width and height of the latents, an eighth of the picture's.
        device: where they are made.

    Returns:
        tensors on the device, floating ones in the model's dtype; lists and numbers where the
        class takes those.

    Raises:
        ModelError: a parameter without a default that no input is known for.
    """
    generator = torch.Generator().manual_seed(1)
    dtype: Any = model.dtype

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype=dtype)

    call = Call(type(model).__name__, model.config, batch, size, normal)
    made = {name: maker(call) for name, maker in _makers(model).items()}
    return {name: value for name, value in made.items() if value is not None}


def first_tensor(output: Any) -> Tensor:
    """Return what a denoiser gave, without the tuple; Z-Image's list of pictures as one tensor."""
    found = output if isinstance(output, Tensor) else output[0]
    return found if isinstance(found, Tensor) else torch.stack(found)


def _makers(model: nn.Module) -> Mapping[str, Maker]:
    """Return what makes the inputs, by parameter; refuse a class that needs others."""
    parameters = inspect.signature(model.forward).parameters
    needed = {
        name
        for name, p in parameters.items()
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    }
    known = {**_GIVEN, **{name: m for name, m in _REQUIRED.items() if name in needed}}
    if _OF_TOKENS & set(parameters):
        known["hidden_states"] = _token_latents
    known |= CLASSES.get(type(model).__name__, {})
    if missing := sorted(needed - set(known)):
        raise ModelError(
            f"{type(model).__name__}: no inputs are known for {', '.join(missing)} of its forward"
        )
    return {name: known[name] for name in parameters if name in known}
