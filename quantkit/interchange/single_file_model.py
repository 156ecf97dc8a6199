"""A single file and the pipeline that completes it, which fit each other."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from quantkit.errors import ModelError
from quantkit.interchange.checkpoint_parts import Encoders, OtherParts, Part, find_parts
from quantkit.interchange.file_contents import kind_of
from quantkit.interchange.layout_names import (
    layout_of_model,
    layout_of_names,
    original_tensors,
)
from quantkit.interchange.original_layouts import LAYOUTS
from quantkit.interchange.pieces import ModelShapes, Naming, describe, own_names, pieces_of
from quantkit.interchange.stored_file import StoredFile
from quantkit.models.pipeline_index import (
    denoiser_names,
    read_pipeline_index,
    scheduler_config,
)
from quantkit.models.skeleton import some
from quantkit.models.source import WEIGHTS

#: Empty tensors of ComfyUI's that say how the model was trained.
_REMARKS = frozenset({"v_pred", "ztsnr"})
#: What names of a denoiser begin with in files in diffusers' own names.
_PREFIXES = ("", "model.diffusion_model.", "diffusion_model.", "transformer.", "unet.")
#: What names of other models begin with in files without a prefix.
_OTHER_PARTS = (
    "first_stage_model.", "vae.", "cond_stage_model.", "conditioner.", "text_encoders.",
    "model_ema.",
)  # fmt: skip


@dataclass(frozen=True)
class SingleFileModel:
    """A file that fits a model, checked but for its numbers."""

    file: StoredFile
    #: the directory with everything else
    config: Path
    denoiser: Part
    rest: OtherParts

    @property
    def parts(self) -> tuple[Part, ...]:
        """All components that the file holds."""
        return (self.denoiser, *self.rest.parts)


def fit(file: StoredFile, config: Path, encoders: Encoders = "file") -> SingleFileModel:
    """Return a file and the directory that completes it, which fit each other.

    Args:
        file: with a denoiser, or a whole checkpoint.
        config: the directory of the pipeline, or of the denoiser alone.
        encoders: whose VAE and text encoders are taken, where the file has them.

    Raises:
        ModelError: of another model than the directory, without a layout that is known, with
            tensors missing, left over or of another shape; no diffusers directory.
    """
    component = _component_of(config)
    described = describe(config / component, len(file.tensors))
    naming = _naming_of(file, described)
    others = _others(file, naming, described)
    _check_remarks(file, config)
    denoiser = Part(component, naming.layout, WEIGHTS, pieces_of(file, naming, described))
    rest = find_parts(file, others, config, encoders)
    unused = {name: 1 for name in naming.unused if naming.prefix + name in file.tensors}
    return SingleFileModel(
        file, config, denoiser, replace(rest, ignored={**rest.ignored, **unused})
    )


def _component_of(config: Path) -> str:
    """Return the sub-folder of the denoiser; empty for a component's directory."""
    if (config / "model_index.json").is_file():
        names = denoiser_names(read_pipeline_index(config))
        if len(names) != 1:
            raise ModelError(
                f"{config}: {len(names)} denoisers, expected one; give the pipeline that the file "
                "belongs to, or the directory of one of its denoisers",
                fields=("config",),
            )
        return names[0]
    if (config / "config.json").is_file():
        return ""
    raise ModelError(
        f"{config}: not a diffusers directory: found neither model_index.json nor config.json; "
        "give that of the pipeline that the file belongs to",
        fields=("config",),
    )


def _naming_of(file: StoredFile, described: ModelShapes) -> Naming:
    """Return how the file names the model of a directory, which must be the file's."""
    found = layout_of_names(file.tensors)
    if found is None:
        return _own_names(file, described)
    layout, prefix = found
    if described.class_name != layout.class_name:
        raise ModelError(
            f"{file.path}: holds {layout.architecture} ({layout.class_name}), but "
            f"{described.folder} is a {described.class_name}; give the pipeline that the file "
            "belongs to",
            fields=("config",),
        )
    if layout_of_model(layout.class_name, described.shapes) != layout:
        raise ModelError(
            f"{file.path}: holds {layout.architecture}, but {described.folder} is of another "
            "architecture; give the pipeline that the file belongs to",
            fields=("config",),
        )
    tensors = original_tensors(layout, described.shapes)
    return Naming(layout.architecture, prefix, tensors, layout.unused)


def _own_names(file: StoredFile, described: ModelShapes) -> Naming:
    """Return the naming of a file in diffusers' names, with any prefix."""
    shapes = described.shapes
    hits = {p: sum(p + name in file.tensors for name in shapes) for p in _PREFIXES}
    prefix = max(_PREFIXES, key=lambda p: hits[p])
    if 2 * hits[prefix] < len(shapes):
        _refuse_unknown(file, described.folder)
    return Naming("diffusers", prefix, own_names(shapes))


def _refuse_unknown(file: StoredFile, folder: Path) -> NoReturn:
    """Refuse a file that is not the model, naming the kind that it is.

    Raises:
        ModelError: always.
    """
    kind = kind_of(file.tensors)
    if kind is not None:
        raise ModelError(f"{file.path}: {kind.what}, expected a denoiser; {kind.cure}")
    known = ", ".join(dict.fromkeys(layout.architecture for layout in LAYOUTS))
    named = f"architecture {file.architecture:.80}" if file.architecture else "a model"
    raise ModelError(
        f"{file.path}: {named}, whose layout is not known; expected one of {known}, or the names "
        f"of diffusers for {folder}; found {some(file.tensors) or 'no tensors'}",
        fields=("config",),
    )


def _others(file: StoredFile, naming: Naming, described: ModelShapes) -> set[str]:
    """Return the names of the other tensors; refuse missing or extra tensors of the denoiser."""
    prefix, expected = naming.prefix, naming.names
    aside = {
        name for name in file.tensors
        if not name.startswith(prefix) or (not prefix and name.startswith(_OTHER_PARTS))
    }  # fmt: skip
    unused = {prefix + name for name in naming.unused}
    found = file.tensors.keys() - aside - unused - _REMARKS
    for what, names in (("lacks", expected - found), ("has besides", found - expected)):
        if names:
            raise ModelError(
                f"{file.path}: {what} {some(names)} for the model of {described.folder}; "
                "give the pipeline that the file belongs to, or download it again",
                fields=("config",),
            )
    return aside - _REMARKS


def _check_remarks(file: StoredFile, config: Path) -> None:
    """Refuse a file that was trained for v-prediction where the scheduler is not."""
    found = scheduler_config(config)
    if "v_pred" in file.tensors and found and found.get("prediction_type") != "v_prediction":
        raise ModelError(
            f"{file.path}: a v-prediction model, but the scheduler of {config} has prediction_type "
            f"{found.get('prediction_type', 'epsilon')!s:.80}; write v_prediction into its config, "
            "or give the pipeline that the file belongs to",
            fields=("config",),
        )
