"""The model benchmark: one denoising step of a whole denoiser, all contenders in one run."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.bench.kernels.compiled_blocks import (
    captured,
    compile_blocks,
    outside_blocks,
    with_shared_weights,
)
from quantkit.bench.kernels.contender import Judgement
from quantkit.bench.kernels.figures import Verdict
from quantkit.bench.kernels.kernel_benchmark import REFUSALS, one_line
from quantkit.bench.kernels.machine import describe_machine, read_clocks
from quantkit.bench.kernels.stopping import stopping_early
from quantkit.bench.kernels.timing import Stopwatch, TimingPlan
from quantkit.bench.kernels.torchao_dynamic import quantize, short_layers
from quantkit.bench.models.denoiser_inputs import first_tensor, make_inputs
from quantkit.bench.models.denoisers import Denoiser, build_denoiser
from quantkit.bench.models.judging import (
    Eager,
    judge_attention,
    judge_dense,
    judge_packed,
    run_eager,
)
from quantkit.bench.models.memory import peak_bytes, weight_bytes
from quantkit.bench.models.model_attention import why_no_kernel, why_not_used, with_attention
from quantkit.bench.models.model_contenders import ModelContender
from quantkit.bench.models.model_result import ModelBenchSettings, ModelResult, ModelRow
from quantkit.bench.models.packed_copies import (
    PackedVariant,
    Source,
    convolutions,
    load_packed,
    saved,
)
from quantkit.bench.models.profiling import profile_step
from quantkit.device import log
from quantkit.device.backends import Backend, fast_sums
from quantkit.errors import ModelError
from quantkit.pipelines.replay import replay
from quantkit.progress import Progress

#: A step: the denoiser on its inputs.
Step = Callable[[], Tensor]


#: What is packed of a model, and the format of its attention; None and "": nothing.
_Made = tuple[PackedVariant | None, str]
_ORIGINAL: _Made = (None, "")


@dataclass
class _Bench:
    """State that contenders share; models and reference outputs are made once and kept."""

    settings: ModelBenchSettings
    device: torch.device
    #: what is packed, and what outputs are compared with
    original: nn.Module
    #: what contenders run that are not packed: the original, its projections fused if asked for
    dense: nn.Module
    inputs: dict[str, Any]
    source: Source | None
    threads: int
    #: by what is packed, and by the format of the attention
    made: dict[_Made, nn.Module] = field(default_factory=dict)
    outputs: dict[_Made, Eager] = field(default_factory=dict)

    def model(self, contender: ModelContender) -> nn.Module:
        """Return the contender's model, not compiled yet."""
        if contender.torchao:
            # Tuned for all of a model's kernels it is not ready in minutes.
            return quantize(
                deepcopy(self.dense), contender.torchao, tuned=False, keep=self.kept(contender)
            )
        made = (contender.variant, contender.attention)
        if made == _ORIGINAL:
            return self.dense
        if made not in self.made:
            self.made[made] = self._make(contender)
        return self.made[made]

    def _make(self, contender: ModelContender) -> nn.Module:
        variant = contender.variant
        if contender.attention:
            plain = self.model(replace(contender, attention=""))
            return with_attention(
                plain,
                contender.attention,
                self.settings.min_keys,
                self._run if self.settings.static_scales else None,
            )
        assert self.source is not None
        assert variant is not None
        packed = load_packed(self.source, variant, self.device, self.threads)
        return _fused(_laid_out(packed, self.settings), self.settings)

    def _run(self, model: nn.Module) -> Tensor:
        return _step(model, self.inputs)()

    def kept(self, contender: ModelContender) -> frozenset[str]:
        """Return the layers that torchao cannot compute in the contender's format."""
        if contender.torchao != "int8":
            return frozenset()
        # What is not compiled prints its inputs, which a CUDA graph cannot capture.
        plain = outside_blocks(self.dense) if self.settings.compile_blocks else frozenset[str]()
        return plain | short_layers(self.dense, _step(self.dense, self.inputs))

    def judge(self, contender: ModelContender, output: Tensor) -> Judgement:
        """Judge what a contender gave."""
        original, variant = self.eager(_ORIGINAL), contender.variant
        if variant is None:
            return judge_dense(output, original, contender.limit)
        quantized, plain = self.eager((variant, contender.attention)), self.eager((variant, ""))
        found = judge_packed(output, quantized, original)
        attention = judge_attention(quantized, plain, original)
        return found if attention.right else attention

    def eager(self, made: _Made) -> Eager:
        """Return what a model gives that is made already, watched when it is run first."""
        if made not in self.outputs:
            model = self.original if made == _ORIGINAL else self.made[made]
            self.outputs[made] = run_eager(model, _step(model, self.inputs))
        return self.outputs[made]


@dataclass(frozen=True)
class _Ready:
    """A contender that runs and is right."""

    row: ModelRow
    step: Step


def run_model_bench(
    denoiser: Denoiser,
    contenders: Sequence[ModelContender],
    settings: ModelBenchSettings,
    device: torch.device,
    plan: TimingPlan,
    *,
    threads: int,
    progress: Progress,
) -> ModelResult:
    """Build, pack, load, check, time in turns, and profile; an interrupt skips what is not ready.

    Args:
        denoiser: what to build, with random weights.
        contenders: rows of MODEL_CONTENDERS.
        settings: batch, size, compilation, profile, scratch folder.
        device: where to run.
        plan: rounds and seconds.
        threads: of packing.
        progress: told of contenders that are ready.

    Raises:
        QuantkitError: the denoiser cannot be built, packed or loaded.
    """
    before, machine = read_clocks(device), describe_machine(device)
    with ExitStack() as stack, torch.no_grad():
        original = _laid_out(build_denoiser(denoiser, device), settings)
        inputs = make_inputs(original, settings.batch, settings.size, device)
        packs = any(c.variant for c in contenders)
        copy = saved(original, _step(original, inputs), settings.scratch, progress)
        source = stack.enter_context(copy) if packs else None
        dense = with_shared_weights(original) if settings.fuse_projections else original
        bench = _Bench(settings, device, original, _fused(dense, settings), inputs, source, threads)
        _run_original(bench)
        found: list[_Ready | ModelRow] = []
        # Compiling takes minutes: after an interrupt, those that are ready are measured.
        with stopping_early():
            for index, contender in enumerate(contenders):
                progress("prepare models", index, len(contenders))
                found.append(_prepare(bench, contender))
        interrupted = "interrupted before it was ready"
        found += [
            ModelRow(contender=contender.name, verdict=Verdict.CANNOT, reason=interrupted)
            for contender in contenders[len(found) :]
        ]
        progress("prepare models", len(contenders), len(contenders))
        rows = _time(found, device, plan, settings.in_a_row)
        if settings.profile:
            rows = [
                _profiled(row, ready.step, device) if ready else row
                for row, ready in zip(rows, (_ready(f) for f in found), strict=True)
            ]
    return ModelResult(
        machine=machine,
        clocks=(before, read_clocks(device)),
        denoiser=denoiser,
        settings=settings,
        plan=plan,
        rows=tuple(rows),
    )


def _run_original(bench: _Bench) -> None:
    """Run what contenders are compared with, once.

    Raises:
        ModelError: it does not take the inputs that were made for it.
    """
    try:
        bench.eager(_ORIGINAL)
    except (*REFUSALS, LookupError, ArithmeticError) as error:
        where = f"--batch {bench.settings.batch} and --size {bench.settings.size}"
        raise ModelError(
            f"{type(bench.original).__name__}: no step runs at {where} with inputs that follow "
            f"from its forward and config: {one_line(error)}"
        ) from error


def _prepare(bench: _Bench, contender: ModelContender) -> _Ready | ModelRow:
    """Return the contender's checked step, or the row that says why there is none."""
    start = time.perf_counter()

    def absent(verdict: Verdict, reason: str, error: float | None = None) -> ModelRow:
        return ModelRow(contender=contender.name, verdict=verdict, reason=reason, error=error)

    if reason := _why_the_same(bench, contender):
        return absent(Verdict.CANNOT, reason)
    try:
        model = bench.model(contender)
        # Before it is compiled: the hooks of watching would be compiled in.
        bench.eager((contender.variant, contender.attention))
        step = _step(_called(model, contender, bench), _inputs(model, bench.inputs))
        step = _fast(step) if contender.fast else step
        with log.record() as seen:
            output = step().float()
    except REFUSALS as refusal:
        return absent(Verdict.CANNOT, one_line(refusal))
    if reason := why_not_used(contender.attention, bench.settings.min_keys, seen):
        return absent(Verdict.CANNOT, reason)
    found = bench.judge(contender, output)
    if not found.right:
        reason = f"error {found.error:.3g}, allowed {found.limit:.3g}"
        return absent(Verdict.WRONG, reason, found.error)
    weights, peak = weight_bytes(model), peak_bytes(step, bench.device)
    if contender.compiled and bench.settings.graph:
        try:
            step = captured(step, bench.device)
        except REFUSALS as refusal:
            return absent(Verdict.CANNOT, f"in a CUDA graph: {one_line(refusal)}")
    row = ModelRow(
        contender=contender.name,
        verdict=Verdict.TIMED,
        error=found.error,
        weight_bytes=weights,
        of_f16=weights / weight_bytes(bench.original),
        peak_bytes=None if peak is None else peak + weights,
        calls=_calls(seen.calls),
        prepare_seconds=time.perf_counter() - start,
    )
    return _Ready(row, step)


def _why_the_same(bench: _Bench, contender: ModelContender) -> str:
    """Return why a contender would be another one under a second name; empty when it is not."""
    if contender.variant and contender.variant.linear_only and not convolutions(bench.original):
        same = contender.name.replace("-linear", "")
        return f"no convolutions in this model: the same as {same}"
    if contender.replayed and bench.device.type != "cuda":
        return f"on {bench.device.type} nothing is replayed"
    static = bench.settings.static_scales and contender.variant is not None
    return why_no_kernel(contender.attention, bench.device, static_scales=static)


def _time(
    found: Sequence[_Ready | ModelRow],
    device: torch.device,
    plan: TimingPlan,
    in_a_row: int | None,
) -> list[ModelRow]:
    # Weights alone are many times the cache: no flush.
    watch = Stopwatch(device, cold=False)
    calls = {f.row.contender: f.step for f in found if isinstance(f, _Ready)}
    watch.warm_up(calls, plan.warmup)
    timings = {name: found.summary() for name, found in watch.rounds(calls, plan).items()}
    rows = {}
    if in_a_row is not None:
        samples = watch.in_a_row(calls, in_a_row, plan)
        rows = {name: found.summary() for name, found in samples.items()}
    return [
        f
        if isinstance(f, ModelRow)
        else replace(f.row, timing=timings[f.row.contender], in_a_row=rows.get(f.row.contender))
        for f in found
    ]


def _profiled(row: ModelRow, step: Step, device: torch.device) -> ModelRow:
    found = profile_step(step, device)
    return replace(row, profile=found.groups, kernels=found.kernels)


def _laid_out(model: nn.Module, settings: ModelBenchSettings) -> nn.Module:
    """Return the model with its convolutions in the layout that was asked for, in place.

    A convolution gives pictures in the layout of its weight, so the inputs need none.
    """
    if settings.channels_last:
        nn.Module.to(model, memory_format=torch.channels_last)
    return model


def _fused(model: nn.Module, settings: ModelBenchSettings) -> nn.Module:
    """Return the model with its projections fused if that was asked for, in place."""
    if settings.fuse_projections:
        model.fuse_qkv_projections()  # type: ignore[operator]
    return model


def _ready(found: _Ready | ModelRow) -> _Ready | None:
    return found if isinstance(found, _Ready) else None


def _step(model: Callable[..., Any], inputs: Mapping[str, Any]) -> Step:
    def step() -> Tensor:
        return first_tensor(model(**inputs))

    return step


def _fast(step: Step) -> Step:
    def fast() -> Tensor:
        with fast_sums():
            return step()

    return fast


def _called(model: nn.Module, contender: ModelContender, bench: _Bench) -> Callable[..., Any]:
    if contender.replayed:
        model = with_shared_weights(model)
        replay(model)
        return model
    if not contender.compiled:
        return model
    if bench.settings.compile_blocks:
        return compile_blocks(model)
    return torch.compile(model, dynamic=False)


def _inputs(model: nn.Module, inputs: Any) -> Any:
    """Return the inputs in the model's own dtype."""
    dtype = getattr(model, "dtype", torch.float16)
    if isinstance(inputs, dict):
        return {key: _inputs(model, value) for key, value in inputs.items()}
    if isinstance(inputs, list | tuple):
        return type(inputs)(_inputs(model, value) for value in inputs)
    floating = isinstance(inputs, Tensor) and inputs.is_floating_point()
    return inputs.to(dtype) if floating else inputs


def _calls(calls: Mapping[tuple[str, str, Backend], int]) -> dict[str, int]:
    found: dict[str, int] = {}
    for (op, _, backend), count in sorted(calls.items(), key=str):
        key = f"{op} {backend.value}"
        found[key] = found.get(key, 0) + count
    return found
