"""Gradient steps on the masked layers of one block, towards what its teacher answers.

Source: Li et al. 2021, BRECQ, arXiv:2102.05426, which reconstructs quantized blocks in this way.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn

from quantkit.recovery.reconstruct.block_call import BlockCall

_BETAS = (0.9, 0.95)
_WARM_UP = 5


@dataclass(frozen=True, eq=False)
class Student:
    """A masked layer of the student."""

    #: a copy with float32 parameters of its own
    layer: nn.Module
    #: bool of the weight's shape, which weights are kept
    mask: Tensor

    def parameters(self) -> tuple[Tensor, ...]:
        """Return the weight, and the bias if there is one."""
        return tuple(self.layer.parameters())

    def copies(self) -> tuple[Tensor, ...]:
        """Return what the parameters are now."""
        return tuple(value.detach().clone() for value in self.parameters())

    @torch.no_grad()
    def take(self, values: Sequence[Tensor]) -> None:
        """Replace the parameters by values, as ``copies`` returned them."""
        for parameter, value in zip(self.parameters(), values, strict=True):
            parameter.copy_(value)


@dataclass(frozen=True)
class Tuning:
    """How blocks are refined."""

    #: highest learning rate
    rate: float
    #: gradient steps of a block; None: the time decides
    steps: int | None
    #: rows of one step: a row is hundreds of tokens or pixels, so few do
    batch: int = 8


def refine(
    call: BlockCall,
    students: Sequence[Student],
    how: Tuning,
    generator: Generator,
    fraction: Callable[[], float],
) -> int:
    """Train the layers of a block, its pairs alone; their masks stay.

    Args:
        call: what the block was asked and should answer.
        students: its masked layers, changed.
        how: how fast.
        generator: on the CPU; draws the rows.
        fraction: how much of the time is over.

    Returns:
        the steps taken.
    """
    parameters = [p for student in students for p in student.parameters()]
    for parameter in parameters:
        parameter.requires_grad_(True)
    optimizer = torch.optim.Adam(parameters, lr=how.rate, betas=_BETAS)
    step = 0
    with torch.enable_grad():
        while (done := _done(step, how.steps, fraction())) < 1:
            warm = min(1.0, (step + 1) / _WARM_UP)
            for group in optimizer.param_groups:
                group["lr"] = how.rate * warm * 0.5 * (1 + math.cos(math.pi * done))
            rows = torch.randint(call.rows, (how.batch,), generator=generator)
            call.loss(rows.to(call.target[0].device)).backward()  # type: ignore[no-untyped-call]
            for student in students:
                gradient = student.layer.get_parameter("weight").grad
                if gradient is not None:
                    gradient.mul_(student.mask)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step += 1
    for parameter in parameters:
        parameter.requires_grad_(False)
    return step


def _done(step: int, steps: int | None, fraction: float) -> float:
    return max(fraction, 0.0 if steps is None else step / steps)
