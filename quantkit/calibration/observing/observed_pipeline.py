"""A pipeline whose layers are observed while it runs over batches of prompts."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack

import torch

from quantkit.calibration.observing.calibration_resume import PartialSums
from quantkit.calibration.observing.hooks import Collector
from quantkit.errors import ModelError, QuantkitError
from quantkit.models.component_layers import Layer
from quantkit.models.source import Model
from quantkit.pipelines.batches import Batch
from quantkit.pipelines.running import choose_device, load_pipeline, rehearse_prompts, run_batch
from quantkit.progress import Progress
from quantkit.recipe.schema import Recipe


class ObservedPipeline:
    """The pipeline with its layers observed, until the stack unwinds."""

    def __init__(
        self,
        model: Model,
        layers: Mapping[str, Sequence[Layer]],
        recipe: Recipe,
        device: str,
        *,
        prompts: Sequence[str],
        batches: int,
        progress: Progress,
        stack: ExitStack,
    ) -> None:
        """Load the pipeline and begin to listen.

        Args:
            model: a pipeline.
            layers: those to observe, by component.
            recipe: its calibration section says how it is run, that of attention whether errors of
                formats are measured.
            device: auto, cpu or cuda[:N].
            prompts: that will be run: the longest is tried before anything is observed.
            batches: that will be run, for the progress.
            progress: told of denoiser calls.
            stack: ends the listening.

        Raises:
            ModelError: diffusers cannot load it, or builds other layers; or it cannot be run so.
        """
        self._settings = settings = recipe.calibration
        errors_from = None if recipe.attention is None else recipe.attention.errors_from
        self._pipe = load_pipeline(model, choose_device(device))
        self._inputs = rehearse_prompts(self._pipe, prompts, settings)
        self._collectors = [
            Collector(
                name,
                getattr(self._pipe, name),
                found,
                settings.buckets,
                errors_from=errors_from,
            )
            for name, found in layers.items()
        ]
        #: of the denoiser, in a run that this one goes on with
        self._earlier, self._batches = 0, 0

        def report(calls: int) -> None:
            total = batches * len(self._pipe.scheduler.timesteps)
            progress("denoising", min(calls - self._earlier, total), total)

        for collector in self._collectors:
            stack.enter_context(collector.attached(self._pipe.scheduler, report))

    def run(self, batch: Batch) -> None:
        """Run one batch, or several at once.

        Raises:
            NonFiniteError: NaN or Inf in an activation.
            QuantkitError: out of memory.
        """
        for collector in self._collectors:
            collector.begin_batch(batch.seeds, batch.sizes)
        try:
            run_batch(self._pipe, batch, self._settings, self._inputs)
        except torch.OutOfMemoryError as error:
            raise QuantkitError(
                "out of GPU memory while denoising; take a smaller batch, or the device cpu",
                fields=("batch", "device"),
            ) from error
        for collector in self._collectors:
            collector.check()
        self._batches += len(batch.sizes)

    def put(self, found: PartialSums) -> None:
        """Go on from sums that another run had taken, before any batch.

        Raises:
            LookupError, ValueError: they are of other layers.
        """
        for collector in self._collectors:
            name = collector.name
            sums, attention = found.sums[name], found.attention[name]
            collector.put(sums, attention, found.calls[name], found.edges)
        self._batches = found.batches
        self._earlier = max(map(sum, found.calls.values()))

    def taken(self) -> PartialSums:
        """Return the sums of all batches so far.

        Raises:
            ModelError: a bucket saw no call of the denoiser, or no denoiser was called.
        """
        for collector in self._collectors:
            collector.refuse_empty()
        edges = next((c.edges for c in self._collectors if c.edges is not None), None)
        if edges is None:
            names = ", ".join(collector.name for collector in self._collectors)
            raise ModelError(f"{names}: the pipeline called none of it; calibrate another pipeline")
        return PartialSums(
            {collector.name: collector.taken() for collector in self._collectors},
            {collector.name: collector.taken_attention() for collector in self._collectors},
            # Denoisers of one pipeline share its scheduler, so the first one's edges are all's.
            edges,
            {collector.name: list(collector.calls) for collector in self._collectors},
            self._batches,
        )
