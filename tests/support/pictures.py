"""Pictures of noise, and networks that are small enough to judge them."""

import numpy as np
import torch
from quantkit.eval.measuring.backbones import Backbones, ClipBackbone, LpipsBackbone
from quantkit.eval.measuring.metrics import METRICS, Needs
from quantkit.eval.measuring.pictures import Pairs, save_png
from quantkit.eval.world.alexnet import FeatureNetwork, Stage, perceptual_distance

CPU = torch.device("cpu")

PAIR_METRICS = [metric for metric in METRICS.values() if metric.needs is Needs.PAIR]


def pixels(seed=0, height=48, width=40):
    rng = np.random.default_rng(seed)
    low = rng.integers(0, 256, (height // 8, width // 8, 3))
    return np.kron(low, np.ones((8, 8, 1))).astype(np.uint8)


def noisy(picture, sigma, seed=1):
    noise = np.random.default_rng(seed).normal(0, sigma, picture.shape)
    return np.clip(picture + noise, 0, 255).round().astype(np.uint8)


def small_network():
    """The demo's class with two stages of random weights: enough to see the formula."""
    torch.manual_seed(3)
    network = FeatureNetwork((Stage(6, 5, 2, pool=False), Stage(9, 3, 1, pool=True)))
    for head in network.heads:
        head.data = torch.rand(len(head))
    return network.eval()


def small_lpips():
    network = small_network()
    return LpipsBackbone("two stages", lambda a, b: perceptual_distance(network, a, b), CPU)


SMALL = Backbones(lpips=small_lpips())


def made_pairs(count=4, sigma=3.0, prompts=None):
    originals = tuple(pixels(seed) for seed in range(count))
    packed = tuple(noisy(p, sigma * (i + 1), seed=i) for i, p in enumerate(originals))
    return Pairs(tuple(f"{i:03d}" for i in range(count)), originals, packed, prompts)


class FakeClip(ClipBackbone):
    """Scores pictures by their mean: a CLIP whose numbers can be computed by hand."""

    def score(self, picture, prompt):
        return float(picture.mean()) / 10 + len(prompt)

    def embed(self, picture, prompt):
        """The colours of a picture, and one direction for every prompt."""
        del prompt
        return torch.tensor(picture.reshape(-1, 3).mean(0)), torch.ones(3)


def fake_clip():
    return FakeClip("means", None, None, CPU)


def write_folders(tmp_path, pairs):
    for side in ("original", "packed"):
        for name, picture in zip(pairs.names, getattr(pairs, side), strict=True):
            save_png(picture, tmp_path / side / f"{name}.png")
    return tmp_path / "original", tmp_path / "packed"
