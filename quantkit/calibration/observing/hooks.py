"""Hooks on a running denoiser: what its layers read, summed up where it is, per timestep bucket.

Memory is one accumulator per layer and bucket whatever the number of prompts, and the device is
waited for once per call of the denoiser, when the timestep is read.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.calibration.observing.accumulators import Accumulators, add_inputs
from quantkit.calibration.observing.attention_accumulators import (
    AttentionAccumulators,
    add_attended,
)
from quantkit.calibration.observing.attention_observer import listening, observed_modules
from quantkit.calibration.observing.graph_buffers import CallFindings, GraphBuffers, RowShape
from quantkit.calibration.observing.layer_modules import find_modules
from quantkit.calibration.observing.shared_input import MeasuredInput
from quantkit.calibration.statistics.batch_peaks import Sizes
from quantkit.calibration.statistics.fields import Tensors
from quantkit.calibration.statistics.layer_statistics import LayerStatistics
from quantkit.calibration.statistics.sampling import (
    Candidates,
    Ranking,
    are_of_prompts,
    draw_candidates,
    row_count,
)
from quantkit.errors import ModelError, NonFiniteError
from quantkit.models.attention_modules import AttentionCall, Heads
from quantkit.models.component_layers import Layer
from quantkit.models.timestep import bucket_of, split_schedule, timestep_argument
from quantkit.pipelines.replay import observed


class Collector:
    """Observes layers and attention modules of one denoiser; ``attached`` is where it listens."""

    def __init__(
        self,
        name: str,
        denoiser: nn.Module,
        layers: Sequence[Layer],
        buckets: int,
        *,
        errors_from: int | None = None,
    ) -> None:
        """Prepare to observe.

        Args:
            name: the component's, for messages.
            denoiser: the module the pipeline calls.
            layers: those to observe.
            buckets: how many timestep buckets.
            errors_from: measure what attention loses in each format, in calls with so many keys;
                None: in none.

        Raises:
            ModelError: a layer of the files is not the module that diffusers builds.
        """
        self.name = name
        self.denoiser = denoiser
        self.calls = [0] * buckets
        self.edges: tuple[float, ...] | None = None
        self._modules = find_modules(denoiser, layers, name)
        self._sums: dict[str, Accumulators] = {}
        self._attention_modules = observed_modules(denoiser)
        self._attention_sums: dict[str, AttentionAccumulators] = {}
        self._errors_from = errors_from
        self._seeds = range(1)
        #: prompts of each of the recipe's batches that run at once
        self._sizes: Sizes = (1,)
        #: how often each layer was called in this batch
        self._layer_calls: Counter[str] = Counter()
        #: one flag per name here, in the order of first calls: the first one set is where NaN came
        #: up
        self._bad: Tensor | None = None
        self._flagged: list[str] = []
        #: where the flags of layers stand, in the order of their sums, and those of modules
        self._averaged = torch.empty(0, dtype=torch.int64)
        self._flag_places: dict[tuple[str, ...], Tensor] = {}
        #: in this call: added up when it is over, or a layer or module is called again
        self._found = CallFindings()
        self._again = False
        #: of what layers read in this call
        self._shapes: dict[str, RowShape] = {}
        #: of a call that is being recorded
        self._buffers: GraphBuffers | None = None
        #: of the last input of a layer
        self._last_input: MeasuredInput | None = None
        self._bucket = 0
        self._timestep = 0.0

    def begin_batch(self, seeds: range, sizes: Sizes) -> None:
        """Say whose calls follow.

        Args:
            seeds: of the noise of the prompts, in their order.
            sizes: prompts of each of the recipe's batches that run at once.
        """
        self._seeds, self._sizes = seeds, sizes
        self._layer_calls.clear()
        for sums in self._sums.values():
            sums.begin(len(sizes))

    @contextmanager
    def attached(self, scheduler: Any, report: Callable[[int], None]) -> Iterator[None]:
        """Listen while the body runs the pipeline.

        Args:
            scheduler: its ``timesteps`` are read at the first call, and give the bucket edges.
            report: called with the number of calls so far, at every call; batches that run at once
                count each.

        Raises:
            NonFiniteError: an input held NaN or Inf; the text names the layer and the step.
        """

        def begin(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._begin_call(timestep_argument(self.denoiser.forward, args, kwargs), scheduler)
            report(sum(self.calls))

        handles = [self.denoiser.register_forward_pre_hook(begin, with_kwargs=True)]
        try:
            for layer, module in self._modules.items():
                listen = self._listener(layer, module)
                handles.append(module.register_forward_pre_hook(listen, with_kwargs=True))
            own = {handle.id for handle in handles}
            with (
                listening(self._attention_modules, self._attend),
                observed(self.denoiser, self, own),
            ):
                yield
            self.check()
        finally:
            for handle in handles:
                handle.remove()

    def check(self) -> None:
        """Wait for the last call, and refuse NaN and Inf in it.

        Raises:
            NonFiniteError: naming the layer and the step.
        """
        self._last_input = None
        self._flag_layers()
        if self._bad is not None:
            self._refuse_bad(self._bad.tolist())

    def statistics(self) -> dict[str, LayerStatistics]:
        """Return the statistics of every layer that was called.

        Raises:
            ModelError: a bucket saw no call of the denoiser.
        """
        self.refuse_empty()
        return {name: LayerStatistics.of_sums(sums) for name, sums in self.taken().items()}

    def refuse_empty(self) -> None:
        """Refuse timestep buckets without statistics; a denoiser may be called at none.

        Raises:
            ModelError: a bucket saw no call of the denoiser.
        """
        if 0 in self.calls and any(self.calls):
            raise ModelError(
                f"{self.name}: no call fell into timestep bucket {self.calls.index(0)} (calls "
                f"{self.calls}, edges {self.edges}); calibrate with buckets 1"
            )

    def taken(self) -> dict[str, dict[str, Tensor]]:
        """Return the sums so far of every layer that was called, in the order of first calls."""
        self._settle()
        return {name: sums.taken() for name, sums in self._sums.items()}

    def taken_attention(self) -> dict[str, dict[str, Tensor]]:
        """Return the sums so far of every attention module that was called."""
        self._settle()
        return {name: sums.taken() for name, sums in self._attention_sums.items()}

    def put(
        self,
        sums: Mapping[str, Tensors],
        attention: Mapping[str, Tensors],
        calls: Sequence[int],
        edges: tuple[float, ...],
    ) -> None:
        """Go on from where sums were taken, before anything is observed.

        Raises:
            LookupError, ValueError: they are of other layers.
        """
        device = next(self.denoiser.parameters()).device
        if len(calls) != len(self.calls) or len(edges) + 1 != len(calls):
            raise ValueError(f"{len(calls)} buckets, expected {len(self.calls)}")
        self.calls, self.edges = list(calls), edges
        for layer, found in sums.items():
            self._sums_of(layer, device).put(found)
        for name, kept in attention.items():
            heads, columns = kept["k_mean"].shape[1:]
            self._attention_sums_of(name, heads, columns, device).put(kept)

    @property
    def records(self) -> bool:
        """All calls are alike."""
        return True

    @property
    def pending(self) -> CallFindings:
        """Findings of this call that are not yet added."""
        return self._found

    def make_buffers(self) -> GraphBuffers:
        """Return what recordings of calls like this one read.

        Raises:
            RuntimeError: what this call did cannot be recorded.
        """
        if self._again:
            raise RuntimeError("a layer is called twice in one step")
        if not self._shapes:
            raise RuntimeError("no layer is called in it")
        if self._calls_of(self._shapes) is None:
            raise RuntimeError("some layers were called less often than others")
        return GraphBuffers(self._shapes, len(self.calls), next(self.denoiser.parameters()).device)

    @contextmanager
    def onto(self, buffers: GraphBuffers) -> Iterator[CallFindings]:
        """Let what a call finds be returned and not added, within the body."""
        before, self._found, self._buffers, self._last_input = (
            self._found,
            CallFindings(),
            buffers,
            None,
        )
        try:
            yield self._found
        finally:
            self._found, self._buffers, self._last_input = before, None, None

    def choose(self, buffers: GraphBuffers) -> bool:
        """Draw the rows of the next launch; False where layers were called differently often."""
        calls = self._calls_of(buffers.shapes)
        if calls is None:
            return False

        def draw(shape: RowShape) -> Candidates:
            return draw_candidates(self._seeds, calls, *shape)

        def admit(layer: str, drawn: Candidates) -> Ranking:
            return self._sums[layer].sample.admit(self._bucket, drawn)

        buffers.write(draw, admit, self._bucket)
        return True

    def take(self, buffers: GraphBuffers, found: CallFindings) -> None:
        """Add what a launch has found."""
        self._layer_calls.update(buffers.shapes.keys())
        self._found.inputs.update(found.inputs)
        self._found.attended.update(found.attended)
        self._settle()
        self._draw_ahead(buffers)

    def _draw_ahead(self, buffers: GraphBuffers) -> None:
        """Draw what the next call looks at, which is remembered, while the device computes."""
        calls = self._calls_of(buffers.shapes)
        if calls is not None:
            for shape in buffers.kinds:
                draw_candidates(self._seeds, calls, *shape)

    def _calls_of(self, layers: Iterable[str]) -> int | None:
        """Return how often each of some layers was called in this batch; None: not one number."""
        calls = {self._layer_calls[layer] for layer in layers}
        return calls.pop() if len(calls) == 1 else None

    def _begin_call(self, timestep: Any, scheduler: Any) -> None:
        self._flag_layers()
        self._again = False
        self._shapes.clear()
        flat = torch.as_tensor(timestep).double().reshape(-1)[:1]
        if self._bad is None:
            values = flat.tolist()
        else:
            # One wait for the device brings both, the timestep and last call's verdict.
            values = torch.cat((flat.to(self._bad.device), self._bad.double())).tolist()
        self._refuse_bad(values[1:])
        self._timestep = values[0]
        if self.edges is None:
            self.edges = split_schedule(scheduler, self._timestep, len(self.calls))
        self._bucket = bucket_of(self._timestep, self.edges)
        self.calls[self._bucket] += len(self._sizes)

    def _refuse_bad(self, flags: Sequence[float]) -> None:
        for name, flag in zip(self._flagged, flags, strict=False):
            if flag:
                where = "its input" if name in self._modules else "its queries, keys or values"
                raise NonFiniteError(
                    f"{self.name}.{name}: NaN or Inf in {where} at step {sum(self.calls)} "
                    f"(timestep {self._timestep:g}); if the model overflows in float16, calibrate "
                    "on the device cpu, which computes in float32",
                    fields=("device",),
                )

    def _listener(self, layer: str, module: nn.Module) -> Callable[..., None]:
        axis = 1 if isinstance(module, nn.Conv2d) else -1

        def listen(_: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            values = args[0] if args else kwargs["input"]
            sums = self._sums_of(layer, values.device)
            seen = self._measured_input(values, axis)
            values = values.detach()
            self._settle_before(layer, self._found.inputs)
            self._found.inputs[layer] = seen.measured
            if self._buffers is not None:
                self._buffers.sample(layer, values, seen, module, sums.sample)
                return
            shape = self._shapes[layer] = (len(values), row_count(values, module))
            drawn = draw_candidates(self._seeds, self._layer_calls[layer], *shape)
            sums.sample.offer(self._bucket, values, module, drawn, seen.rows)
            self._layer_calls[layer] += 1

        return listen

    def _measured_input(self, values: Tensor, axis: int) -> MeasuredInput:
        """Return what is known of an input: queries, keys and values read one after another."""
        if self._last_input is None or not self._last_input.is_of(values, axis):
            apart = len(self._sizes) > 1 and are_of_prompts(len(values), len(self._seeds))
            self._last_input = MeasuredInput.of(
                values, axis, peaks=apart and axis % values.ndim > 0
            )
        return self._last_input

    def _sums_of(self, layer: str, device: torch.device) -> Accumulators:
        if layer not in self._sums:
            self._flag(layer, device)
            self._sums[layer] = Accumulators(self._modules[layer], len(self.calls), device)
            self._sums[layer].begin(len(self._sizes))
            places = [self._flagged.index(name) for name in self._sums]
            self._averaged = torch.tensor(places, device=device)
        return self._sums[layer]

    def _settle(self) -> None:
        """Add what was measured since the last call to the sums."""
        inputs, attended = self._found.inputs, self._found.attended
        if inputs:
            measured = [(self._sums[name], seen) for name, seen in inputs.items()]
            add_inputs(self._bucket, measured, self._sizes)
        if attended:
            calls = [(self._attention_sums[name], call) for name, call in attended.items()]
            finite = add_attended(self._bucket, calls)
            assert self._bad is not None
            self._bad[self._places_of(tuple(attended), finite.device)] |= ~finite
        self._found.clear()

    def _settle_before(self, name: str, found: Mapping[str, object]) -> None:
        """Add what was found where a layer or a module is called again."""
        if name not in found:
            return
        if self._buffers is not None:
            raise RuntimeError(f"{name} is called twice in one step")
        self._again = True
        self._settle()

    def _flag_layers(self) -> None:
        """Set the flags of layers whose averages of the last call's bucket are not finite."""
        self._settle()
        if self._bad is not None and self._sums:
            averages = [sums.running(self._bucket) for sums in self._sums.values()]
            self._bad[self._averaged] |= ~torch.stack(averages).isfinite().all(dim=1)

    def _attend(self, name: str, heads: Heads, call: AttentionCall) -> None:
        _, count, _, columns = heads.k.shape
        sums = self._attention_sums_of(name, count, columns, heads.k.device)
        self._settle_before(name, self._found.attended)
        self._found.attended[name] = sums.look(heads, call.scale)

    def _attention_sums_of(
        self, name: str, heads: int, columns: int, device: torch.device
    ) -> AttentionAccumulators:
        """Return the accumulators of a module."""
        if name not in self._attention_sums:
            self._flag(name, device)
            self._attention_sums[name] = AttentionAccumulators(
                heads,
                columns,
                len(self.calls),
                device,
                errors_from=self._errors_from,
            )
        return self._attention_sums[name]

    def _flag(self, name: str, device: torch.device) -> None:
        """Have a flag that is set once NaN or Inf is seen there."""
        if self._bad is None:
            count = len(self._modules) + len(self._attention_modules)
            self._bad = torch.zeros(count, dtype=torch.bool, device=device)
        self._flagged.append(name)

    def _places_of(self, names: tuple[str, ...], device: torch.device) -> Tensor:
        """Return where the flags of these stand; the same ones are called in every step."""
        if names not in self._flag_places:
            places = [self._flagged.index(name) for name in names]
            self._flag_places = {names: torch.tensor(places, device=device)}
        return self._flag_places[names]
