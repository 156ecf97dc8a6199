"""The sensitivity of a model's layers, and its file: JSON that the optimiser reads alone."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from quantkit.calibration.statistics.layer_statistics import edges_of
from quantkit.models.families import find_family
from quantkit.recipe.schema import Recipe
from quantkit.storage.files import staged_file
from quantkit.storage.jsonfile import as_type, read_measured

SCHEMA, VERSION = "quantkit.sensitivity", 1
#: The kind of attention modules.
ATTENTION = "attention"


@dataclass(frozen=True)
class Outcome:
    """The error and cost of one layer under one treatment."""

    #: relative output error (NMSE) on stored inputs
    error: float
    #: of the weight, its scales and metadata
    bytes: int
    #: modelled, of one denoising step of one picture
    seconds: float


@dataclass(frozen=True)
class Measured:
    """The error of the final latents with one layer under one treatment."""

    treatment: str
    #: NMSE of the final latents
    error: float


@dataclass(frozen=True)
class LayerSensitivity:
    """One layer, or attention module, under every treatment that it can have."""

    name: str
    #: linear, conv2d or attention
    kind: str
    #: of the dense weight; of attention: heads, keys of a call, columns of a head
    shape: tuple[int, ...]
    #: SHA-256 of the source weight; of attention, which has none: empty
    digest: str
    #: that one denoising step of one picture multiplies; of attention: queries
    rows: float
    #: by name of the treatment, in the order of the table
    outcomes: Mapping[str, Outcome]
    #: None: not run in the pipeline
    measured: Measured | None = None

    @property
    def role(self) -> str:
        """Its role in its block: its kind and the last two words of its path, without numbers."""
        words = [word for word in self.name.split(".") if not word.isdigit()]
        return f"{self.kind} {'.'.join(words[-2:])}"


@dataclass(frozen=True)
class SensitivityProvenance:
    """The provenance of the figures."""

    #: as it was given
    model: str
    #: SHA-256 over the digests of the layers' weights, one a line
    model_digest: str
    #: SHA-256 of the calibration file
    calibration_digest: str
    #: that the latents were made with; 0 prompts: none were
    prompts: int
    prompts_digest: str
    steps: int
    guidance: float | None
    seed: int
    #: of the device whose rates the times are modelled with
    device: str
    #: of quantkit, torch and diffusers
    versions: Mapping[str, str]


@dataclass(frozen=True)
class Sensitivity:
    """The layers of one denoiser that can be packed, and after them its attention modules."""

    #: name of the component in its pipeline; "" for one alone
    component: str
    #: name of its family, for which recipes are tuned
    family: str
    layers: tuple[LayerSensitivity, ...]
    #: ascending timesteps between the calibration's buckets
    edges: tuple[float, ...]
    #: of all tensors that stay as they are
    fixed_bytes: int
    #: the recipe of the scales, and of the budget whose edge was probed
    recipe: Recipe
    provenance: SensitivityProvenance
    #: why layers were run in the pipeline, in their order
    notes: tuple[str, ...] = field(default=())

    @property
    def attention(self) -> tuple[LayerSensitivity, ...]:
        """The attention modules among them."""
        return tuple(layer for layer in self.layers if layer.kind == ATTENTION)

    @property
    def bytes_before(self) -> int:
        """Size of the component as the source has it."""
        return self.fixed_bytes + sum(layer.outcomes["16-bit"].bytes for layer in self.layers)


def save_sensitivity(sensitivity: Sensitivity, path: Path, *, force: bool) -> None:
    """Write the file.

    Raises:
        OutputError: it exists without ``force``, or cannot be written.
    """
    with staged_file(path, force=force) as stage:
        stage.write_text(json.dumps(to_json(sensitivity), indent=1) + "\n", encoding="utf-8")


def to_json(sensitivity: Sensitivity) -> dict[str, Any]:
    """Return the file's JSON values."""
    names = ("component", "family", "fixed_bytes")
    values = {name: getattr(sensitivity, name) for name in names}
    return {
        "schema": SCHEMA,
        "schema_version": VERSION,
        **values,
        "bytes_before": sensitivity.bytes_before,
        "edges": list(sensitivity.edges),
        "provenance": asdict(sensitivity.provenance),
        "recipe": sensitivity.recipe.model_dump(mode="json"),
        "notes": list(sensitivity.notes),
        "layers": [{"role": layer.role, **asdict(layer)} for layer in sensitivity.layers],
    }


def load_sensitivity(path: Path) -> Sensitivity:
    """Read what ``save_sensitivity`` wrote.

    Raises:
        ArtefactError: missing, not such a file, of another version, or damaged.
    """
    return read_measured(path, SCHEMA, VERSION, _parsed, command="calibrate sensitivity")


def _parsed(values: dict[str, Any]) -> Sensitivity:
    return Sensitivity(
        str(values["component"]),
        find_family("", str(values["family"])).name,
        tuple(_layer(entry) for entry in values["layers"]),
        edges_of(values["edges"]),
        int(values["fixed_bytes"]),
        Recipe.model_validate(values["recipe"]),
        as_type(SensitivityProvenance, values["provenance"]),
        tuple(map(str, values["notes"])),
    )


def _layer(entry: dict[str, Any]) -> LayerSensitivity:
    layer = as_type(LayerSensitivity, {k: v for k, v in entry.items() if k != "role"})
    figures = [f for o in layer.outcomes.values() for f in (o.error, o.bytes, o.seconds)]
    if "16-bit" not in layer.outcomes or not all(f >= 0 for f in (*figures, layer.rows)):
        raise ValueError(f"{layer.name!r:.80}: outcomes without 16-bit, or below 0")
    return layer
