"""Packed pipelines as ComfyUI's objects: a model, text encoders, a VAE."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial, wraps
from pathlib import Path
from typing import Any

import comfy.sd
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from quantkit.checkpoint.component import PackedComponent
from quantkit.checkpoint.reader import open_packed
from quantkit.comfyui.operations import Buckets, Surroundings, make_operations
from quantkit.comfyui.replaying import replay_steps
from quantkit.comfyui.weights import (
    denoiser_state,
    dequantized_state,
    encoder_state,
    named_as_published,
)
from quantkit.errors import InputError, ModelError
from quantkit.inference.layers.timestep_buckets import TimestepBuckets, stages_of
from quantkit.interchange.comfyui_export import prediction_marks
from quantkit.models.families import is_denoiser
from quantkit.models.pipeline_index import scheduler_config
from quantkit.models.source import shards_of, weight_files
from quantkit.pipelines.step_stage import give_stages
from quantkit.storage.jsonfile import read_json

#: Class of a denoiser -> what ComfyUI calls the text encoders of its pipeline (``CLIPType``).
ENCODERS: Mapping[str, str] = {
    "AuraFlowTransformer2DModel": "STABLE_DIFFUSION",
    "ChromaTransformer2DModel": "CHROMA",
    "Flux2Transformer2DModel": "FLUX2",
    "FluxTransformer2DModel": "FLUX",
    "HunyuanVideoTransformer3DModel": "HUNYUAN_VIDEO",
    "LTXVideoTransformer3DModel": "LTXV",
    "Lumina2Transformer2DModel": "LUMINA2",
    "PixArtTransformer2DModel": "PIXART",
    "QwenImageTransformer2DModel": "QWEN_IMAGE",
    "SD3Transformer2DModel": "SD3",
    "UNet2DConditionModel": "STABLE_DIFFUSION",
    "WanTransformer3DModel": "WAN",
    "ZImageTransformer2DModel": "LUMINA2",
}

#: Class of a denoiser -> its timestep in diffusers, of that in ComfyUI, where they differ.
TIMESTEPS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "LTXVideoTransformer3DModel": lambda sigma: 1000.0 * sigma,
    "Lumina2Transformer2DModel": lambda sigma: 1.0 - sigma,
    "ZImageTransformer2DModel": lambda sigma: 1.0 - sigma,
}

_FOLDERS = ("text_encoder", "text_encoder_2", "text_encoder_3")


def load_model(path: Path, *, replay: bool) -> Any:
    """Return the packed denoiser of a pipeline, or a component alone, as a ``ModelPatcher``.

    Args:
        path: of the packed directory.
        replay: record its steps and launch them again. Weights then stay where they were loaded,
            for ComfyUI's dynamic VRAM takes them from under a recorded step.

    Raises:
        CheckpointError: no packed directory, or a damaged one.
        InputError: no packed denoiser.
        ModelError: no layout is known for its class, or ComfyUI does not know the model.
    """
    component = _packed_denoiser(path)
    schedules = {entry.scheme.schedule for entry in component.config.schemes}
    buckets = {schedule: TimestepBuckets(schedule) for schedule in schedules if schedule}
    surroundings = Surroundings(buckets)
    state = {**denoiser_state(component), **_prediction_marks(path, component.class_name)}
    patcher = comfy.sd.load_diffusion_model_state_dict(
        state,
        model_options={"custom_operations": make_operations(surroundings)},
        disable_dynamic=replay,
    )
    if patcher is None:
        raise ModelError(
            f"{component.path}: ComfyUI does not recognize this {component.class_name}; only the "
            "published sizes of a family work there, so load it in diffusers"
        )
    if buckets:
        convert = TIMESTEPS.get(component.class_name)
        _find_buckets(patcher.model.diffusion_model, buckets, partial(_timestep, convert))
    if replay:
        forward = replay_steps(patcher.model.diffusion_model, patcher.load_device)
        surroundings.changes = forward.forget
    return patcher


def load_encoders(path: Path, embeddings: Any) -> Any:
    """Return the text encoders of a packed pipeline, packed or not, as ComfyUI's ``CLIP``.

    Args:
        path: the pipeline.
        embeddings: the folders of textual inversions, as ComfyUI names them.

    Raises:
        InputError: a component alone, or a pipeline without text encoders.
        ModelError: damaged weights.
    """
    packed = {component.name: component for component in open_packed(path).components}
    states = [_encoder_state(path / name, packed.get(name)) for name in _encoder_folders(path)]
    kind = ENCODERS[_packed_denoiser(path).class_name]
    return comfy.sd.load_text_encoder_state_dicts(
        state_dicts=states,
        embedding_directory=embeddings,
        clip_type=comfy.sd.CLIPType[kind],
        model_options={"custom_operations": make_operations(Surroundings())},
    )


def load_vae(path: Path) -> Any:
    """Return the VAE of a pipeline as ComfyUI's ``VAE``; one that is packed decodes in 16 bit, too.

    Raises:
        ModelError: it has none, or damaged weights.
    """
    packed = {component.name: component for component in open_packed(path).components}
    state = _dense_state(path / "vae", "diffusers")
    vae = comfy.sd.VAE(sd=dequantized_state(packed["vae"], state) if "vae" in packed else state)
    vae.throw_exception_if_invalid()
    return vae


def _packed_denoiser(path: Path) -> PackedComponent:
    for component in open_packed(path).components:
        diffusers = "_class_name" in read_json(component.path / "config.json")
        if diffusers and is_denoiser(component.class_name):
            return component
    raise InputError(
        f"{path}: no packed denoiser; pack the 16-bit pipeline with 'quantkit pack PIPELINE -o "
        "OUTPUT' and choose the output"
    )


def _prediction_marks(path: Path, class_name: str) -> dict[str, Tensor]:
    """Return the empty tensors by which ComfyUI knows that an SDXL model predicts v."""
    if class_name != "UNet2DConditionModel":
        return {}
    return {name: torch.empty(0) for name in prediction_marks(scheduler_config(path))}


def _find_buckets(
    denoiser: nn.Module,
    buckets: Buckets,
    read: Callable[[Sequence[Any], Mapping[str, Any]], Tensor],
) -> None:
    """Let a denoiser find the bucket of a step before it computes.

    By a forward of its own: ComfyUI's wrappers of a denoiser are not called by all of its models,
    and a hook of torch runs outside of what is recorded, which would keep the first step's bucket.

    Args:
        denoiser: ComfyUI's, called with a picture and a timestep.
        buckets: of all schedules of the model.
        read: returns the timestep of a call, as diffusers' model would be given it.
    """
    give_stages(denoiser, stages_of(buckets, read))
    own = denoiser.forward

    @wraps(own)
    def forward(*args: Any, **kwargs: Any) -> Any:
        timestep = read(args, kwargs)
        for bucket in buckets.values():
            bucket.to(timestep.device).update(timestep)
        return own(*args, **kwargs)

    vars(denoiser)["forward"] = forward


def _timestep(
    convert: Callable[[Tensor], Tensor] | None, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Tensor:
    """Return the timestep of a call of ComfyUI's; without a conversion it is diffusers' own."""
    del kwargs
    given: Tensor = args[1]
    return given if convert is None else convert(given)


def _encoder_folders(path: Path) -> Iterator[str]:
    there = [name for name in _FOLDERS if (path / name / "config.json").is_file()]
    if not there:
        raise InputError(
            f"{path}: no text encoder; choose a whole pipeline, or load its text encoders with "
            "ComfyUI's CLIP loaders"
        )
    yield from there


def _encoder_state(folder: Path, component: PackedComponent | None) -> dict[str, Tensor]:
    if component is None:
        return named_as_published(_dense_state(folder, "transformers"), folder)
    return named_as_published(encoder_state(component), folder)


def _dense_state(folder: Path, library: str) -> dict[str, Tensor]:
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder}: no config.json; choose a whole pipeline, or download it again")
    files = weight_files(folder, library, "")
    file = files.get("") or next(iter(files.values()))
    return {name: t for shard in shards_of(file) for name, t in load_file(shard).items()}
