"""Facts of a report that are no metrics: files, kernels, machine, warnings."""

import hashlib
import platform
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from importlib.metadata import version
from math import prod
from pathlib import Path

import torch
from quantkit.eval.judging.evaluation_result import (
    AttentionFormats,
    GenerationFacts,
    KernelCalls,
    Kernels,
    LayerRow,
    ModelFacts,
    Packing,
    QuantizedBy,
    Report,
)
from quantkit.eval.judging.layer_table import Place, foreign_layers
from quantkit.eval.judging.noise_floor import Original
from quantkit.eval.measuring.generation import Generated

from quantkit.checkpoint.format_decisions import format_decisions
from quantkit.checkpoint.reader import Packed
from quantkit.device.log import KernelLog
from quantkit.inference.layers.deviation import LayerDeviation
from quantkit.models.source import Model

#: The libraries whose version can change a number.
LIBRARIES = (
    "torch", "diffusers", "transformers", "scikit-image", "lpips", "torchvision", "scipy", "numpy",
)  # fmt: skip
#: Below this a bootstrap interval is mostly a guess.
FEW_PROMPTS = 8


def kernel_facts(calls: KernelLog, deviations: Mapping[Place, LayerDeviation]) -> Kernels:
    """Return the calls by operation, variant and backend, and the layer farthest off."""
    rows = tuple(
        KernelCalls(op, variant, backend.value, count)
        for (op, variant, backend), count in sorted(
            calls.calls.items(), key=lambda item: (item[0][0], item[0][1], item[0][2].value)
        )
    )
    watched = {place: seen for place, seen in deviations.items() if seen.watched}
    count = sum(seen.watched for seen in watched.values())
    words = f"{count} calls of {len(watched)} layers were computed again on reference"
    if not watched:
        return Kernels(rows, None, "", words)
    worst = max(watched, key=lambda place: watched[place].kernel)
    return Kernels(rows, watched[worst].kernel, ".".join(filter(None, worst)), words)


def attention_formats(packed: Packed) -> tuple[AttentionFormats, ...]:
    """Return what was decided for each attention module, where errors of formats decide.

    Raises:
        CheckpointError: a header that is damaged.
    """
    return tuple(
        AttentionFormats(component.name, module, decision)
        for component in packed.components
        for module, decision in format_decisions(component).items()
    )


def run_facts(original: Original, *, packed: Generated, calls: KernelLog) -> GenerationFacts:
    """Return how the pictures were made, and what the times are worth."""
    settings = original.settings
    backends = Counter(backend.value for _, _, backend in calls.calls)
    note = "wall time of whole pipelines"
    if "host" in backends:
        note = (
            "host emulates a graphics card's kernels lane by lane on the CPU: these times say "
            "that they ran, nothing about the speed on a card"
        )
    elif "reference" in backends:
        note = "reference dequantizes and multiplies in plain PyTorch: no kernel's speed"
    return GenerationFacts(
        prompts=settings.prompts,
        seeds=settings.seeds,
        steps=settings.steps,
        guidance=settings.guidance,
        batch=settings.batch,
        device=str(original.device),
        dtype=str(original.dtype).removeprefix("torch."),
        original_seconds=original.generated.seconds,
        packed_seconds=packed.seconds,
        timing_note=note,
        original_peak_bytes=original.generated.peak_bytes,
        packed_peak_bytes=packed.peak_bytes,
    )


def original_files(model: Model, packed: Packed) -> tuple[Path, ...]:
    """Return the weights of the original's components that were packed, or of all denoisers."""
    names = {component.name for component in packed.components or model.components}
    return tuple(path for c in model.components if c.name in names for path in c.shards)


def unpacked_files(model: Model) -> tuple[Path, ...]:
    """Return the weights of the denoisers of a 16-bit pipeline."""
    return tuple(path for c in model.components for path in c.shards)


def packed_files(packed: Packed) -> tuple[Path, ...]:
    """Return the weights of the packed components."""
    return tuple(header.path for c in packed.components for header in c.headers)


def packing_facts(packed: Packed, layers: Collection[LayerRow]) -> Packing:
    """Return recipe, sparsity and layer counts of the packed components."""
    schemes = {
        (c.name, layer): scheme
        for c in packed.components
        for layer, scheme in c.config.layers.items()
    }
    sparse = {place for place, scheme in schemes.items() if scheme.sparsity is not None}
    total = sum(prod(row.shape) for row in layers)
    dropped = sum(prod(row.shape) for row in layers if (row.component, row.name) in sparse) / 2
    recipes = {str(m.recipe.get("name", "")) for c in packed.components for m in c.metadata}
    return Packing(
        ", ".join(sorted(recipes - {""})), len(layers), len(schemes), len(sparse), dropped / total
    )


def model_facts(name: str, shards: Iterable[Path]) -> ModelFacts:
    """Return what identifies a model: its weight files, in order."""
    digest, size = hashlib.sha256(), 0
    for path in shards:
        with path.open("rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
                size += len(chunk)
    return ModelFacts(name, digest.hexdigest(), size)


def describe_environment(
    device: torch.device, tools: Iterable[QuantizedBy] = ()
) -> tuple[tuple[str, str], ...]:
    """Return the machine and the versions of everything that can change a number.

    Args:
        device: where the pipelines ran.
        tools: those that are not of quantkit.
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    rows = [
        ("device", name),
        ("threads", str(torch.get_num_threads())),
        ("platform", platform.platform()),
        ("python", platform.python_version()),
    ]
    others = dict.fromkeys((tool.package, tool.version) for tool in tools)
    return (*rows, *((library, version(library)) for library in LIBRARIES), *others)


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def warn(model: Model, packed: Packed, report: Report) -> tuple[str, ...]:
    """Return what a reader must know before trusting the numbers."""
    reasons = Counter(row.reason for row in report.layers if row.backend == "reference")
    found = [
        f"{count} packed layers ran on reference, not on quantkit's kernels: {reason}."
        for reason, count in reasons.items()
    ]
    foreign = foreign_layers(model, packed)
    if foreign:
        found.append(
            f"The packed weights were not made from this original: {len(foreign)} source "
            f"checksums differ, the first is {foreign[0]}."
        )
    if len(report.run.prompts) < FEW_PROMPTS:
        found.append(f"{len(report.run.prompts)} prompts are few; the intervals say how few.")
    return tuple(found)
