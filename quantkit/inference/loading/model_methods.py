"""Methods of a packed model that replace diffusers' own, which would be wrong for codes.

They stand on the instance, not on a class of ours: the name of its class says in config.json and
model_index.json what a model is. As partials they follow copies, and pickles.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from torch import nn

from quantkit.errors import InputError
from quantkit.inference.attention.fused_qkv import JoinedLinear
from quantkit.inference.layers.layer_summary import iterate_packed
from quantkit.inference.layers.packed_layer import CODES
from quantkit.inference.loading import saving


def install(model: nn.Module) -> None:
    """Give a packed model its own methods."""
    for name, method in _METHODS.items():
        setattr(model, name, partial(method, model))


def uninstall(model: nn.Module) -> None:
    """Restore its class's methods of a model that is no longer packed."""
    for name in _METHODS:
        delattr(model, name)


def num_parameters(
    model: Any,
    only_trainable: bool = False,  # noqa: FBT001, FBT002  diffusers' signature
    exclude_embeddings: bool = False,  # noqa: FBT001, FBT002  diffusers' signature
) -> int:
    """Return the number of parameters of the dense model."""
    own = type(model).num_parameters
    count: int = own(model, only_trainable=only_trainable, exclude_embeddings=exclude_embeddings)
    if only_trainable:
        return count
    for _, _, layer in iterate_packed(model):
        own_tensors = (layer.part(name) for name in CODES)
        count -= sum(tensor.numel() for tensor in own_tensors if tensor is not None)
        if not isinstance(layer, JoinedLinear):
            count += layer.n * layer.k
        elif layer.bias is not None:
            count -= layer.n
    return count


def fuse_lora(model: Any, *args: Any, **kwargs: Any) -> NoReturn:
    """Refuse: codes and scales cannot hold the sum with an adapter.

    Raises:
        InputError: always.
    """
    del args, kwargs
    raise InputError(
        f"fuse_lora: {type(model).__name__} is packed, and adapters cannot be fused into codes; "
        "use it without fusing, or fuse into the 16-bit model, then pack that"
    )


_METHODS: dict[str, Callable[..., Any]] = {
    "save_pretrained": saving.save_pretrained,
    "num_parameters": num_parameters,
    "fuse_lora": fuse_lora,
}
