"""The feature network of the bundled world, for LPIPS: AlexNet's five stages, narrower and finer.

Layers, with AlexNet's own in brackets: conv 7x7 stride 2 to 32 (11x11 stride 4 to 64), pool,
conv 5x5 to 96 (192), pool, conv 3x3 to 128 (384), conv 3x3 to 96 (256), conv 3x3 to 96 (256),
a ReLU after each; pools are 3x3 maxima at stride 2. The stride is halved because the pictures are
64 pixels wide and not 224. The five taps are the ReLUs, as in LPIPS, and the input is a picture
in [-1, 1] with no further normalization. Files: ``model.safetensors`` and ``config.json``.

Source: Krizhevsky 2014, arXiv:1404.5997 (one column AlexNet); Zhang et al. 2018, arXiv:1801.03924.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from quantkit.errors import ModelError
from quantkit.storage.jsonfile import DAMAGE, as_type, read_json, short
from quantkit.storage.tensorfile import read_header

_WEIGHTS, _CONFIG = "model.safetensors", "config.json"
#: Channels of a stage: four times those of the widest AlexNet there is.
_MOST = 2048


@dataclass(frozen=True)
class Stage:
    """One tap: an optional 3x3 maximum at stride 2, a convolution and a ReLU."""

    channels: int
    kernel: int
    stride: int
    pool: bool  #: whether the maximum comes before the convolution


STAGES = (
    Stage(channels=32, kernel=7, stride=2, pool=False),
    Stage(channels=96, kernel=5, stride=1, pool=True),
    Stage(channels=128, kernel=3, stride=1, pool=True),
    Stage(channels=96, kernel=3, stride=1, pool=False),
    Stage(channels=96, kernel=3, stride=1, pool=False),
)


class FeatureNetwork(nn.Module):
    """Five stages of features, and one non-negative weight per channel of each for LPIPS."""

    def __init__(self, stages: tuple[Stage, ...] = STAGES) -> None:
        super().__init__()
        self.stages = stages
        self.features = nn.ModuleList()
        self.heads = nn.ParameterList()
        channels = 3
        for stage in stages:
            layers: list[nn.Module] = [nn.MaxPool2d(3, stride=2)] if stage.pool else []
            layers.append(
                nn.Conv2d(channels, stage.channels, stage.kernel, stage.stride, stage.kernel // 2)
            )
            self.features.append(nn.Sequential(*layers, nn.ReLU()))
            self.heads.append(nn.Parameter(torch.ones(stage.channels), requires_grad=False))
            channels = stage.channels

    def forward(self, pictures: Tensor) -> list[Tensor]:
        """Return the five tap activations.

        Args:
            pictures: (n, 3, height, width) in [-1, 1], red green blue, at least 32 pixels a side.

        Returns:
            Five tensors (n, channels, height', width'), all at least zero.
        """
        taps: list[Tensor] = []
        for stage in self.features:
            pictures = stage(pictures)
            taps.append(pictures)
        return taps


def perceptual_distance(network: FeatureNetwork, first: Tensor, second: Tensor) -> Tensor:
    """Return the LPIPS distance of each pair of pictures in this network's own scale.

    Args:
        network: the features and the weights of their channels.
        first: (n, 3, height, width) in [-1, 1].
        second: the same shape.

    Returns:
        (n,) float32, zero for equal pictures.

    Source: Zhang et al. 2018, arXiv:1801.03924, equation 1.
    """
    return tap_distances(network, first, second).sum(1)


def tap_distances(network: FeatureNetwork, first: Tensor, second: Tensor) -> Tensor:
    """Return what each tap adds to the distance: (n, 5) float32.

    Channels are scaled to unit length at each position; their squared differences are weighted by
    the tap's head, summed over channels and averaged over positions.
    """
    distances = []
    for head, one, other in zip(network.heads, network(first), network(second), strict=True):
        difference = (_unit(one) - _unit(other)).square()
        distances.append((difference * head[:, None, None]).sum(1).mean((1, 2)))
    return torch.stack(distances, dim=1)


def save_feature_network(network: FeatureNetwork, directory: Path, about: dict[str, str]) -> None:
    """Write the network in fp16 with a config that says what each layer is.

    Args:
        network: what to write.
        directory: made if it is not there.
        about: sentences on training and on the heads, kept in the config.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: value.half().contiguous() for name, value in network.state_dict().items()}
    save_file({name: value.cpu() for name, value in tensors.items()}, directory / _WEIGHTS)
    config = {
        "architecture": "quantkit.eval.world.alexnet.FeatureNetwork",
        "input": "red green blue in [-1, 1]",
        "stages": [asdict(stage) for stage in network.stages],
        **about,
    }
    (directory / _CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def load_feature_network(path: Path | str) -> FeatureNetwork:
    """Load a network that ``save_feature_network`` wrote, in float32, for evaluation.

    Args:
        path: its directory.

    Returns:
        The network; calling it gives the list of five tap activations.

    Raises:
        ModelError: a file is missing, or the weights are not those of the config.
    """
    directory = Path(path)
    cure = "point to the folder of a feature network's files"
    config = read_json(directory / _CONFIG, cure=cure)
    header = read_header(directory / _WEIGHTS)
    try:
        stages = tuple(as_type(Stage, stage) for stage in config["stages"])
        _refuse_sizes(stages)
        with torch.device("meta"):  # no memory for what the config claims and the file has not
            network = FeatureNetwork(stages)
        tensors = {name: value.float() for name, value in load_file(header.path).items()}
        network.load_state_dict(tensors, assign=True)
    except (*DAMAGE, RuntimeError, SafetensorError) as error:
        raise ModelError(
            f"{directory}: {_CONFIG} and {_WEIGHTS} are not those of one feature network "
            f"({short(error)}); {cure}"
        ) from error
    return network.eval()


def _refuse_sizes(stages: tuple[Stage, ...]) -> None:
    for stage in stages:
        if not all(1 <= n <= _MOST for n in (stage.channels, stage.kernel, stage.stride)):
            raise ValueError(f"a stage of {stage}, expected sizes of 1 to {_MOST}")


def _unit(features: Tensor) -> Tensor:
    # The small term keeps dead positions at zero instead of NaN, as LPIPS does.
    length = features.square().sum(1, keepdim=True).sqrt()
    return features / (length + 1e-10)
