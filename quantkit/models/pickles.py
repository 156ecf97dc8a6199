"""Weights in pickles, which quantkit never opens: a pickle may run code, and hides NaN."""

from pathlib import Path

from quantkit.errors import ModelError
from quantkit.storage.copying import is_pickle

#: Libraries whose classes stand at their root; others are folders of diffusers.pipelines.
_LIBRARIES = ("diffusers", "transformers")


def only_pickles(folder: Path, library: str, class_name: str) -> str:
    """Return why a component cannot be read whose weights are all pickles, and the cure.

    Args:
        folder: of the component.
        library: of its class, as model_index.json has it.
        class_name: what loads it.

    Returns:
        empty where there are other weights, or no config that asks for any.
    """
    if not (folder / "config.json").is_file() or any(folder.glob("*.safetensors")):
        return ""
    found = sorted(file.name for file in folder.iterdir() if is_pickle(file))
    if not found:
        return ""
    module = library if library in _LIBRARIES else f"diffusers.pipelines.{library}"
    return (
        f"{folder}: only pickled weights ({found[0]}), which are never opened; write them as "
        f'safetensors, if you trust them: python -c "from {module} import {class_name} as M; '
        f"M.from_pretrained('{folder}').save_pretrained('{folder}')\""
    )


def refuse_only_pickles(folder: Path, library: str, class_name: str) -> None:
    """Refuse a component whose weights are all pickles.

    Raises:
        ModelError: with the command that writes them as safetensors.
    """
    if why := only_pickles(folder, library, class_name):
        raise ModelError(why)
