"""Steps of the optimizer and of the moving average, with states on the GPU or in host memory."""

from collections import deque
from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from quantkit.recovery.distill.distributed import Ranks
from quantkit.recovery.distill.settings import DistillSettings

BETAS = (0.9, 0.99)
EPSILON = 1e-8

#: Largest norm of a gradient.
LARGEST_NORM = 1.0

#: Offloaded averages follow at every such step: they must travel to the weights and back.
AVERAGE_EVERY = 8

#: Parameters whose gradients may wait on the GPU for their states.
_WAITING = 16


class Stepper(Protocol):
    """The interface of optimizers. A step is ``begin``, a backward pass, ``finish``."""

    #: parameter name -> moving average, float32
    average: dict[str, Tensor]

    def begin(self, rate: float, decay: float) -> None:
        """Set the learning rate and the decay of the average for the coming backward pass."""

    def finish(self) -> None:
        """Take the step."""

    def state(self) -> dict[str, Tensor]:
        """Return all that a later process needs to go on, by name; views, not copies."""

    def restore(self, state: Mapping[str, Tensor], steps: int) -> None:
        """Go on where ``state`` was taken, after ``steps`` steps."""

    def close(self) -> None:
        """Release resources other than memory."""


class Resident:
    """AdamW over float32 parameters; all on the student's device."""

    def __init__(
        self,
        student: nn.Module,
        masks: Mapping[str, Tensor],
        settings: DistillSettings,
        ranks: Ranks,
    ) -> None:
        """Mask the parameters, which are changed in place.

        Args:
            student: float32.
            masks: parameter name -> bool of its shape, True where a weight is kept.
            settings: how fast.
            ranks: whose gradients are averaged.
        """
        self._named = dict(student.named_parameters())
        self._parameters = list(self._named.values())
        self._masked = [(self._named[name], mask) for name, mask in masks.items()]
        self._ranks = ranks
        with torch.no_grad():
            for weight, mask in self._masked:
                weight.mul_(mask)
        self.average = {name: value.detach().clone() for name, value in self._named.items()}
        self._optimizer = torch.optim.AdamW(
            self._parameters,
            lr=settings.rate,
            betas=BETAS,
            eps=EPSILON,
            weight_decay=settings.weight_decay,
            fused=self._parameters[0].is_cuda,
        )
        self._decay = 0.0

    def begin(self, rate: float, decay: float) -> None:
        """Set the learning rate and decay of the next step."""
        self._decay = decay
        for group in self._optimizer.param_groups:
            group["lr"] = rate

    @torch.no_grad()
    def finish(self) -> None:
        """Average the gradients over all processes, mask and clip them, and step."""
        self._ranks.average_(p.grad for p in self._parameters if p.grad is not None)
        # Before the norm is taken: what is not there must not slow the rest.
        for weight, mask in self._masked:
            if weight.grad is not None:
                weight.grad.mul_(mask)
        nn.utils.clip_grad_norm_(self._parameters, LARGEST_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        current = [value.detach() for value in self._parameters]
        torch._foreach_lerp_(list(self.average.values()), current, 1 - self._decay)

    def state(self) -> dict[str, Tensor]:
        """Return weights, average and moments."""
        tensors: dict[str, Tensor] = {}
        for name, value in self._named.items():
            tensors[f"weight/{name}"] = value.detach()
            tensors[f"average/{name}"] = self.average[name]
            moments = self._optimizer.state.get(value, {})
            for part in ("exp_avg", "exp_avg_sq"):
                if part in moments:
                    tensors[f"{part}/{name}"] = moments[part]
        return tensors

    @torch.no_grad()
    def restore(self, state: Mapping[str, Tensor], steps: int) -> None:
        """Go on where ``state`` was taken."""
        for name, value in self._named.items():
            value.copy_(state[f"weight/{name}"])
            self.average[name].copy_(state[f"average/{name}"])
            if f"exp_avg/{name}" in state:
                # As AdamW keeps its count: on the parameters' device when fused, else on the CPU.
                count = torch.tensor(float(steps), device=value.device)
                self._optimizer.state[value] = {
                    "step": count,
                    "exp_avg": state[f"exp_avg/{name}"].to(value.device),
                    "exp_avg_sq": state[f"exp_avg_sq/{name}"].to(value.device),
                }

    def close(self) -> None:
        """Nothing to release."""


class Offloaded:
    """AdamW whose float32 weights, moments and average lie in the CPU's memory.

    As soon as the backward pass has a parameter's gradient, its states come to the GPU, are stepped
    there and go back, on a stream of their own. Neither all gradients nor all states are ever on
    the GPU. Gradients are clipped by the norm of the step before, since their own is not known yet.
    """

    def __init__(
        self,
        student: nn.Module,
        source: nn.Module,
        masks: Mapping[str, Tensor],
        settings: DistillSettings,
        ranks: Ranks,
    ) -> None:
        """Take float32 copies of the parameters.

        Args:
            student: the working copy in any dtype; its parameters are changed in place.
            source: what it starts from, unrounded: the same parameters.
            masks: parameter name -> bool of its shape, on the CPU.
            settings: how fast.
            ranks: whose gradients are averaged.
        """
        self._named = dict(student.named_parameters())
        self._device = next(iter(self._named.values())).device
        self._masks = masks
        self._settings = settings
        self._ranks = ranks
        self._blocks = [_HostBlock(self._named) for _ in range(4)]
        self._weights, self.average, self._first, self._second = (b.parts for b in self._blocks)
        for name, value in source.named_parameters():
            self._weights[name].copy_(value.detach())
            if name in masks:
                self._weights[name].mul_(masks[name])
            self.average[name].copy_(self._weights[name])
        self._rate = self._decay = 0.0
        self._steps = 0
        self._clip = torch.ones((), device=self._device)
        self._squares = torch.zeros((), device=self._device)
        self._waiting: deque[Any] = deque()
        self._stream: Any = None
        if self._device.type == "cuda":
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        for name, value in self._named.items():
            value.data.copy_(self._weights[name])
            hook = partial(self._step_on_stream, name)
            value.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def begin(self, rate: float, decay: float) -> None:
        """Set the learning rate and decay of the hooks of the coming backward pass."""
        self._rate = rate
        # Young averages follow every step; old ones hardly move in a few.
        due = decay < self._settings.average or self._steps % AVERAGE_EVERY == 0
        power = AVERAGE_EVERY if decay >= self._settings.average else 1
        self._decay = decay**power if due else 1.0
        self._steps += 1

    def finish(self) -> None:
        """Wait, on the GPU, for the parameters; set the clipping of the next step."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        self._clip = (LARGEST_NORM / (self._squares.sqrt() + 1e-6)).clamp(max=1.0)
        self._squares = torch.zeros_like(self._squares)

    def state(self) -> dict[str, Tensor]:
        """Return weights, average and moments."""
        self._synchronize()
        parts = {
            "weight": self._weights,
            "average": self.average,
            "exp_avg": self._first,
            "exp_avg_sq": self._second,
        }
        named = {f"{part}/{n}": t for part, by_name in parts.items() for n, t in by_name.items()}
        return named | {"clip": self._clip}

    @torch.no_grad()
    def restore(self, state: Mapping[str, Tensor], steps: int) -> None:
        """Go on where ``state`` was taken."""
        for name, tensor in self.state().items():
            tensor.copy_(state[name])
        for name, value in self._named.items():
            value.data.copy_(self._weights[name])
        self._steps = steps

    def close(self) -> None:
        """Unpin the memory; the averages stay."""
        self._synchronize()
        for block in self._blocks:
            block.close()

    def _synchronize(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    @torch.no_grad()
    def _step_on_stream(self, name: str, parameter: Tensor) -> None:
        """Step one parameter while the backward pass goes on."""
        if self._stream is None:
            self._step(name, parameter)
            return
        assert parameter.grad is not None
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            parameter.grad.record_stream(self._stream)
            self._step(name, parameter)
            self._waiting.append(self._stream.record_event())
        if len(self._waiting) > _WAITING:
            self._waiting.popleft().synchronize()

    def _step(self, name: str, parameter: Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None
        parameter.grad = None
        self._ranks.average_([gradient])
        gradient = gradient.float()
        if name in self._masks:
            gradient.mul_(self._to_device(self._masks[name]))
        self._squares += gradient.square().sum()
        gradient.mul_(self._clip)
        host = (self._weights[name], self._first[name], self._second[name])
        weight, first, second = (self._to_device(tensor) for tensor in host)
        adamw(
            [weight], [gradient], [first], [second], [], [torch.tensor(float(self._steps - 1))],
            foreach=False, amsgrad=False, beta1=BETAS[0], beta2=BETAS[1], lr=self._rate,
            weight_decay=self._settings.weight_decay, eps=EPSILON, maximize=False,
        )  # fmt: skip
        for there, here in zip(host, (weight, first, second), strict=True):
            there.copy_(here, non_blocking=True)
        if self._decay < 1:
            average = self._to_device(self.average[name])
            self.average[name].copy_(average.lerp_(weight, 1 - self._decay), non_blocking=True)
        parameter.data.copy_(weight)

    def _to_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, non_blocking=True)


class _HostBlock:
    """Float32 zeros shaped like some values, in one block of the CPU's memory, pinned for a GPU."""

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        sizes = [value.numel() for value in values.values()]
        self._flat = torch.zeros(sum(sizes), dtype=torch.float32)
        self._pinned = any(value.is_cuda for value in values.values())
        if self._pinned:
            # Not pin_memory(), which rounds up to a power of two: 16 GB for the 10 of SDXL's UNet.
            address, size = self._flat.data_ptr(), self._flat.nbytes
            torch.cuda.check_error(_runtime().cudaHostRegister(address, size, 0))
        pieces = zip(values.items(), torch.split(self._flat, sizes), strict=True)
        self.parts = {name: piece.view(value.shape) for (name, value), piece in pieces}

    def close(self) -> None:
        """Unpin the memory, which must happen before it is freed."""
        if self._pinned:
            torch.cuda.check_error(_runtime().cudaHostUnregister(self._flat.data_ptr()))
            self._pinned = False


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
