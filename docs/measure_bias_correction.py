"""How far packed layers shift the mean of their output, on inputs that calibration did not see.

python docs/measure_bias_correction.py MODEL PACKED... --prompts FILE: the last four prompts of
FILE run through MODEL, and every packed layer is called with what the original's layer was.
"""

from collections import defaultdict
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor, nn

import quantkit
from quantkit.inference.layers.packed_layer import PackedLayer
from quantkit.models.source import open_model
from quantkit.pipelines.batches import split_batches
from quantkit.pipelines.running import load_pipeline, quiet_libraries, read_prompts, run_batch
from quantkit.recipe.schema import CalibrationRecipe

#: Four prompts of ten steps; the seed is far from those that calibration starts from.
RUN = CalibrationRecipe(prompts=4, steps=10, batch=4, guidance=4.0, seed=500)


class Sums:
    """Of one layer, over its calls: shift (N,), power of the output and of the error."""

    def __init__(self) -> None:
        self.shift: Tensor | float = 0.0
        self.power = self.error = 0.0
        self.calls = 0

    def add(self, found: Tensor, wanted: Tensor) -> None:
        """Take in one call's packed and original output."""
        dims = [d for d in range(wanted.ndim) if d != (1 if wanted.ndim == 4 else wanted.ndim - 1)]
        difference = (found - wanted).double()
        self.shift = self.shift + difference.mean(dims)
        self.power += float(wanted.double().square().mean())
        self.error += float(difference.square().mean())
        self.calls += 1

    @property
    def relative_shift(self) -> float:
        """Rms over the channels of the mean shift, over the rms of the output."""
        assert isinstance(self.shift, Tensor)
        rms = (self.shift / self.calls).square().mean().sqrt()
        return float(rms) / (self.power / self.calls) ** 0.5


def measure(pipe: Any, packed: nn.Module, prompts: tuple[str, ...]) -> dict[str, Sums]:
    """Return the sums of every layer that is packed."""
    layers = {n: m for n, m in packed.named_modules() if isinstance(m, PackedLayer)}
    sums: dict[str, Sums] = defaultdict(Sums)

    def listener(name: str) -> Any:
        def listen(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            sums[name].add(layers[name](args[0]), output)

        return listen

    handles = [
        pipe.unet.get_submodule(name).register_forward_hook(listener(name)) for name in layers
    ]
    for batch in split_batches(prompts, RUN):
        run_batch(pipe, batch, RUN)
    for handle in handles:
        handle.remove()
    return sums


@click.command()
@click.argument("model")
@click.argument("packed", nargs=-1, required=True)
@click.option("--prompts", type=click.Path(path_type=Path), required=True)
def main(model: str, packed: tuple[str, ...], prompts: Path) -> None:
    """Print the mean over all layers with a bias, and over all layers."""
    texts = read_prompts(prompts)[-RUN.prompts :]
    with quiet_libraries(), torch.no_grad():
        pipe = load_pipeline(open_model(model), torch.device("cpu"))
        for path in packed:
            sums = measure(pipe, quantkit.load_pipeline(path).unet, texts)
            biased = [n for n in sums if pipe.unet.get_submodule(n).bias is not None]
            for title, names in (("with a bias", biased), ("all", list(sums))):
                shift = sum(sums[n].relative_shift for n in names) / len(names)
                error = sum((sums[n].error / sums[n].power) ** 0.5 for n in names) / len(names)
                click.echo(f"{path}, {len(names)} layers, {title}: {shift:.2e}, error {error:.4f}")


if __name__ == "__main__":
    main()
