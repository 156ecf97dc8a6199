"""Training a masked student on its teacher's answers."""

import math
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional

from quantkit.errors import NonFiniteError, QuantkitError
from quantkit.recovery.bank import Bank, Teacher
from quantkit.recovery.calls import Template
from quantkit.recovery.settings import Settings

#: Steps after which the loss is read, which waits for the device.
READ_EVERY = 25


@dataclass(frozen=True)
class Point:
    """How far a training is."""

    step: int
    #: mean squared error of the student's answers, over the steps since the last point
    loss: float
    seconds: float
    #: share of the steps or of the time, whichever is further: 1 at the end
    fraction: float


class _Call(nn.Module):
    """The student as a function of rows."""

    def __init__(self, denoiser: nn.Module, template: Template) -> None:
        super().__init__()
        self.denoiser = denoiser
        self._template = template

    def forward(self, *rows: Tensor) -> Tensor:
        answer: Tensor = self.denoiser(**self._template.arguments(rows))[0]
        return answer


class Trainer:
    """One student, its optimizer and the moving average of its weights."""

    def __init__(
        self, student: nn.Module, masks: Mapping[str, Tensor], teacher: Teacher, settings: Settings
    ) -> None:
        """Prepare the training.

        Args:
            student: a float32 copy of the teacher's denoiser; changed in place.
            masks: parameter name -> bool of its shape, True where a weight is kept.
            teacher: makes the trajectories.
            settings: how long and how fast.
        """
        named = dict(student.named_parameters())
        self._student = student
        self._parameters = list(named.values())
        self._device = self._parameters[0].device
        self._masked = [(named[name], mask) for name, mask in masks.items()]
        self._teacher = teacher
        self._settings = settings
        with torch.no_grad():
            for weight, mask in self._masked:
                weight.mul_(mask)
        self.average = {name: value.detach().clone() for name, value in named.items()}
        self._generator = Generator(self._device).manual_seed(settings.seed)
        self._optimizer = torch.optim.AdamW(
            self._parameters,
            lr=settings.rate,
            betas=(0.9, 0.99),
            weight_decay=settings.weight_decay,
            fused=self._device.type == "cuda",
        )
        self._begun = time.monotonic()
        #: steps done
        self.step = 0

    def run(self, watch: Callable[[Point], None]) -> list[Point]:
        """Train to the end of the steps or of the time, and return the loss on the way.

        Raises:
            NonFiniteError: the loss is NaN or Inf.
            QuantkitError: out of GPU memory.
        """
        try:
            with warnings.catch_warnings():
                # Graphs are captured on a stream of their own, once; the wait costs nothing.
                warnings.filterwarnings("ignore", message="The AccumulateGrad node's stream")
                return self._run(watch)
        except torch.OutOfMemoryError as error:
            raise QuantkitError(
                f"out of GPU memory at a batch of {self._settings.batch}; take a smaller --batch, "
                "or --checkpointing"
            ) from error

    def _run(self, watch: Callable[[Point], None]) -> list[Point]:
        bank = self._fill()
        call = self._make_call(bank)
        points: list[Point] = []
        losses: list[Tensor] = []
        # A run whose time is over before it began still takes one step.
        while not self.step or self._fraction() < 1:
            if self.step and self.step % self._settings.refresh == 0:
                bank.put(self._teacher.sample(self._sampling_batch))
            losses.append(self._train(call, bank))
            self.step += 1
            if self.step % READ_EVERY == 0 or self.step in (1, self._settings.steps):
                points.append(self._read(losses))
                watch(points[-1])
        if losses:
            points.append(self._read(losses))
            watch(points[-1])
        return points

    @property
    def _sampling_batch(self) -> int:
        return min(self._settings.sampling_batch, self._settings.trajectories)

    def _fill(self) -> Bank:
        """Sample until the bank is full, or a fifth of the time is over."""
        settings = self._settings
        first = self._teacher.sample(self._sampling_batch)
        wanted = -(-settings.trajectories // self._sampling_batch)
        chunks = max(1, min(wanted, settings.bank_bytes // first.nbytes))
        bank = Bank(first, chunks)
        for _ in range(chunks - 1):
            if settings.seconds is not None and self._elapsed() > settings.seconds / 5:
                break
            bank.put(self._teacher.sample(self._sampling_batch))
        return bank

    def _make_call(self, bank: Bank) -> Callable[..., Tensor]:
        call = _Call(self._student, bank.template)
        if self._device.type != "cuda" or not self._settings.graphs:
            return call
        if self._settings.checkpointing:
            return call
        rows = _floats(bank.draw(self._settings.batch, self._generator)[0])
        with self._autocast():
            graphed: Any = torch.cuda.make_graphed_callables(
                call, tuple(rows), allow_unused_input=True
            )
        replay: Callable[..., Tensor] = graphed
        return replay

    def _autocast(self) -> torch.autocast:
        # Without its cache, because casts that are cached outside of a graph are lost to it.
        on_gpu = self._device.type == "cuda"
        return torch.autocast(
            self._device.type, torch.bfloat16, enabled=on_gpu, cache_enabled=False
        )

    def _train(self, call: Callable[..., Tensor], bank: Bank) -> Tensor:
        """Take one step and return its loss, without waiting for the device."""
        rows, wanted = bank.draw(self._settings.batch, self._generator)
        with self._autocast():
            answer = call(*_floats(rows))
        loss = functional.mse_loss(answer.float(), wanted.float())
        loss.backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            # Before the norm is taken: what is not there must not slow the rest.
            for weight, mask in self._masked:
                if weight.grad is not None:
                    weight.grad.mul_(mask)
        nn.utils.clip_grad_norm_(self._parameters, 1.0)
        for group in self._optimizer.param_groups:
            group["lr"] = self._settings.rate * self._schedule()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        # A young average forgets faster, or it would remember the weights of one shot.
        decay = min(self._settings.average, (1 + self.step) / (10 + self.step))
        current = [value.detach() for value in self._parameters]
        torch._foreach_lerp_(list(self.average.values()), current, 1 - decay)
        return loss.detach()

    def _schedule(self) -> float:
        warm = min(1.0, (self.step + 1) / max(1, self._settings.warm_up))
        return warm * 0.5 * (1 + math.cos(math.pi * min(1.0, self._fraction())))

    def _fraction(self) -> float:
        steps, seconds = self._settings.steps, self._settings.seconds
        return max(
            0.0 if steps is None else self.step / steps,
            0.0 if seconds is None else self._elapsed() / seconds,
        )

    def _elapsed(self) -> float:
        return time.monotonic() - self._begun

    def _read(self, losses: list[Tensor]) -> Point:
        loss = float(torch.stack(losses).mean())
        losses.clear()
        if not math.isfinite(loss):
            raise NonFiniteError(
                f"recovery: the loss is {loss} at step {self.step}; take a lower --rate"
            )
        return Point(self.step, loss, self._elapsed(), min(1.0, self._fraction()))


def _floats(rows: list[Tensor]) -> list[Tensor]:
    return [value.float() if value.is_floating_point() else value for value in rows]
