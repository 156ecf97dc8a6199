"""Stage 3: the feature network for LPIPS, as a classifier of everything that captions say."""

from typing import Any

import torch
from quantkit.eval.world.alexnet import (
    STAGES,
    FeatureNetwork,
    load_feature_network,
    perceptual_distance,
    save_feature_network,
    tap_distances,
)
from quantkit.eval.world.outlines import SHAPES
from quantkit.eval.world.scenes import (
    COLOURS,
    FILLS,
    PATTERNS,
    RELATIONS,
    SIZES,
    Scenes,
    draw_scenes,
    order_scenes,
)
from torch import Generator, Tensor, nn
from torch.nn import functional

from docs.training.render import draw_pictures
from docs.training.train_common import (
    HELD_OUT_SEED,
    Options,
    TrainingPlan,
    frozen,
    train,
)

PLAN = TrainingPlan(steps=2500, batch=1024, rate=1e-3, warm_up=100)
#: What two unrelated pictures are apart: the level that LPIPS shows on unrelated photographs.
_UNRELATED = 0.7
#: Cells along each side that the classifier sees of the last tap: it must know left from right.
_CELLS = 4


class _Classifier(nn.Module):
    """The features and one linear answer per property; only the features are kept."""

    def __init__(self, classes: list[int]) -> None:
        super().__init__()
        self.network = FeatureNetwork()
        self.hidden = nn.Linear(STAGES[-1].channels * _CELLS**2, 256)
        self.answer = nn.Linear(256, sum(classes))

    def forward(self, pictures: Tensor) -> Tensor:
        cells = functional.adaptive_avg_pool2d(self.network(pictures)[-1], _CELLS)
        answer: Tensor = self.answer(self.hidden(cells.flatten(1)).relu())
        return answer


def train_alexnet(options: Options) -> dict[str, Any]:
    """Train the feature network and write ``alexnet/``."""
    plan, device = options.fit_plan(PLAN), options.device
    torch.manual_seed(options.seed)
    counts = [len(SHAPES), len(COLOURS), len(SIZES), len(FILLS)]
    classes = [count for count in counts for _ in range(2)]
    classes += [len(RELATIONS), len(COLOURS), len(PATTERNS)]
    model = _Classifier(classes).to(device).train()
    generator, paint = options.generator(3), options.painter()
    run = options.compile(model)

    def draw_loss() -> Tensor:
        scenes = draw_scenes(plan.batch, generator)
        answers = run(paint(scenes, generator)).float().split(classes, dim=1)
        pairs = zip(answers, _labels(scenes), strict=True)
        return torch.stack([functional.cross_entropy(*pair) for pair in pairs]).mean()

    train("alexnet", model, draw_loss, plan, device)
    scenes, pictures = draw_pictures(2048, Generator().manual_seed(HELD_OUT_SEED))
    pictures = (2 * pictures - 1).to(device)
    with frozen(model):
        answers = model(pictures).split(classes, dim=1)
        labels = _labels(scenes.to(device))
        right = [(a.argmax(1) == b).double().mean() for a, b in zip(answers, labels, strict=True)]
        _set_heads(model.network, pictures)
    about = {
        "training": "classifier of shape, colour, size, fill, relation, ground and pattern",
        "heads": "equal within a tap; each tap gives one fifth of what two unrelated pictures "
        f"are apart, {_UNRELATED} on average",
    }
    save_feature_network(model.network, options.out / "alexnet", about)
    figures = {
        "steps": plan.steps,
        "batch": plan.batch,
        "accuracy": torch.stack(right).mean().item(),
    }
    return figures | _distances(options, pictures)


def _labels(scenes: Scenes) -> list[Tensor]:
    ordered = order_scenes(scenes)
    pairs = (ordered.shape, ordered.colour, ordered.size, ordered.fill)
    slots = [column for pair in pairs for column in pair.unbind(1)]
    return [*slots, ordered.relation, ordered.ground, ordered.pattern]


def _set_heads(network: FeatureNetwork, pictures: Tensor) -> None:
    # The heads are still ones, so this is the unweighted distance of every tap.
    apart = tap_distances(network, pictures, pictures.roll(1, 0)).mean(0)
    for head, distance in zip(network.heads, apart, strict=True):
        head.fill_(_UNRELATED / len(network.heads) / distance.item())


def _distances(options: Options, pictures: Tensor) -> dict[str, Any]:
    noise = torch.randn(pictures.shape, generator=Generator().manual_seed(HELD_OUT_SEED))
    noise = noise.to(pictures.device)
    with frozen(load_feature_network(options.out / "alexnet").to(options.device)) as network:
        levels = {
            str(level): perceptual_distance(network, pictures, pictures + level * noise)
            for level in (0.02, 0.05, 0.1, 0.2)
        }
        unrelated = perceptual_distance(network, pictures, pictures.roll(1, 0))
    return {
        "distance_of_noise": {level: value.mean().item() for level, value in levels.items()},
        "distance_of_unrelated": unrelated.mean().item(),
    }
