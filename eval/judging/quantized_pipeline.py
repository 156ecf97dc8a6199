"""Pipelines that another tool quantized, loaded and computed by its own code.

Of its files only names, dtypes and sizes are read: what they mean, that tool alone knows.
"""

import importlib
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from quantkit.eval.judging.evaluation_result import LayerRow, Packing, QuantizedBy
from quantkit.eval.measuring.generation import GenerationSettings, generate, rehearse_pictures

from quantkit.checkpoint.spec import QUANT_METHOD
from quantkit.errors import ModelError, QuantkitError
from quantkit.interchange.gguf_file import read_gguf
from quantkit.models.component_layers import Layer, list_layers
from quantkit.models.pipeline_index import read_pipeline_index
from quantkit.models.quantizers import (
    CONFIG_KEY,
    QUANTIZERS,
    Quantizer,
    find_quantizer,
    require_package,
    settings_of,
)
from quantkit.models.source import Model, find_weights
from quantkit.pipelines.calling import fewest_steps
from quantkit.pipelines.running import choose_dtype, load_directory, quiet_libraries
from quantkit.progress import Progress
from quantkit.storage.jsonfile import read_json, short
from quantkit.storage.tensorfile import TensorInfo, read_header

#: Few, but more than the one that some schedulers refuse.
REHEARSED_STEPS = 2
#: What tools leave in 16 bit, and its dtype in torch.
_SIXTEEN = {"BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True)
class QuantizedComponent:
    """A component that another tool quantized."""

    #: sub-folder of the pipeline
    name: str
    #: its folder, or its .gguf file
    path: Path
    class_name: str
    quantizer: Quantizer
    #: its quantization_config; of a .gguf file, what its types are
    config: Mapping[str, Any]
    #: its weights
    files: tuple[Path, ...]
    variant: str | None = None
    #: of its class
    library: str = "diffusers"

    @property
    def is_gguf(self) -> bool:
        """True for a file of GGUF, which has no config."""
        return self.files == (self.path,)

    @property
    def tensors(self) -> Iterator[TensorInfo]:
        """The tensors in its files; none of GGUF's, whose names are others."""
        for file in () if self.is_gguf else self.files:
            yield from read_header(file).tensors.values()

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype that it has to run in: that of most tensors left in 16 bit. None: any."""
        if not self.quantizer.own_dtype:
            return None
        # Not float32, which tools have scales in whatever they left alone.
        counts = Counter(t.dtype for t in self.tensors if t.dtype in _SIXTEEN)
        return _SIXTEEN[counts.most_common(1)[0][0]] if counts else None


@dataclass(frozen=True)
class QuantizedPipeline:
    """A pipeline in which other tools quantized components."""

    path: Path
    components: tuple[QuantizedComponent, ...]
    #: False: the path is that of the only component, and all others are the original's
    is_pipeline: bool

    @property
    def files(self) -> tuple[Path, ...]:
        """The weights of the quantized components."""
        return tuple(file for component in self.components for file in component.files)

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype that it has to run in; None: any."""
        found = (component.dtype for component in self.components)
        return next((dtype for dtype in found if dtype is not None), None)


def open_quantized(path: Path, model: Model) -> QuantizedPipeline | None:
    """Open what another tool quantized; None when no component of a directory is.

    Args:
        path: a pipeline's directory, a component's, or a .gguf file of the denoiser.
        model: the original.

    Raises:
        ModelError: of an unknown tool; its package is missing; not the same pipeline.
    """
    if path.is_file():
        found = QuantizedPipeline(path, (_open_gguf(path, model),), False)
    elif (path / "model_index.json").is_file():
        found = QuantizedPipeline(path, tuple(_open_pipeline(path, model)), True)
    else:
        found = QuantizedPipeline(path, tuple(_open_alone(path, model)), False)
    for component in found.components:
        require_package(component.quantizer, component.path)
    _refuse_other_layers(found, model)
    return found if found.components else None


def refuse_device(pipeline: QuantizedPipeline, device: torch.device) -> None:
    """Refuse what runs on a GPU alone, before anything long.

    Raises:
        ModelError: the device is a CPU.
    """
    for component in pipeline.components:
        by_diffusers = component.library == "diffusers"
        if by_diffusers and component.quantizer.needs_gpu and device.type == "cpu":
            raise ModelError(
                f"{component.path}: quantized by {component.quantizer.name}, which runs on a GPU "
                "alone, found device cpu; run it where torch sees a GPU",
                fields=("device",),
            )


def load_quantized(
    pipeline: QuantizedPipeline, model: Model, device: torch.device, dtype: torch.dtype
) -> Any:
    """Return the pipeline, loaded by diffusers and the tools themselves.

    Args:
        pipeline: what ``open_quantized`` returned.
        model: the original, whose components are taken where there is but one other.
        device: where to put it.
        dtype: of everything that is not quantized.

    Raises:
        ModelError: a tool or diffusers cannot load it.
    """
    with _blamed(pipeline, "it cannot be loaded here"):
        for component in pipeline.components:
            importlib.import_module(component.quantizer.module)
        if pipeline.is_pipeline:
            variant = next((c.variant for c in pipeline.components if c.variant), None)
            return load_directory(pipeline.path, device, dtype, variant=variant)
        (component,) = pipeline.components
        loaded = {component.name: _load_component(component, model, dtype)}
        variant = model.components[0].variant
        return load_directory(model.path, device, dtype, variant=variant, components=loaded)


@quiet_libraries()
def rehearse(
    pipeline: QuantizedPipeline,
    model: Model,
    settings: GenerationSettings,
    device: torch.device,
    dtype: torch.dtype | None,
    *,
    progress: Progress,
) -> None:
    """Load the pipeline, draw one picture in few steps, and drop both.

    No header says whether a tool's version reads these files, or has kernels for this device: that
    should not be found out after the original ran for an hour.

    Args:
        pipeline: what ``open_quantized`` returned.
        model: the original.
        settings: of the evaluation.
        device: where it runs.
        dtype: None for ``choose_dtype``'s.
        progress: told about every step.

    Raises:
        ModelError: it cannot be loaded, or computed here.
        NonFiniteError: the picture holds NaN or Inf.
    """
    pipe = load_quantized(pipeline, model, device, dtype or choose_dtype(model, device))
    with computing(pipeline):
        settings = rehearse_pictures(pipe, settings)
        few = replace(settings, prompts=settings.prompts[:1], seeds=settings.seeds[:1])
        few = replace(few, steps=fewest_steps(pipe, few.call, REHEARSED_STEPS).steps)
        generate(pipe, few, label=f"trial of {pipeline.path.name}", progress=progress)


@contextmanager
def computing(pipeline: QuantizedPipeline | None) -> Iterator[None]:
    """Name the tool in what it raises while it runs; None: nobody else's code runs.

    Raises:
        ModelError: instead of a tool's own exceptions.
    """
    if pipeline is None:
        yield
        return
    with _blamed(pipeline, "it cannot be computed here"):
        yield


@contextmanager
def _blamed(pipeline: QuantizedPipeline, what: str) -> Iterator[None]:
    try:
        yield
    except (QuantkitError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        # Nine tools, and what they import: diffusers' single files alone have an exception of
        # their own that is a plain Exception.
        raise ModelError(f"{pipeline.path}: {what}: {short(error)}; {_cure(pipeline)}") from error


def _cure(pipeline: QuantizedPipeline) -> str:
    """Return what to do when it is the tool that fails."""
    packages = " ".join(dict.fromkeys(c.quantizer.package for c in pipeline.components))
    return f"try it in diffusers alone, or pip install -U {packages}"


def quantized_layers(
    pipeline: QuantizedPipeline, model: Model
) -> tuple[tuple[LayerRow, ...], Packing]:
    """Return one row per Linear and Conv2d of the quantized components, and what they amount to.

    Of a .gguf file there are none: it has the names of another layout.
    """
    rows = []
    for component in pipeline.components:
        if not component.is_gguf:
            layers = _layers(model, component.name)
            stored = _by_layer(component, layers)
            rows += [_row(component, layer, stored.get(layer.name, [])) for layer in layers]
    count = sum(row.format not in {*_SIXTEEN, "F32"} for row in rows)
    return tuple(rows), Packing(_recipe(pipeline), len(rows), count, 0, 0.0)


def files_before(pipeline: QuantizedPipeline, model: Model) -> tuple[Path, ...]:
    """Return the original's weights of the components that are quantized, to compare sizes."""
    opened = {component.name: component.shards for component in model.components}
    found: list[Path] = []
    for component in pipeline.components:
        if component.name not in opened:
            folder = model.path / component.name
            found_here = find_weights(
                folder, component.library, component.class_name, model.variant
            )
            opened[component.name] = found_here.shards
        found += opened[component.name]
    return tuple(found)


def quantized_by(pipeline: QuantizedPipeline) -> tuple[QuantizedBy, ...]:
    """Return which tool did what, component by component."""
    return tuple(
        QuantizedBy(
            c.name, c.quantizer.name, c.quantizer.package, c.quantizer.version,
            settings_of(c.quantizer, c.config), dict(c.config),
        )
        for c in pipeline.components
    )  # fmt: skip


def _open_pipeline(path: Path, model: Model) -> Iterator[QuantizedComponent]:
    theirs, mine = read_pipeline_index(path), read_pipeline_index(model.path)
    found = [c for name in theirs for c in _open_component(path / name, name, theirs[name])]
    names = [c.name for c in found] + [c.name for c in model.components]
    for name in names if found else ():
        if theirs.get(name) != mine.get(name):
            raise ModelError(
                f"{path}: its {name} is {theirs.get(name, 'missing')}, expected "
                f"{mine.get(name, 'none')} as in {model.path}; pass two directories of the same "
                "pipeline"
            )
    yield from found


def _open_alone(path: Path, model: Model) -> Iterator[QuantizedComponent]:
    """Yield a component that was saved by itself, in the place that its class has in the model."""
    for component in _open_component(path, "", None):
        yield _placed(component, model, read_pipeline_index(model.path))


def _open_component(path: Path, name: str, class_name: str | None) -> Iterator[QuantizedComponent]:
    """Yield the component, if another tool quantized it."""
    file = path / "config.json"
    config = read_json(file) if file.is_file() else {}
    entry = config.get(CONFIG_KEY)
    if entry is None or (isinstance(entry, Mapping) and entry.get("quant_method") == QUANT_METHOD):
        return
    quantizer = find_quantizer(entry, file)
    library = "diffusers" if "_class_name" in config else "transformers"
    kind = class_name or _class_of(config)
    weights = find_weights(path, library, kind, None)
    yield QuantizedComponent(
        name, path, kind, quantizer, entry, weights.shards, weights.variant, library
    )


def _class_of(config: Mapping[str, Any]) -> str:
    match config:
        case {"_class_name": str(name)} | {"architectures": [str(name), *_]}:
            return name
    return "of no class"


def _open_gguf(path: Path, model: Model) -> QuantizedComponent:
    import diffusers

    quantizer = QUANTIZERS["gguf"]
    if path.suffix.lower() != ".gguf":
        raise ModelError(
            f"{path}: a single file, expected a directory or .gguf file; 'quantkit import' writes "
            "it as a pipeline"
        )
    require_package(quantizer, path)
    counts = Counter(tensor.type for tensor in read_gguf(path).tensors.values())
    types = dict(counts.most_common())
    names = [component.name for component in model.components]
    if len(names) != 1:
        raise ModelError(
            f"{path}: a single file, but {model.path} has the denoisers {', '.join(names)}; pass "
            "the directory of the whole pipeline"
        )
    kind = model.components[0].class_name
    if not hasattr(getattr(diffusers, kind), "from_single_file"):
        raise ModelError(
            f"{path}: a single file, and diffusers reads none of {kind}; 'quantkit import' writes "
            "it as a pipeline"
        )
    return QuantizedComponent(names[0], path, kind, quantizer, {"types": types}, (path,))


def _placed(
    component: QuantizedComponent, model: Model, classes: Mapping[str, str]
) -> QuantizedComponent:
    names = [name for name, kind in classes.items() if kind == component.class_name]
    if len(names) != 1:
        raise ModelError(
            f"{component.path}: a component alone, {component.class_name}, expected a class that "
            f"{model.path} has once, found {', '.join(names) or 'none'}; pass the directory of "
            "the whole pipeline"
        )
    return replace(component, name=names[0])


def _load_component(component: QuantizedComponent, model: Model, dtype: torch.dtype) -> Any:
    import diffusers
    import transformers

    library = diffusers if hasattr(diffusers, component.class_name) else transformers
    kind = getattr(library, component.class_name)
    if not component.is_gguf:
        return kind.from_pretrained(
            str(component.path),
            torch_dtype=dtype,
            variant=component.variant,
            use_safetensors=True,
        )
    return kind.from_single_file(
        str(component.path),
        config=str(model.path),
        subfolder=component.name,
        quantization_config=diffusers.GGUFQuantizationConfig(compute_dtype=dtype),
        torch_dtype=dtype,
        local_files_only=True,
    )


def _refuse_other_layers(pipeline: QuantizedPipeline, model: Model) -> None:
    """Refuse denoisers that lack layers of the original: diffusers fills them with noise."""
    for component in pipeline.components:
        if component.is_gguf:
            continue
        layers = _layers(model, component.name)
        stored = _by_layer(component, layers)
        if missing := [layer.name for layer in layers if layer.name not in stored]:
            raise ModelError(
                f"{component.path}: no weights of {len(missing)} layers of {model.path}, as "
                f"{missing[0]}; pass two directories of the same pipeline"
            )


def _layers(model: Model, name: str) -> tuple[Layer, ...]:
    """Return the layers of a component of the original; none where it was not opened."""
    return next((list_layers(c) for c in model.components if c.name == name), ())


def _by_layer(
    component: QuantizedComponent, layers: tuple[Layer, ...]
) -> dict[str, list[TensorInfo]]:
    """Return the tensors that a layer became: all of those that its name begins."""
    names = {layer.name for layer in layers}
    found: dict[str, list[TensorInfo]] = {}
    for tensor in component.tensors:
        name = tensor.name
        while name and name not in names:
            name = name.rpartition(".")[0]
        if name and tensor.name != f"{name}.bias":
            found.setdefault(name, []).append(tensor)
    return found


def _row(component: QuantizedComponent, layer: Layer, stored: list[TensorInfo]) -> LayerRow:
    dtypes = sorted(stored, key=lambda tensor: -tensor.nbytes)
    return LayerRow(
        component=component.name,
        name=layer.name,
        kind=layer.kind,
        shape=layer.shape,
        format=" + ".join(dict.fromkeys(tensor.dtype for tensor in dtypes)),
        backend=component.quantizer.name,
        reason="",
        weight_error=None,
        output_error=None,
        deviation=None,
        bytes_before=layer.weight.nbytes,
        bytes_after=sum(tensor.nbytes for tensor in stored),
    )


def _recipe(pipeline: QuantizedPipeline) -> str:
    """Return tools and settings in a few words, for the table of methods."""
    rows = (
        " ".join((c.quantizer.name, *(words for _, words in settings_of(c.quantizer, c.config))))
        for c in pipeline.components
    )
    return ", ".join(dict.fromkeys(rows))
