"""Weights in pickles, which quantkit never opens: a pickle may run code, and hides NaN."""

from pathlib import Path

from quantkit.errors import ModelError
from quantkit.storage.copying import is_pickle

#: Libraries whose classes stand at their root; others are folders of diffusers.pipelines.
_LIBRARIES = ("diffusers", "transformers")


def refuse_only_pickles(folder: Path, library: str, class_name: str) -> None:
    """Refuse a component whose weights are all pickles.

    Args:
        folder: of the component.
        library: of its class, as model_index.json has it.
        class_name: what loads it.

    Raises:
        ModelError: with the command that writes them as safetensors.
    """
    if any(folder.glob("*.safetensors")):
        return
    found = sorted(file.name for file in folder.iterdir() if is_pickle(file))
    if not found:
        return
    module = library if library in _LIBRARIES else f"diffusers.pipelines.{library}"
    raise ModelError(
        f"{folder}: only pickled weights ({found[0]}), which are never opened; write them as "
        f'safetensors, if you trust them: python -c "from {module} import {class_name} as M; '
        f"M.from_pretrained('{folder}').save_pretrained('{folder}')\""
    )
