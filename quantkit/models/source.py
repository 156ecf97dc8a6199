"""Opening MODEL: a pipeline directory, a component directory, or a hub id. Reads only JSON."""

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from quantkit.errors import ModelError
from quantkit.models.component_kinds import ENCODERS, KINDS, ComponentKind, kind_of
from quantkit.models.families import find_family
from quantkit.models.family import Family
from quantkit.models.location import refuse_nowhere
from quantkit.models.pickles import refuse_only_pickles
from quantkit.models.pipeline_index import (
    denoiser_names,
    read_components,
    read_models,
    read_pipeline_index,
)
from quantkit.models.quantizers import CONFIG_KEY, name_quantizer
from quantkit.storage.jsonfile import read_json
from quantkit.storage.shard_index import read_shard_index

#: diffusers' name of a model's weights, before the variant and the extension
WEIGHTS = "diffusion_pytorch_model"
#: transformers' name
ENCODER_WEIGHTS = "model"
_VARIANT = re.compile(r"[A-Za-z0-9_]{1,40}")


@dataclass(frozen=True)
class SingleFile:
    """A model in one file, .safetensors or .gguf, and the directory that says what it is."""

    path: Path
    #: of the diffusers pipeline that it belongs to, or of the component alone: config.json, and
    #: everything that the file lacks
    config: Path

    def __str__(self) -> str:
        return str(self.path)


@dataclass(frozen=True)
class StoredBlocks:
    """A weight that a .gguf file holds in blocks of a format that quantkit packs to, too."""

    path: Path
    #: the format's name: q4_0 or q8_0
    format: str
    #: bytes of the file that hold the rows, in the order of the rows
    spans: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Component:
    """One denoiser, text encoder or VAE: a directory with config.json and weights."""

    #: sub-folder of the pipeline; "" when MODEL is the component itself
    name: str
    path: Path
    class_name: str
    family: Family
    #: safetensors files, in the order of their names
    shards: tuple[Path, ...]
    #: the shard index, when there is one
    index: Path | None
    #: as in diffusion_pytorch_model.fp16.safetensors; None for the plain name
    variant: str | None = None
    #: the plain weights are there, too, but the variant was asked for: what is made has their names
    has_plain: bool = False
    #: by module path, what the shards' weights were dequantized from; empty for 16-bit models
    blocks: Mapping[str, StoredBlocks] = field(default_factory=dict)

    def name_of(self, file: Path) -> str:
        """Return the name of the packed form of one of its files, for plain loading."""
        if not self.has_plain or self.variant is None:
            return file.name
        return re.sub(rf"\.{re.escape(self.variant)}(?=[.-])", "", file.name, count=1)


@dataclass(frozen=True)
class Model:
    """The components to quantize: a pipeline's denoisers, or one component alone.

    A pipeline's other components are opened where a recipe packs them: ``open_others``.
    """

    path: Path
    is_pipeline: bool
    components: tuple[Component, ...]
    #: of the weights, that was asked for; None: the plain ones
    variant: str | None = None


def open_model(model: str | Path, *, variant: str | None = None) -> Model:
    """Return the model at a path, or of a hub id (its cache first).

    Args:
        model: a pipeline's directory, a component's (as its unet), or a hub id.
        variant: of the weights, as fp16; None: the plain ones, or the only variant.

    Returns:
        what other functions take as a model.

    Raises:
        ModelError: neither, not a diffusers directory, no weights, a missing shard, no denoiser, a
            model that is quantized already.
    """
    refuse_nowhere(model)
    if variant is not None and not _VARIANT.fullmatch(variant):
        raise ModelError(f"variant {variant!r:.80}: expected a word as fp16", fields=("variant",))
    # Not Path's own, which raises for names that are too long or hold a null.
    if os.path.isdir(model):  # noqa: PTH112
        return _open_directory(Path(model), variant)
    return _open_hub(str(model), variant)


def of_family(model: Model, name: str) -> Model:
    """Return the model with its denoisers taken for those of a family.

    Raises:
        ModelError: no such family.
    """
    components = tuple(
        c if kind_of(c.family) else replace(c, family=find_family(c.class_name, name))
        for c in model.components
    )
    return replace(model, components=components)


def _open_hub(repository: str, variant: str | None) -> Model:
    from quantkit.models.hub import cached, download

    path = cached(repository)
    if path is not None:
        try:
            return _open_directory(path, variant)
        except ModelError:
            # Only part of it was ever downloaded, as by another program: fetch the rest below.
            pass
    return _open_directory(download(repository, variant), variant)


def _open_directory(path: Path, variant: str | None) -> Model:
    if (path / "model_index.json").is_file():
        return Model(path, True, _open_pipeline(path, variant), variant)
    if not (path / "config.json").is_file():
        raise ModelError(
            f"{path}: not a diffusers directory: found neither model_index.json (a pipeline) nor "
            "config.json (a component)"
        )
    return Model(path, False, (_open_component(path, "", variant),), variant)


def _open_pipeline(path: Path, variant: str | None) -> tuple[Component, ...]:
    classes = read_pipeline_index(path)
    names = denoiser_names(classes)
    if not names:
        found = ", ".join(sorted(classes)) or "nothing"
        raise ModelError(
            f"{path}: model_index.json names no unet or transformer (found {found:.200})"
        )
    for name, (library, class_name) in read_models(path).items():
        find_weights(path / name, library, class_name, variant)
    return tuple(_open_component(path / name, name, variant) for name in names)


def open_others(model: Model, kinds: Iterable[ComponentKind] = KINDS) -> tuple[Component, ...]:
    """Return the components of a pipeline that are no denoisers; none of a component alone.

    Args:
        model: the pipeline.
        kinds: those to open.

    Raises:
        ModelError: no safetensors weights, a missing shard, one that is quantized already.
    """
    if not model.is_pipeline:
        return ()
    components = read_components(model.path).items()
    return tuple(
        _open_other(model.path / name, name, kind, class_name, model.variant)
        for kind in kinds
        for name, (library, class_name) in components
        if library == kind.library and kind.is_one(name, class_name)
    )


def _open_other(
    path: Path, name: str, kind: ComponentKind, class_name: str, variant: str | None
) -> Component:
    _read_config(path)
    # Not every component has the variant that the denoiser has.
    found = find_weights(path, kind.library, class_name, variant)
    family = kind.find_family(class_name)
    return Component(
        name, path, class_name, family, found.shards, found.index, found.variant, found.has_plain
    )


def _read_config(path: Path) -> dict[str, Any]:
    """Return the config of a component that is not packed yet."""
    if not path.is_dir():
        raise ModelError(f"{path}: missing, though model_index.json names it; download it again")
    config = read_json(path / "config.json")
    entry = config.get(CONFIG_KEY)
    # null is what diffusers takes for a model that nobody quantized.
    if entry is not None:
        raise ModelError(
            f"{path}: packed already (by {name_quantizer(entry):.80}); start from the 16-bit model "
            "that it came from ('quantkit import' takes its single file, or SDNQ's directory); "
            "'quantkit eval report' compares the two"
        )
    return config


def _open_component(path: Path, name: str, variant: str | None) -> Component:
    config = _read_config(path)
    class_name = config.get("_class_name")
    if not isinstance(class_name, str):
        return _open_other(path, name, ENCODERS, architecture(path, config), variant)
    for kind in KINDS:
        if kind.library == "diffusers" and kind.is_one(name, class_name):
            return _open_other(path, name, kind, class_name, variant)
    try:
        family = find_family(class_name)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error
    found = find_weights(path, "diffusers", class_name, variant)
    if variant not in (None, found.variant):
        variants = weight_files(path, "diffusers", class_name).keys() - {""}
        there = ", ".join(sorted(variants)) or "no variant"
        raise ModelError(
            f"{path}: no weights of variant {variant}, found {there}; choose one of these, or none",
            fields=("variant",),
        )
    return Component(
        name, path, class_name, family, found.shards, found.index, found.variant, found.has_plain
    )


def architecture(path: Path, config: Mapping[str, Any]) -> str:
    """Return the class of a transformers model."""
    match config.get("architectures"):
        case [str(class_name), *_]:
            return class_name
    raise ModelError(
        f"{path / 'config.json'}: neither _class_name nor architectures, expected the config of a "
        "denoiser of diffusers or of a text encoder of transformers"
    )


@dataclass(frozen=True)
class Weights:
    """A component's files of one variant."""

    #: in the order of their names
    shards: tuple[Path, ...]
    #: the shard index, when there is one
    index: Path | None
    #: None for the plain names
    variant: str | None
    #: there are files of plain names, too
    has_plain: bool


def find_weights(path: Path, library: str, class_name: str, named: str | None) -> Weights:
    """Return the files of the given variant; else the plain ones, else those of the only one.

    Args:
        path: a component's directory.
        library: of its class, as model_index.json has it.
        class_name: what loads it.
        named: the variant; None: the plain one.

    Raises:
        ModelError: as ``weight_files``; several variants, a damaged index, a missing shard.
    """
    files = weight_files(path, library, class_name)
    if named is not None and named in files:
        variant = named
    elif "" in files:
        variant = ""
    elif len(files) == 1:
        (variant,) = files
    else:
        raise ModelError(
            f"{path}: found the variants {', '.join(sorted(files))}, expected one; choose it as "
            "variant",
            fields=("variant",),
        )
    file = files[variant]
    index = file if file.suffix == ".json" else None
    return Weights(shards_of(file), index, variant or None, "" in files)


def weight_files(path: Path, library: str, class_name: str) -> dict[str, Path]:
    """Return what a loader opens for each variant, "" for the plain one: a file, or an index.

    Args:
        path: a component's directory.
        library: of its class, as model_index.json has it.
        class_name: what loads it.

    Raises:
        ModelError: no safetensors file, or no config.json.
    """
    refuse_only_pickles(path, library, class_name)
    of_diffusers = "_class_name" in read_json(path / "config.json")
    stem = WEIGHTS if of_diffusers else ENCODER_WEIGHTS
    plain = [path / f"{stem}.safetensors"]
    files = [f for f in sorted(path.glob(f"{stem}.*.safetensors")) if "-of-" not in f.name]
    indexes = [path / f"{stem}.safetensors.index.json"]
    indexes += sorted(path.glob(f"{stem}.safetensors.index.*.json"))
    # Where there are both, the last counts: diffusers opens the index, transformers the file.
    order = [*plain, *files, *indexes] if of_diffusers else [*indexes, *plain, *files]
    found = {_variant_of(file, stem): file for file in order if file.is_file()}
    if not found:
        raise ModelError(f"{path}: no weights: {stem}.safetensors is missing; download it again")
    return found


def _variant_of(file: Path, stem: str) -> str:
    parts = file.name.removeprefix(stem).removesuffix(".json").split(".")
    return next((part for part in parts if part not in ("", "safetensors", "index")), "")


def shards_of(file: Path) -> tuple[Path, ...]:
    """Return the files of what a loader opens, in the order of their names.

    Raises:
        ModelError: a damaged index, or a missing shard.
    """
    return _indexed_shards(file) if file.suffix == ".json" else (file,)


def _indexed_shards(index: Path) -> tuple[Path, ...]:
    shards = read_shard_index(index).shards
    for shard in shards:
        if not os.path.isfile(shard):  # noqa: PTH113
            raise ModelError(f"{shard}: missing shard; download it again")
    return shards
