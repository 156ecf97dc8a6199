"""``quantkit doctor``: what this machine has, and what would run each operation or layer."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantkit.cli import options
from quantkit.cli.console import echo, print_json, print_table

if TYPE_CHECKING:
    from quantkit.device.survey import Gpu, LayerChoice, OpChoice, Survey


@click.command()
@click.argument("packed", required=False, type=options.PATH)
@options.device
@options.quiet
@options.as_json
def doctor(packed: Path | None, device: str, quiet: bool, as_json: bool) -> None:
    """Show devices, compilers and caches, and which back end would run each operation and why.

    With PACKED, also which back end each of its packed layers would use.
    """
    examine(packed, device=device, quiet=quiet, as_json=as_json)


def examine(packed: Path | None, *, device: str, quiet: bool, as_json: bool) -> None:
    """Print the survey of this machine.

    Args:
        packed: a packed directory, or None.
        device: where its layers would run; auto is cuda if there is one.
        quiet: leave out the layers that a kernel runs.
        as_json: print JSON.

    Raises:
        CheckpointError: ``packed`` is not packed, or breaks a rule.
    """
    from quantkit.device.survey import survey

    layers = () if packed is None else _layers(packed, device)
    found = survey()
    if as_json:
        print_json(_json(found, layers))
        return
    _print_survey(found)
    if packed is not None:
        _print_layers(packed, layers, quiet=quiet)


def _layers(packed: Path, device: str) -> "tuple[LayerChoice, ...]":
    from quantkit.checkpoint.reader import open_packed
    from quantkit.device.survey import layer_choices
    from quantkit.errors import CheckpointError
    from quantkit.pipelines.running import choose_device

    opened = open_packed(packed)
    if not opened.components:
        raise CheckpointError(
            f"{packed}: nothing in it is packed by quantkit; wanted the output of 'quantkit pack'"
        )
    return layer_choices(opened, choose_device(device))


def _print_survey(found: "Survey") -> None:
    echo(f"torch {found.torch_version}")
    for device in found.devices:
        echo(device)
    for gpu in found.gpus:
        _print_gpu(gpu)
    used, limit = found.cache_bytes / 2**20, found.cache_limit / 2**20
    echo(f"kernel cache: {found.cache} ({used:.1f} of {limit:.0f} MiB)")
    tools = [(t.name, t.needed_for, t.found or f"missing: {t.problem}") for t in found.tools]
    print_table("Compilers", ("tool", "needed for", "found"), tools)
    rows = [(o.op, o.device, *_says(o)) for o in found.operations]
    print_table("Operations", ("operation", "device", "back end", "why"), rows)


def _print_gpu(gpu: "Gpu") -> None:
    echo(f"{gpu.device}: {gpu.name}, {gpu.architecture}, {gpu.memory_gib:.0f} GiB")
    if gpu.driver:
        echo(f"  kernels: {gpu.kernels}; {gpu.driver}; {gpu.compiler}")
        echo(f"  objects: {gpu.cached_objects} cached in {gpu.cache or 'no folder'}")
    for folder in gpu.prebuilt:
        echo(f"  prebuilt: {folder}")
    passed = f"passed in {gpu.self_test_seconds:.2f} s"
    echo(f"  self-test: {gpu.problem or passed}")


def _says(choice: "OpChoice") -> tuple[str, str]:
    return choice.choice.backend.value, choice.choice.reason or "a kernel runs"


def _print_layers(packed: Path, layers: "tuple[LayerChoice, ...]", *, quiet: bool) -> None:
    kernels = sum(not layer.reason for layer in layers)
    rows = [
        (_path(layer), layer.op, layer.backend, layer.reason)
        for layer in layers
        if layer.reason or not quiet
    ]
    print_table(str(packed), ("layer", "operation", "back end", "why"), rows)
    echo(f"{kernels} of {len(layers)} packed layers run on a kernel")


def _path(layer: "LayerChoice") -> str:
    return "/".join(filter(None, (layer.component, layer.layer)))


def _json(found: "Survey", layers: "tuple[LayerChoice, ...]") -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "torch": found.torch_version,
        "devices": list(found.devices),
        "gpus": [asdict(gpu) for gpu in found.gpus],
        "tools": [asdict(tool) for tool in found.tools],
        "cache": str(found.cache),
        "cache_bytes": found.cache_bytes,
        "cache_limit": found.cache_limit,
        "operations": [
            {
                "op": o.op,
                "device": o.device,
                "backend": o.choice.backend.value,
                "reason": o.choice.reason,
            }
            for o in found.operations
        ],
        "layers": [asdict(layer) for layer in layers],
    }
