"""Checks when a packed component is loaded: its files, and files against the model.

Headers and scales follow the rules of FORMAT.md (``open_packed``), and files fit the model that
diffusers has built. Codes are looked at by ``quantkit verify`` alone: checksums say that they are
those that were written.
"""

from collections.abc import Callable, Collection
from pathlib import Path

from torch import nn

from quantkit.checkpoint.component import PackedComponent
from quantkit.checkpoint.reader import open_packed
from quantkit.checkpoint.verification import contents_of
from quantkit.errors import CheckpointError
from quantkit.models.skeleton import Skeleton, misfits, skeleton_of


def check_component(
    folder: Path,
    model: nn.Module,
    skeleton: Callable[[nn.Module, Collection[str]], Skeleton] = skeleton_of,
) -> PackedComponent:
    """Check a component directory, and that it fits the model that was built.

    Args:
        folder: of config.json and the weights.
        model: dense, as its class makes it.
        skeleton: of a model, whose files have tensors of these names.

    Raises:
        CheckpointError: a broken rule, a layer that the model lacks or has in another shape, a
            bias too few or too many, a missing tensor.
    """
    (component,) = open_packed(folder).components
    contents = contents_of(component)
    for misfit in misfits(contents, skeleton(model, contents.tensors)):
        raise CheckpointError(misfit)
    return component
