"""Byte-exact saving of a loaded packed component, in any compute dtype.

``save_pretrained`` copies the files that the model was loaded from, after it has seen that the
model still holds what they say. Writing the tensors again could not do it: biases and norms are in
the compute dtype by now, and diffusers cuts shards by its own rule.
"""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from quantkit.checkpoint.filelist import CARD, update_file_list, write_file_list
from quantkit.checkpoint.metadata import METADATA_KEY
from quantkit.errors import CheckpointError, InputError
from quantkit.models.skeleton import some
from quantkit.storage.files import rewritten_file
from quantkit.storage.tensorfile import read_header

#: Ways from the saved value to the present one, besides the cast to the present dtype itself:
#: ``to`` may have been called before, and float16 and bfloat16 do not hold each other's values.
_DETOURS: tuple[tuple[torch.dtype, ...], ...] = (
    (),
    (torch.bfloat16,),
    (torch.float16,),
    (torch.float16, torch.bfloat16),
    (torch.bfloat16, torch.float16),
)

_PUSHED = "push_to_hub=True: call push_to_hub(repository) itself, which saves first"

#: Files that a model reads besides its weights; without the last one nothing here loads it.
_CONFIGS = ("generation_config.json", "config.json")

_SHARD = re.compile(r"-\d{5}-of-\d{5}")


def save_pretrained(  # noqa: PLR0917  diffusers' signature
    self: Any,
    save_directory: str | Path,
    is_main_process: bool = True,  # noqa: FBT001, FBT002  diffusers' signature
    save_function: object = None,
    safe_serialization: bool = True,  # noqa: FBT001, FBT002  diffusers' signature
    variant: str | None = None,
    max_shard_size: int | str | None = None,
    push_to_hub: bool = False,  # noqa: FBT001, FBT002  diffusers' signature
    **kwargs: Any,
) -> None:
    """Write config.json, and the weight files byte for byte as they were loaded.

    Args:
        self: the loaded model.
        save_directory: is made; weight files of an earlier save in it are replaced.
        is_main_process: False writes nothing.
        save_function: unused, as in diffusers.
        safe_serialization: must be True.
        variant: must be the one that the model was loaded with.
        max_shard_size: must be None: shards stay cut as they were.
        push_to_hub: must be False.
        kwargs: must be empty.

    Raises:
        InputError: an option that would need other bytes, or a model that has no files.
        CheckpointError: the model does not hold what the files say any more.
    """
    del save_function
    files: tuple[Path, ...] = self.hf_quantizer.files
    if not files:
        raise InputError(
            f"save_pretrained: {type(self).__name__} was packed in memory, which leaves no files; "
            "save the 16-bit pipeline and run 'quantkit pack DIR -r RECIPE -o OUTPUT', which gives "
            "the same codes"
        )
    loaded = variant_of(files[0])
    refusals = {
        "safe_serialization=False: packed files are safetensors; leave it out": safe_serialization
        is False,
        f"variant={variant!r}: files keep their names; pass variant={loaded!r}": variant != loaded,
        f"max_shard_size={max_shard_size!r}: shards stay as they were cut; leave it out": (
            max_shard_size is not None
        ),
        _PUSHED: push_to_hub,
        f"{', '.join(kwargs)}: unknown; leave it out": any(kwargs.values()),
    }
    for text, refused in refusals.items():
        if refused:
            raise InputError(f"save_pretrained: {text}")
    check_unchanged(self, files)
    if not is_main_process:
        return
    folder = Path(save_directory)
    sources = [*files, *index_of(files)]
    for source in sources:
        _copy(source, folder / source.name)
    _drop_older(folder, {source.name for source in sources}, variant)
    # Last: without it nothing here loads, should the copies have failed.
    if hasattr(self, "save_config"):
        self.save_config(folder)
    else:
        _copy_configs(files[0].parent, folder)
    shards, others = ([Path(f.name) for f in of] for of in (files, index_of(files)))
    configs = [Path(name) for name in _CONFIGS if (folder / name).is_file()]
    update_file_list(folder, [*shards, *others, *configs], shards)


def install_in_pipeline(pipe: Any, source: Path) -> None:
    """Let ``pipe.save_pretrained`` end with card and list of its files, and upload just that.

    Args:
        pipe: a DiffusionPipeline with packed components.
        source: the directory that it was loaded from, whose card is saved, too.
    """
    pipe.save_pretrained = partial(_save_pipeline, pipe, source)
    pipe.push_to_hub = partial(_push_pipeline, pipe)


def _save_pipeline(
    pipe: Any,
    source: Path,
    save_directory: str | Path,
    *args: Any,
    push_to_hub: bool = False,
    **kwargs: Any,
) -> None:
    """Save as diffusers does, then write the list of files.

    Raises:
        InputError: push_to_hub, which would upload before there is a list.
    """
    if push_to_hub:
        raise InputError(f"save_pretrained: {_PUSHED}")
    type(pipe).save_pretrained(pipe, save_directory, *args, **kwargs)
    folder = Path(save_directory)
    packed = [
        path.relative_to(folder)
        for path in sorted(folder.glob("*/*.safetensors"))
        if METADATA_KEY in read_header(path).metadata
    ]
    write_file_list(folder, {}, packed)
    if (source / CARD).is_file():
        _copy(source / CARD, folder / CARD)


def _push_pipeline(  # noqa: PLR0917  diffusers' signature
    pipe: Any,
    repo_id: str,
    commit_message: str | None = None,
    private: bool | None = None,  # noqa: FBT001  diffusers' signature
    token: str | None = None,
    create_pr: bool = False,  # noqa: FBT001, FBT002  diffusers' signature
    **kwargs: Any,
) -> str:
    """Upload what ``save_pretrained`` writes: diffusers would put another card in its place.

    Returns:
        the address of the commit.
    """
    from diffusers.utils import hub_utils

    repository = hub_utils.create_repo(repo_id, private=private, token=token, exist_ok=True).repo_id
    with TemporaryDirectory() as folder:
        pipe.save_pretrained(folder, **kwargs)
        address: str = pipe._upload_folder(  # noqa: SLF001  what diffusers' own push_to_hub calls
            folder, repository, token=token, commit_message=commit_message, create_pr=create_pr
        )
    return address


def check_unchanged(model: nn.Module, files: tuple[Path, ...]) -> None:
    """Refuse a model that its files do not describe any more.

    Raises:
        CheckpointError: other tensors (adapters), or other values.
    """
    where = files[0].parent
    gone = [str(file) for file in files if not file.is_file()]
    if gone:
        raise CheckpointError(
            f"save_pretrained: the files that the model was loaded from are gone: {some(gone)}; "
            "put them back, or load again"
        )
    state, names = model.state_dict(), _names_of(model, files)
    known = {state[name].data_ptr() for name in names.values() if name in state}
    unsaved = state.keys() - names.values()
    # Tied weights are in a file once.
    extra = {name for name in unsaved if state[name].data_ptr() not in known}
    if extra:
        raise CheckpointError(
            f"save_pretrained: {type(model).__name__} has tensors that {where} lacks: "
            f"{some(extra)}; unload adapters before saving (unload_lora_weights), or pack the "
            "changed 16-bit model"
        )
    changed = [
        name
        for name, read in _saved(files)
        if names.get(name) in state and not _holds(state[names[name]], read())
    ]
    if changed:
        raise CheckpointError(
            f"save_pretrained: changed since it was loaded from {where}: {some(changed)}; a packed "
            "model is saved as it was loaded: change the 16-bit model and pack it again"
        )


def _holds(now: Tensor, saved: Tensor) -> bool:
    # The rows of a convolution's codes have two more axes in memory.
    return now.numel() == saved.numel() and same_after_casts(now.reshape(saved.shape), saved)


def _names_of(model: Any, files: tuple[Path, ...]) -> dict[str, str]:
    """Return the model's names of the tensors in its files; transformers renames some."""
    names = {name: name for name, _ in _saved(files)}
    return names | getattr(model.hf_quantizer, "names", {})


def same_after_casts(now: Tensor, saved: Tensor) -> bool:
    """Tell whether ``now`` is ``saved`` after casts among 16 and 32 bit, bit for bit.

    Args:
        now: a tensor of the model, anywhere.
        saved: what the file says; codes (one byte) and integers allow no cast.
    """
    now = now.cpu()
    if now.dtype == saved.dtype and _equal(now, saved):
        return True
    if now.shape != saved.shape or not saved.is_floating_point() or saved.itemsize == 1:
        return False
    for detour in _DETOURS:
        value = saved
        for dtype in detour:
            value = value.to(dtype)
        if _equal(now, value.to(now.dtype)):
            return True
    return False


def _equal(a: Tensor, b: Tensor) -> bool:
    # As bytes: NaN equals itself and -0.0 is not 0.0.
    if a.shape != b.shape:
        return False
    left, right = (t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    return torch.equal(left, right)


def _saved(files: tuple[Path, ...]) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Yield every tensor's name and a function that reads it."""
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  not a dict
                yield name, partial(opened.get_tensor, name)


def variant_of(file: Path) -> str | None:
    """Return "fp16" of diffusion_pytorch_model.fp16(-00001-of-00002).safetensors."""
    parts = _SHARD.sub("", file.name).split(".")
    return parts[1] if len(parts) > 2 else None


def index_of(files: tuple[Path, ...]) -> list[Path]:
    """Return the index that names these files, if one does."""
    names = {file.name for file in files}
    return [
        path
        for path in files[0].parent.glob("*.safetensors.index*.json")
        if set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()) == names
    ]


def _copy(source: Path, target: Path) -> None:
    if target.exists() and target.samefile(source):
        return
    with rewritten_file(target) as stage:
        shutil.copyfile(source, stage)


def _copy_configs(source: Path, folder: Path) -> None:
    """Copy the configs of a text encoder: transformers would write the compute dtype into them."""
    for name in _CONFIGS:
        if (source / name).is_file():
            _copy(source / name, folder / name)


def _drop_older(folder: Path, current: set[str], variant: str | None) -> None:
    """Remove files of an earlier save: an index or a single file would win over the new ones."""
    tag = re.escape(f".{variant}") if variant else ""
    name = re.compile(
        rf"(diffusion_pytorch_)?model({tag}({_SHARD.pattern})?\.safetensors"
        rf"|\.safetensors\.index{tag}\.json)"
    )
    for path in folder.iterdir():
        if name.fullmatch(path.name) and path.name not in current:
            path.unlink()
