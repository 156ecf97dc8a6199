"""Packing a pipeline that is in memory: its denoisers' layers are replaced in place."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from quantkit.errors import ArtefactError, InputError, ModelError, RecipeError
from quantkit.models.families import find_family
from quantkit.models.pipeline_index import denoiser_names
from quantkit.models.recommended import tuned
from quantkit.packing.dry_run import missing_artefacts
from quantkit.progress import Progress, silent
from quantkit.recipe.recommended import DEFAULT
from quantkit.workflow.arguments import (
    CalibrationLike,
    HessiansLike,
    RecipeLike,
    as_calibration,
    as_hessians,
    as_recipe,
)
from quantkit.workflow.pack import pack

if TYPE_CHECKING:
    from collections.abc import Mapping

    from quantkit.recipe.schema import Recipe

#: Commands that make what a recipe needs, by the argument that takes it.
_MADE_BY = {"calibration": "model", "hessians": "hessian"}


def quantize(
    pipe: Any,
    recipe: RecipeLike = DEFAULT,
    *,
    calibration: CalibrationLike | None = None,
    hessians: HessiansLike | None = None,
    progress: Progress = silent,
) -> Any:
    """Pack the denoisers of a pipeline in memory, in place.

    The codes are those that ``pack`` writes for the same weights. They pass through a folder for
    temporary files (``TMPDIR``), which takes the denoisers in 16 bit and packed, and is removed.

    Args:
        pipe: a DiffusionPipeline in float16, bfloat16 or float32, on any device.
        recipe: a bundled name, a YAML file, or opened.
        calibration: statistics of the model, for recipes with static scales or smoothing.
        hessians: second moments of the model, for GPTQ rounding and SparseGPT masks.
        progress: told of tensors done.

    Returns:
        the same pipeline.

    Raises:
        InputError: no denoiser, one that is packed already, has adapters or is offloaded; weights
            that are not finite; whatever ``pack`` refuses. The pipeline is as it was.
    """
    chosen = as_recipe(recipe)
    models = _denoisers(pipe)
    for name, model in models.items():
        _refuse_unfit(name, model)
    given: dict[str, Any] = {
        "calibration": as_calibration(calibration),
        "hessians": as_hessians(hessians),
    }
    _refuse_missing(pipe, models, chosen, given)
    with TemporaryDirectory(prefix="quantkit-") as scratch:
        source, packed = Path(scratch, "model"), Path(scratch, "packed")
        _save(pipe, models, source)
        try:
            pack(
                source,
                output=packed,
                recipe=chosen,
                progress=progress,
                **given,
            )
        except InputError as error:
            # The folder is gone when the text is read.
            text = str(error).replace(f"{source}/", "").replace(str(source), type(pipe).__name__)
            if isinstance(error, ArtefactError):
                text += ", or load the pipeline in the dtype of its files"
            raise type(error)(text, fields=error.fields) from error
        _fill(models, packed)
    return pipe


def _denoisers(pipe: Any) -> dict[str, Any]:
    """Return the denoisers of a pipeline, by name.

    Raises:
        ModelError: it has none.
    """
    from quantkit.inference.layers.layer_summary import modules_of

    modules = modules_of(pipe)
    # torch.compile wraps a model in a class of its own.
    inner = {name: getattr(module, "_orig_mod", module) for name, module in modules.items()}
    names = denoiser_names({name: type(module).__name__ for name, module in inner.items()})
    if not names:
        found = ", ".join(sorted(modules)) or "no models"
        raise ModelError(
            f"quantize: {type(pipe).__name__} has no unet or transformer (found {found:.200}); "
            "pass a diffusers pipeline that has one"
        )
    return {name: modules[name] for name in names}


def _refuse_unfit(name: str, model: Any) -> None:
    """Refuse a denoiser whose weights are not those of its class, or not there."""
    from quantkit.inference.layers.layer_summary import iterate_packed
    from quantkit.inference.loading.pipeline_dtype import check_dtype

    reasons = {
        "packed already; load the 16-bit pipeline again": any(iterate_packed(model)),
        "quantized by another tool; load the 16-bit pipeline": getattr(model, "hf_quantizer", 0),
        "compiled; quantize first, then compile": hasattr(model, "_orig_mod"),
        "with adapters; call pipe.unload_lora_weights(), quantize, then load them again": getattr(
            model, "peft_config", None
        ),
        "offloaded; quantize first, then call the method that offloads": _is_elsewhere(model),
    }
    for reason, holds in reasons.items():
        if holds:
            raise InputError(f"quantize: {name} is {reason}")
    check_dtype(model.dtype, f"quantize: {name}")


def _is_elsewhere(model: Any) -> bool:
    return any(p.is_meta or hasattr(m, "_hf_hook") for m in model.modules() for p in m.parameters())


def _refuse_missing(
    pipe: Any, models: Mapping[str, Any], recipe: Recipe, given: Mapping[str, Any]
) -> None:
    """Refuse a recipe that needs what was not given, and one that asks for text encoders."""
    if recipe.text_encoders is not None:
        raise RecipeError(
            f"recipe {recipe.name}: text_encoders: only denoisers are quantized in memory; pack "
            "the directory with 'quantkit pack', or drop text_encoders"
        )
    own = tuned(recipe, find_family(type(next(iter(models.values()))).__name__))
    origin = pipe.config.get("_name_or_path") or "MODEL"
    for name in missing_artefacts(own, masks=None, **given):
        raise RecipeError(
            f"recipe {recipe.name}: needs {name}; run 'quantkit calibrate {_MADE_BY[name]} "
            f"{origin} -r {recipe.name} -o {name.upper()}' and give it, or take fp8, which needs "
            "none",
            fields=(name,),
        )


def _save(pipe: Any, models: Mapping[str, Any], folder: Path) -> None:
    """Save the denoisers as a pipeline that has nothing else."""
    from diffusers.utils import logging

    index = {name: ["diffusers", type(model).__name__] for name, model in models.items()}
    folder.mkdir()
    text = json.dumps({"_class_name": type(pipe).__name__, **index})
    (folder / "model_index.json").write_text(text, encoding="utf-8")
    level = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)  # of configs that another class has saved
    try:
        for name, model in models.items():
            model.save_pretrained(folder / name)
    finally:
        logging.set_verbosity(level)


def _fill(models: Mapping[str, Any], packed: Path) -> None:
    from quantkit.inference.loading.in_place import fill_model

    for name, model in models.items():
        fill_model(model, packed / name)
