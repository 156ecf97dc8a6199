"""What is checked whenever a packed component is loaded: its files, and files against the model.

Headers and scales follow the rules of FORMAT.md (``open_packed``), and files fit the model that
diffusers has built. Codes are looked at by ``quantkit verify`` alone: checksums say that they are
those that were written.
"""

from pathlib import Path

from torch import nn

from quantkit.checkpoint.component import PackedComponent
from quantkit.checkpoint.reader import open_packed
from quantkit.checkpoint.verification import contents_of
from quantkit.errors import CheckpointError
from quantkit.models.skeleton import misfits, skeleton_of


def check_component(folder: Path, model: nn.Module) -> PackedComponent:
    """Check a component directory, and that it fits the model that was built.

    Args:
        folder: of config.json and the weights.
        model: dense, as its class makes it.

    Raises:
        CheckpointError: a broken rule, a layer that the model lacks or has in another shape, a
            bias too few or too many, a missing tensor.
    """
    (component,) = open_packed(folder).components
    for misfit in misfits(contents_of(component), skeleton_of(model)):
        raise CheckpointError(misfit)
    return component
