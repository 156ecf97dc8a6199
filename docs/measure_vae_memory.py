"""The bytes of tensors that live at once while SDXL's VAE decodes and encodes 1024x1024.

``python docs/measure_vae_memory.py`` runs all operators in bfloat16 on the meta device, where
nothing is computed. What libraries take inside of an operator is not seen, so attention, which
kernels do without its matrix, is left out of the model.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from quantkit.inference.loading.quantizing import replace_layers
from quantkit.inference.pictures import content
from quantkit.numerics.formats import INT8
from quantkit.numerics.granularity import parse_granularity
from quantkit.numerics.scheme import Activation, Scheme

sys.path.insert(0, str(Path(__file__).parents[1]))
from docs.measure_vae import SHAPES

SIDE, MIB = 1024, 2**20
#: MiB of the windows' codes in a band.
BANDS = (64, 16)
_KEPT = ("conv_in", "conv_out", "quant_conv")


class Living(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's is untyped
    """Counts the bytes of results that are alive."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._alive: dict[int, tuple[Any, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an operator and count what it gives."""
        del types
        self._alive = {k: v for k, v in self._alive.items() if not v[0].expired()}
        result = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                weak: Any = StorageWeakRef
                reference = weak(storage)
                self._alive[reference.cdata] = reference, storage.nbytes()
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return result


def peak(call: Callable[[torch.Tensor], Any], x: torch.Tensor) -> int:
    """Return the MiB of tensors that a call has alive at once, besides what was there before."""
    living = Living()
    with torch.no_grad(), living:
        call(x)
    return round(living.peak / MIB)


def show(name: str, vae: Any) -> None:
    """Print a line of a VAE."""
    with torch.device("meta"):
        latents = torch.empty(1, 4, SIDE // 8, SIDE // 8, dtype=torch.bfloat16)
        pictures = torch.empty(1, 3, SIDE, SIDE, dtype=torch.bfloat16)
    found = peak(vae.decode, latents), peak(vae.encode, pictures)
    click.echo("{}: decode {} MiB, encode {} MiB".format(name, *found))


def main() -> None:
    """Print the peaks of the 16-bit VAE, and of the packed one."""
    from diffusers import AutoencoderKL

    with torch.device("meta"):
        config = {**SHAPES["SD 1.5, SDXL"], "mid_block_add_attention": False}
        vae = AutoencoderKL(**config).to(torch.bfloat16).eval()
    show("16 bit", vae)
    scheme = Scheme(INT8, parse_granularity("channel"), None, Activation.TOKEN)
    names = [n for n, m in vae.named_modules() if isinstance(m, torch.nn.Conv2d)]
    packed = [name for name in names if not name.endswith(_KEPT)]
    for layer in replace_layers(vae, [(name, name, scheme) for name in packed]).values():
        layer.defers = True
    for band in BANDS:
        content.BAND = band * MIB
        show(f"int8, bands of {band} MiB", vae)


if __name__ == "__main__":
    main()
