"""A single file and the pipeline that completes it: checked to fit, and which rows are whose."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from quantkit.errors import CheckpointError, ModelError
from quantkit.interchange.layout_names import (
    OriginalTensor,
    layout_of_model,
    layout_of_names,
    original_tensors,
)
from quantkit.interchange.other_files import refuse_other
from quantkit.interchange.stored_file import StoredFile, StoredTensor
from quantkit.models.building import read_skeleton
from quantkit.models.pipeline_index import (
    denoiser_names,
    read_pipeline_index,
    scheduler_config,
)
from quantkit.models.quantizers import CONFIG_KEY
from quantkit.models.skeleton import some
from quantkit.storage.jsonfile import read_json

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
class Piece:
    """A tensor of diffusers and where its rows are."""

    name: str
    shape: tuple[int, ...]
    tensor: StoredTensor
    #: (first, number) of the tensor's numbers, in the order of the rows
    runs: tuple[tuple[int, int], ...]
    #: F32, F16 or BF16
    dtype: str

    @property
    def quantized(self) -> bool:
        """True where the file has codes."""
        return self.tensor.quantized


@dataclass(frozen=True)
class SingleFileModel:
    """A file that fits a model, checked but for its numbers."""

    file: StoredFile
    #: the directory with everything else
    config: Path
    #: the denoiser's sub-folder there; empty when it is a component's directory
    component: str
    #: the original layout's name, or "diffusers"
    layout: str
    pieces: tuple[Piece, ...]
    #: of the file's tensors that are not the denoiser's, by what their names begin with
    others: Mapping[str, int]


@dataclass(frozen=True)
class _Described:
    """The model of a config.json."""

    folder: Path
    class_name: str
    shapes: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class _Naming:
    """How a file names the tensors of a model."""

    layout: str
    prefix: str
    tensors: tuple[OriginalTensor, ...]


def fit(file: StoredFile, config: Path) -> SingleFileModel:
    """Return a file and the directory that completes it, which fit each other.

    Raises:
        ModelError: of another model than the directory, without a layout that is known, with
            tensors missing, left over or of another shape; no diffusers directory.
    """
    component = _component_of(config)
    described = _described(config / component)
    naming = _naming_of(file, described)
    others = _others(file, naming, described)
    _check_remarks(file, config)
    usual = _usual_dtype(file, naming)
    pieces = [p for o in naming.tensors for p in _pieces(file, naming, o, described, usual)]
    return SingleFileModel(file, config, component, naming.layout, tuple(pieces), others)


def _component_of(config: Path) -> str:
    """Return the sub-folder of the denoiser; empty for a component's directory."""
    if (config / "model_index.json").is_file():
        names = denoiser_names(read_pipeline_index(config))
        if len(names) != 1:
            raise ModelError(
                f"{config}: {len(names)} denoisers, wanted one; give the pipeline that the file "
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


def _described(folder: Path) -> _Described:
    told = read_json(folder / "config.json")
    if CONFIG_KEY in told:
        raise ModelError(f"{folder}: packed; give the directory of the 16-bit pipeline as config")
    try:
        shapes = read_skeleton(folder / "config.json").tensors
    except CheckpointError as error:
        raise ModelError(str(error)) from error
    return _Described(folder, f"{told.get('_class_name')!s:.80}", shapes)


def _naming_of(file: StoredFile, described: _Described) -> _Naming:
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
    return _Naming(layout.architecture, prefix, original_tensors(layout, described.shapes))


def _own_names(file: StoredFile, described: _Described) -> _Naming:
    """Return the naming of a file in diffusers' names, with any prefix."""
    shapes = described.shapes
    hits = {p: sum(p + name in file.tensors for name in shapes) for p in _PREFIXES}
    prefix = max(_PREFIXES, key=lambda p: hits[p])
    if 2 * hits[prefix] < len(shapes):
        refuse_other(file, described.folder)
    tensors = tuple(OriginalTensor(name, (name,), swapped=False) for name in shapes)
    return _Naming("diffusers", prefix, tensors)


def _others(file: StoredFile, naming: _Naming, described: _Described) -> Mapping[str, int]:
    """Return what the file holds besides the model; refuse what belongs to no other one."""
    prefix = naming.prefix
    wanted = {prefix + tensor.name for tensor in naming.tensors}
    aside = {
        name for name in file.tensors
        if not name.startswith(prefix) or (not prefix and name.startswith(_OTHER_PARTS))
    }  # fmt: skip
    found = file.tensors.keys() - aside - _REMARKS
    for name in sorted(found & wanted):
        if file.tensors[name].problem:
            raise ModelError(f"{file.path}: {name}: {file.tensors[name].problem}")
    for what, names in (("lacks", wanted - found), ("has besides", found - wanted)):
        if names:
            raise ModelError(
                f"{file.path}: {what} {some(names)} for the model of {described.folder}; "
                "give the pipeline that the file belongs to, or download it again",
                fields=("config",),
            )
    return Counter(name.partition(".")[0] for name in aside - _REMARKS)


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


def _usual_dtype(file: StoredFile, naming: _Naming) -> str:
    """Return the 16-bit dtype of most of the denoiser's numbers; of codes alone: BF16."""
    count = {"BF16": 0, "F16": 0}
    for original in naming.tensors:
        tensor = file.tensors[naming.prefix + original.name]
        if tensor.dtype in count:
            count[tensor.dtype] += prod(tensor.shape)
    return max(count, key=lambda name: count[name])


def _pieces(
    file: StoredFile,
    naming: _Naming,
    original: OriginalTensor,
    described: _Described,
    usual: str,
) -> Iterator[Piece]:
    """Yield the parts of one tensor of the file."""
    tensor = file.tensors[naming.prefix + original.name]
    parts = [described.shapes[name] for name in original.parts]
    whole = parts[0] if len(parts) == 1 else (sum(p[0] for p in parts), *parts[0][1:])
    if _without_ones(tensor.shape) != _without_ones(whole):
        raise ModelError(
            f"{file.path}: {tensor.name}: shape {list(tensor.shape)}, the model of "
            f"{described.folder} has {list(whole)}; give the pipeline that the file belongs to",
            fields=("config",),
        )
    row = prod(whole[1:])
    cut = len(parts) > 1 or original.swapped
    _check_blocks(file, tensor, row if cut else prod(whole))
    first = 0
    for name, shape in zip(original.parts, parts, strict=True):
        count = prod(shape)
        half = shape[0] // 2 * row if original.swapped else 0
        runs = ((first + half, count - half), (first, half)) if half else ((first, count),)
        yield Piece(name, shape, tensor, runs, tensor.dtype or usual)
        first += count


def _without_ones(shape: Sequence[int]) -> tuple[int, ...]:
    """Return a shape's sizes but for those of one, of which ggml drops what torch has first.

    The numbers and their order are the same.
    """
    return tuple(size for size in shape if size != 1)


def _check_blocks(file: StoredFile, tensor: StoredTensor, numbers: int) -> None:
    if numbers % tensor.block:
        raise ModelError(
            f"{file.path}: {tensor.name}: {numbers} numbers cut blocks of {tensor.block}; download "
            "it again"
        )
