"""A pipeline's calls of its denoiser, as rows to draw training batches from.

Nothing here knows a family: arguments are bound to the names of the denoiser's signature, and what
has one row per sample is told from what all samples share by its shape.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.utils import _pytree as pytree

from quantkit.calibration.moments.timestep_weights import CallWeights
from quantkit.errors import ModelError
from quantkit.models.timestep import first_number, timestep_argument

#: Position tables: the same for every sample, though their length may equal a batch's.
SHARED = ("img_ids", "txt_ids", "image_rotary_emb")


@dataclass(frozen=True, eq=False)
class Template:
    """The structure of a call without its rows: it turns leaves back into arguments."""

    spec: Any
    #: one per leaf: a value that all calls share, or None where rows are put
    fixed: tuple[Any, ...]
    #: places of the leaves that have rows and change from call to call
    moving: tuple[int, ...]
    #: places of the leaves that have rows and stay over a trajectory, as text states
    still: tuple[int, ...]

    def arguments(self, rows: Sequence[Tensor]) -> dict[str, Any]:
        """Return a call as keyword arguments; ``rows``: the moving leaves, then the still ones."""
        leaves = list(self.fixed)
        for place, value in zip((*self.moving, *self.still), rows, strict=True):
            leaves[place] = value
        arguments: dict[str, Any] = pytree.tree_unflatten(leaves, self.spec)
        return arguments


@dataclass(frozen=True, eq=False)
class Chunk:
    """One sampling batch: R rows (samples, twice with guidance) over S calls."""

    template: Template
    #: per moving leaf (R, S, ...)
    moving: tuple[Tensor, ...]
    #: per still leaf (R, ...)
    still: tuple[Tensor, ...]
    #: (R, S, ...) the teacher's outputs
    answers: Tensor
    #: float32 (S,), on the CPU: the chance of each call to be drawn
    chances: Tensor

    @property
    def nbytes(self) -> int:
        """Size of all tensors."""
        return sum(value.nbytes for value in (*self.moving, *self.still, self.answers))

    @property
    def steps(self) -> int:
        """The number of calls: S."""
        return self.answers.shape[1]

    def to(self, device: torch.device) -> "Chunk":
        """Return it on a device."""
        moving, still = (
            tuple(value.to(device) for value in values) for values in (self.moving, self.still)
        )
        return replace(self, moving=moving, still=still, answers=self.answers.to(device))

    def draw(self, count: int, generator: Generator) -> tuple[Tensor, ...]:
        """Return ``count`` random calls of one row, by their chances: the leaves, then the answers.

        Args:
            count: how many.
            generator: on the CPU, so that no device is waited for.
        """
        device = self.answers.device
        rows = torch.randint(len(self.answers), (count,), generator=generator).to(device)
        calls = torch.multinomial(self.chances, count, replacement=True, generator=generator)
        calls = calls.to(device)
        return (
            *(value[rows, calls] for value in self.moving),
            *(value[rows] for value in self.still),
            self.answers[rows, calls],
        )


@dataclass(eq=False)
class _RecordedCall:
    leaves: list[Any]
    answer: Tensor
    timestep: Any


@dataclass(eq=False)
class Recording:
    """The calls recorded while it listened."""

    #: the argument that has one row per sample: the denoiser's first
    sample: str
    calls: list[_RecordedCall] = field(default_factory=list)
    #: of the first call: name of every leaf's argument, and the structure
    names: list[str] = field(default_factory=list)
    spec: Any = None
    #: of the calls
    weights: CallWeights = field(default_factory=lambda: CallWeights({0.0: 1.0}))

    def chunk(self) -> Chunk:
        """Return the calls as rows.

        Raises:
            ModelError: the pipeline never called the denoiser, or with different structures.
        """
        if not self.calls:
            raise ModelError(
                "recovery: the pipeline did not call its denoiser, so there is nothing to learn "
                "from; use another pipeline"
            )
        first = self.calls[0]
        rows = len(first.answer)
        moving, still = [], []
        for place, leaf in enumerate(first.leaves):
            kind = self._kind(place, leaf, rows)
            if kind == "moving":
                moving.append(place)
            elif kind == "still":
                still.append(place)
        taken = {*moving, *still}
        fixed = tuple(None if i in taken else leaf for i, leaf in enumerate(first.leaves))
        try:
            return Chunk(
                Template(self.spec, fixed, tuple(moving), tuple(still)),
                tuple(self._stack(place, rows) for place in moving),
                tuple(first.leaves[place] for place in still),
                torch.stack([call.answer for call in self.calls], dim=1),
                _chances([self.weights.at(first_number(c.timestep)) for c in self.calls]),
            )
        except RuntimeError as error:
            raise ModelError(
                "recovery: the pipeline calls its denoiser with changing shapes, which cannot be "
                f"put into batches ({error})"
            ) from error

    def _kind(self, place: int, leaf: Any, rows: int) -> str:
        name = self.names[place]
        if name == "timestep":
            return "moving"
        if name in SHARED or not isinstance(leaf, Tensor) or leaf.ndim == 0 or len(leaf) != rows:
            return "fixed"
        same = all(call.leaves[place] is leaf for call in self.calls)
        return "still" if same and name != self.sample else "moving"

    def _stack(self, place: int, rows: int) -> Tensor:
        device = self.calls[0].answer.device
        values = [torch.as_tensor(call.leaves[place], device=device) for call in self.calls]
        # A pipeline passes one timestep for all rows; a training batch mixes them.
        spread = [v.reshape(-1).expand(rows) if v.numel() == 1 else v for v in values]
        return torch.stack(spread, dim=1)


def _chances(weights: Sequence[float]) -> Tensor:
    """Return the chances of calls, float32: half by their weights, half alike.

    By weights alone the first steps would hardly be trained, which the picture's content hangs on.
    """
    found = torch.tensor(weights)
    return (found / found.sum() + 1 / len(weights)) / 2


@contextmanager
def recording(denoiser: nn.Module, scheduler: Any | None = None) -> Iterator[Recording]:
    """Record every call of the denoiser while the body runs the pipeline.

    Args:
        denoiser: whose calls are recorded.
        scheduler: the pipeline's, whose steps are weighed at the first call; None: all weigh alike.

    Raises:
        RecipeError: a scheduler whose steps cannot be weighed.
    """
    signature = inspect.signature(denoiser.forward)
    record = Recording(sample=next(iter(signature.parameters)))

    def listen(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        timestep = timestep_argument(denoiser.forward, args, kwargs)
        if not record.calls and scheduler is not None:
            first = first_number(timestep)
            record.weights = CallWeights.at_first_call(scheduler, "schedule", first)
        named = _bound(signature, args, kwargs)
        # Pipelines may go on to write into the latents, and into the answer.
        named[record.sample] = named[record.sample].detach().clone()
        leaves, record.spec = pytree.tree_flatten(named)
        if not record.calls:
            record.names = [
                name for name, value in named.items() for _ in pytree.tree_leaves(value)
            ]
        record.calls.append(_RecordedCall(leaves, output[0].detach().clone(), timestep))

    handle = denoiser.register_forward_hook(listen, with_kwargs=True)
    try:
        yield record
    finally:
        handle.remove()


def _bound(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments by name, those of a ``**kwargs`` among them."""
    named = dict(signature.bind(*args, **kwargs).arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            named.update(named.pop(name, {}))
    return named | {"return_dict": False}
