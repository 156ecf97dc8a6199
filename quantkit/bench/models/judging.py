"""Judgement of a whole model: layer by layer, and by distance.

Rounding to FP8 is chaotic over many layers: where a sum is rounded otherwise by one bit, a code of
the next layer may be its neighbour, and a few dozen layers later two right results differ by as
much as FP8 costs. So packed layers are judged one by one, each on the input that it had.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quantkit.bench.kernels.contender import Judgement
from quantkit.inference.layers.deviation import watch

#: Largest error of a packed layer over the rms of what ``reference`` gives. float16 rounds by 5e-4
#: of a value; inputs with outliers have values of 30 rms.
_LAYER = 0.05
#: ||difference|| / ||output|| of two right runs, where float16 rounds elsewhere.
_ROUNDED = 0.05
#: Two results that FP8 noise has taken apart: sqrt(2) times as far as each is from float16.
_APART = 1.5


@dataclass(frozen=True)
class Eager:
    """The result of a model without torch.compile."""

    output: Tensor
    #: of the packed layer that is farthest from ``reference``; 0 where none is packed
    worst_layer: float


def run_eager(model: nn.Module, step: Callable[[], Tensor]) -> Eager:
    """Run a model once, every packed layer a second time on ``reference``."""
    with watch(model) as seen:
        output = step().float()
    worst = seen.worst_kernel[1] if seen.layers else 0.0
    return Eager(output, worst if bool(torch.isfinite(output).all()) else float("nan"))


def judge_dense(output: Tensor, original: Eager, limit: float = _ROUNDED) -> Judgement:
    """Judge a model that is not packed by the original."""
    return Judgement(distance(output, original.output), limit)


def judge_packed(output: Tensor, eager: Eager, original: Eager) -> Judgement:
    """Judge a packed model, compiled or not.

    Args:
        output: what it gave.
        eager: the packed model, not compiled.
        original: the model in float16.

    Returns:
        the worst layer's, and where that is right that of the output.
    """
    layers = Judgement(eager.worst_layer, _LAYER)
    noise = distance(eager.output, original.output)
    whole = Judgement(distance(output, eager.output), max(_ROUNDED, _APART * noise))
    return layers if whole.right else whole


def judge_attention(quantized: Eager, plain: Eager, original: Eager) -> Judgement:
    """Judge the attention of a packed model as far as the noise of its layers lets it.

    Args:
        quantized: the packed model with its attention on codes, not compiled.
        plain: the same with torch's attention.
        original: the model in float16.
    """
    noise = distance(plain.output, original.output)
    found = distance(quantized.output, plain.output)
    return Judgement(found, max(_ROUNDED, _APART * noise))


def distance(output: Tensor, right: Tensor) -> float:
    """Return ||output - right|| / ||right||; NaN where shapes differ or a value is not finite."""
    if output.shape != right.shape:
        return float("nan")
    found = (output.float() - right.float()).norm() / right.float().norm()
    return float(found) if bool(torch.isfinite(found)) else float("nan")
