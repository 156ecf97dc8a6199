"""Recognising files that are no denoiser or have an unknown layout, for helpful errors."""

import re
from dataclasses import dataclass
from typing import NoReturn

from quantkit.errors import ModelError
from quantkit.interchange.original_layouts import LAYOUTS
from quantkit.interchange.stored_file import StoredFile
from quantkit.models.skeleton import some


@dataclass(frozen=True)
class _Other:
    """A kind of file, told by a tensor that only such files have."""

    what: str
    #: within a name
    pattern: re.Pattern[str]
    cure: str


_OTHERS = (
    _Other(
        "a LoRA",
        re.compile(r"lora_|\.lora|lokr_|hada_w|\.oft_"),
        "import the model that it was trained for, and load the LoRA with load_lora_weights",
    ),
    _Other(
        "a ControlNet",
        re.compile(r"^control_model\.|^controlnet_|zero_convs?\."),
        "load it with ControlNetModel.from_single_file of diffusers",
    ),
    _Other(
        "a text encoder",
        re.compile(
            r"text_model\.|^encoder\.block\.|^model\.layers\.|transformer\.resblocks"
            r"|^shared\.weight$"
        ),
        "give the file of the denoiser; with or without its text encoders",
    ),
    _Other(
        "a VAE",
        re.compile(r"^(first_stage_model\.|vae\.)?(decoder|encoder)\.(conv_in|mid)"),
        "give the file of the denoiser; with or without its VAE",
    ),
    _Other(
        "an embedding",
        re.compile(r"^(emb_params|string_to_param|clip_[lg])\b"),
        "give the file of the denoiser, and load the embedding with load_textual_inversion",
    ),
)


def refuse_other(file: StoredFile, folder: object) -> NoReturn:
    """Refuse a file that is not the model, naming the kind that it is.

    Raises:
        ModelError: always.
    """
    for other in _OTHERS:
        if any(other.pattern.search(name) for name in file.tensors):
            raise ModelError(f"{file.path}: {other.what}, expected a denoiser; {other.cure}")
    known = ", ".join(dict.fromkeys(layout.architecture for layout in LAYOUTS))
    named = f"architecture {file.architecture:.80}" if file.architecture else "a model"
    raise ModelError(
        f"{file.path}: {named}, whose layout is not known; expected one of {known}, or the names "
        f"of diffusers for {folder}; found {some(file.tensors) or 'no tensors'}",
        fields=("config",),
    )
