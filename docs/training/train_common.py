"""Plans, the loop, moving averages and the file of figures of all training stages."""

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from quantkit.eval.world.scenes import Scenes
from torch import Generator, Tensor, nn

from docs.training.render import render
from docs.training.scene_layout import lay_out

_Model = TypeVar("_Model", bound=nn.Module)

#: Seeds of pictures and captions that no training stage draws from.
HELD_OUT_SEED, PROMPT_SEED = 7_000_001, 7_000_002


@dataclass(frozen=True)
class TrainingPlan:
    """Steps and rates of training with AdamW and a cosine schedule."""

    steps: int
    batch: int
    rate: float  #: highest learning rate
    warm_up: int  #: steps until it is reached
    decay: float = 0.01  #: weight decay
    momentum: tuple[float, float] = (0.9, 0.99)
    average: float = 0.999  #: decay of the moving average of the weights that is kept


@dataclass(frozen=True)
class Options:
    """Options of a run."""

    out: Path
    device: torch.device
    scale: float  #: share of the planned steps and pictures
    batch_scale: float  #: share of the planned batch sizes
    compiled: bool  #: whether models and pictures go through torch.compile
    seed: int

    def fit_plan(self, plan: TrainingPlan) -> TrainingPlan:
        """Return the plan cut down to this run's share, at least 2 steps of 8 pictures."""
        return replace(
            plan,
            steps=max(2, round(plan.steps * self.scale)),
            batch=max(8, round(plan.batch * self.batch_scale)),
            warm_up=round(plan.warm_up * min(1.0, self.scale)),
        )

    def generator(self, stage: int) -> Generator:
        """Return the stage's own source of randomness on the device."""
        return Generator(self.device).manual_seed(self.seed + stage)

    def compile(self, function: Any) -> Any:
        """Return the module or function, compiled where this run compiles."""
        return torch.compile(function, dynamic=False) if self.compiled else function

    def painter(self) -> Callable[[Scenes, Generator], Tensor]:
        """Return a function that lays scenes out at random and draws them in [-1, 1]."""
        draw = self.compile(render)
        return lambda scenes, generator: 2 * draw(scenes, lay_out(scenes, generator)) - 1


def train(
    name: str,
    model: nn.Module,
    draw_loss: Callable[[], Tensor],
    plan: TrainingPlan,
    device: torch.device,
) -> None:
    """Train a model in place and leave it with the moving average of its weights.

    Args:
        name: what progress lines begin with.
        model: whose parameters are trained; the loss may belong to more modules inside it.
        draw_loss: draws one batch and returns its scalar loss; run in bf16 autocast on a GPU.
        plan: steps and rates.
        device: where the model is.
    """
    parameters = [value for value in model.parameters() if value.requires_grad]
    average = [value.detach().clone() for value in parameters]
    optimizer = torch.optim.AdamW(
        parameters,
        lr=plan.rate,
        betas=plan.momentum,
        weight_decay=plan.decay,
        fused=device.type == "cuda",
    )
    begun = time.monotonic()
    for step in range(plan.steps):
        for group in optimizer.param_groups:
            group["lr"] = plan.rate * _schedule(step, plan)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = draw_loss()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        # A young average forgets faster, or it would remember the initialization.
        decay = min(plan.average, (1 + step) / (10 + step))
        torch._foreach_lerp_(average, [value.detach() for value in parameters], 1 - decay)
        if step in (0, 9) or step % max(1, plan.steps // 20) == 0 or step + 1 == plan.steps:
            # Reading the loss waits for the device, so it is read twenty times and not always.
            print(f"{name}: step {step} loss {loss.item():.4f} {_rate(step, begun)}", flush=True)
    with torch.no_grad():
        for value, mean in zip(parameters, average, strict=True):
            value.copy_(mean)


def _schedule(step: int, plan: TrainingPlan) -> float:
    warm = min(1.0, (step + 1) / max(1, plan.warm_up))
    return warm * 0.5 * (1 + math.cos(math.pi * step / plan.steps))


def _rate(step: int, begun: float) -> str:
    seconds = time.monotonic() - begun
    return f"{seconds:.1f} s, {(step + 1) / seconds:.1f} steps/s"


@contextmanager
def frozen(model: _Model) -> Iterator[_Model]:
    """Hold a model in evaluation mode and compute without gradients."""
    model.eval()
    with torch.no_grad():
        yield model


def read_figures(out: Path) -> dict[str, Any]:
    """Return what ``training.json`` holds, or nothing where no stage has run."""
    path = out / "training.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def write_figures(out: Path, figures: dict[str, Any]) -> None:
    """Replace ``training.json`` in one step."""
    out.mkdir(parents=True, exist_ok=True)
    temporary = out / ".training.json"
    temporary.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    temporary.replace(out / "training.json")
