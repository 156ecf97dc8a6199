"""Taking second moments of what layers read while a pipeline runs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.calibration.moments.moment_sums import MomentBuffers, MomentSum, Summed
from quantkit.calibration.moments.moments import Moments
from quantkit.calibration.moments.shared_moments import SharedInputs
from quantkit.calibration.moments.timestep_weights import CallWeights
from quantkit.calibration.moments.token_rows import TokenRows, token_rows
from quantkit.calibration.observing.layer_modules import find_modules
from quantkit.models.component_layers import Layer
from quantkit.models.timestep import first_number, timestep_argument
from quantkit.pipelines.batches import Batch
from quantkit.pipelines.replay import observed
from quantkit.recipe.calibration import CalibrationRecipe


@dataclass(frozen=True, eq=False)
class MomentFindings:
    """Findings of one call that are to be added, by the layer that they are summed up for."""

    seen: dict[str, Summed] = field(default_factory=dict)

    def tensors(self) -> list[Tensor]:
        """Return all of it, in one order."""
        return [seen.columns for seen in self.seen.values()]


class MomentCollector:
    """Observes some layers of a denoiser, or of a text encoder, while its pipeline runs."""

    def __init__(
        self,
        name: str,
        model: nn.Module,
        layers: Sequence[Layer],
        settings: CalibrationRecipe,
        *,
        share: bool = True,
    ) -> None:
        """Prepare to observe.

        Args:
            name: the component's, for messages.
            model: the module that the pipeline calls.
            layers: those to observe.
            settings: how timesteps are weighed, and what share of the rows is looked at.
            share: sum up once what several layers read.

        Raises:
            ModelError: a layer of the files is not the module that was built.
        """
        self._name = name
        self._model = model
        self._settings = settings
        self._modules = find_modules(model, layers, name)
        #: by leader
        self._sums: dict[str, MomentSum] = {}
        self._shared = SharedInputs() if share else None
        #: of the denoiser's calls; None before the first one
        self._weights: CallWeights | None = None
        self._weight = 1.0
        #: of a text encoder's call, the rows that are looked at
        self._tokens: TokenRows | None = None
        #: rows of each picture to keep of a call; None: calls are summed
        self._holding: int | None = None
        #: in this call: added up when it is over
        self._found = MomentFindings()
        #: of a call that is being recorded
        self._buffers: MomentBuffers | None = None
        #: the recipe's batches that run at once
        self._at_once = 1
        self.calls = 0

    def begin_batch(self, batch: Batch) -> None:
        """Say what runs next: batches at once count their calls each."""
        self._at_once = len(batch.sizes)

    def hold_out(self, count: int) -> None:
        """Keep so many rows of each picture from now on, and add nothing to the sums."""
        self._end_call()
        self._holding = count

    @contextmanager
    def attached(
        self,
        scheduler: Any | None,
        report: Callable[[int], None],
        others: Sequence[nn.Module] = (),
    ) -> Iterator[None]:
        """Listen while the body runs the pipeline.

        Args:
            scheduler: its steps are weighed at the first call, when they are set; None: of a text
                encoder, whose calls weigh the same, but for repeated tokens.
            report: called with the number of calls so far, at every call.
            others: denoisers that the pipeline may call before this one.

        Raises:
            RecipeError: a scheduler whose steps cannot be weighed.
            UnsharedInputError: layers that read the same input at first read others; do not share.
        """

        def begin(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._end_call()
            if scheduler is None:
                ids = kwargs.get("input_ids", args[0] if args else None)
                self._tokens = None if ids is None else token_rows(ids)
            else:
                weights = self._weighed(self._model, args, kwargs, scheduler)
                self._weight = weights.at(_timestep(self._model, args, kwargs))
            self.calls += self._at_once
            report(self.calls)

        def weigh(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._weighed(model, args, kwargs, scheduler)

        handles = [self._model.register_forward_pre_hook(begin, with_kwargs=True)]
        handles += [other.register_forward_pre_hook(weigh, with_kwargs=True) for other in others]
        try:
            for layer, module in self._modules.items():
                listen = self._listener(layer, module)
                handles.append(module.register_forward_pre_hook(listen, with_kwargs=True))
            own = {handle.id for handle in handles}
            steps = scheduler is not None and self._modules
            with observed(self._model, self, own) if steps else nullcontext():
                yield
            self._end_call()
        finally:
            for handle in handles:
                handle.remove()

    def _weighed(
        self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], scheduler: Any
    ) -> CallWeights:
        """Return what calls weigh, found at the first call of any denoiser: no step is taken."""
        if self._weights is None:
            weighting, first = self._settings.weighting, _timestep(model, args, kwargs)
            self._weights = CallWeights.at_first_call(scheduler, weighting, first)
        return self._weights

    def moments(self, layer: str) -> Moments:
        """Return what a layer read.

        Raises:
            NonFiniteError: NaN or Inf.
        """
        leader = layer if self._shared is None else self._shared.leader_of(layer)
        return self._sum_of(leader).moments(f"{self._name}.{layer}")

    @property
    def records(self) -> bool:
        """True when calls are summed: rows that are held are copied off the device."""
        return self._holding is None

    @property
    def pending(self) -> MomentFindings:
        """Findings of this call that are not yet added."""
        return self._found

    def make_buffers(self) -> MomentBuffers:
        """Return what recordings of calls like this one read.

        Raises:
            RuntimeError: what this call did cannot be recorded.
        """
        if not self._found.seen:
            raise RuntimeError("no layer is called in it")
        device = next(self._model.parameters()).device
        return MomentBuffers([self._sums[name] for name in self._found.seen], device)

    @contextmanager
    def onto(self, buffers: MomentBuffers) -> Iterator[MomentFindings]:
        """Let what a call finds be returned and not added, but for products, within the body."""
        self._end_reads()
        before, self._found, self._buffers = self._found, MomentFindings(), buffers
        try:
            with ExitStack() as stack:
                for sums, _, places in buffers.groups:
                    for total in sums:
                        stack.enter_context(total.reading(places))
                yield self._found
            self._end_reads()
        finally:
            self._found, self._buffers = before, None

    def choose(self, buffers: MomentBuffers) -> bool:
        """Draw the rows of the next launch; False where layers no longer draw the same."""
        return buffers.write(self._weight)

    def take(self, buffers: MomentBuffers, found: MomentFindings) -> None:
        """Add what a launch has found."""
        del buffers
        self._found = MomentFindings(dict(found.seen))
        self._settle()

    def _sum_of(self, layer: str) -> MomentSum:
        if layer not in self._sums:
            settings, module = self._settings, self._modules[layer]
            self._sums[layer] = MomentSum(
                module, f"{self._name}.{layer}", settings.row_share, settings.seed
            )
        return self._sums[layer]

    def _listener(self, layer: str, module: nn.Module) -> Callable[..., None]:
        def listen(_: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            values = args[0] if args else kwargs["input"]
            if self._shared is None:
                self._look(layer, values)
            elif not self._shared.is_looked_at(layer, module, values):
                self._look(self._shared.leader_of(layer), values)

        return listen

    def _look(self, layer: str, values: Tensor) -> None:
        """Sum up what a layer reads, or hold some of it."""
        total = self._sum_of(layer)
        if self._tokens is not None:
            values = self._tokens.of(values)
        if self._holding is not None:
            total.hold(values, self._weight, self._holding)
            return
        seen = total.look(values, self._weight if self._buffers is None else self._buffers.weight)
        before = self._found.seen.get(layer)
        self._found.seen[layer] = seen if before is None else before.plus(seen)

    def _end_call(self) -> None:
        self._end_reads()
        self._settle()
        for total in self._sums.values():
            total.begin_call()

    def _end_reads(self) -> None:
        if self._shared is not None:
            self._shared.end_call()

    def _settle(self) -> None:
        """Add what was found in the last call to the sums."""
        seen = {self._sums[layer]: found for layer, found in self._found.seen.items()}
        if not seen:
            return
        columns = [found.columns for found in seen.values()]
        torch._foreach_add_([total.mean for total in seen], columns, alpha=self._weight)
        for total, found in seen.items():
            total.count(found.rows, self._weight)
        self._found.seen.clear()


def _timestep(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
    return first_number(timestep_argument(model.forward, args, kwargs))
