"""Whether two packed pipelines load as one model: every tensor, config and component."""

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

#: Entries that name the folder.
_PLACES = {"_name_or_path", "name_or_path", "vocab_file", "merges_file", "tokenizer_file"}


def fingerprint(folder: Path) -> dict[str, str]:
    """Return component -> digest of all that decides what it computes, loaded as by default."""
    import quantkit

    pipe = quantkit.load_pipeline(folder)
    found = {name: _digest(component) for name, component in pipe.components.items()}
    return {"": _text_digest([type(pipe).__name__, _plain(dict(pipe.config))]), **found}


def differences(one: dict[str, str], other: dict[str, str]) -> str:
    """Return the components that differ."""
    names = sorted(n for n in one.keys() | other.keys() if one.get(n) != other.get(n))
    return ", ".join(name or "the pipeline" for name in names)


def _digest(component: Any) -> str:
    import torch

    if component is None:
        return "none"
    about = [type(component).__name__, _config(component)]
    if isinstance(component, torch.nn.Module):
        about += [_layers(component), _tensors(component)]
    return _text_digest(about)


def _config(component: Any) -> Any:
    backend = getattr(component, "backend_tokenizer", None)
    if backend is not None:
        settings = {**component.init_kwargs, "longest": component.model_max_length}
        return [_plain(settings), backend.to_str()]
    config = getattr(component, "config", {})
    return _plain(config.to_dict() if hasattr(config, "to_dict") else dict(config))


def _layers(model: Any) -> list[str]:
    from quantkit.inference.layers.layer_summary import iterate_packed

    return [f"{name} {layer.scheme!r}" for _, name, layer in iterate_packed(model)]


def _tensors(model: Any) -> list[str]:
    import torch

    rows = []
    for path, module in model.named_modules():
        # Attributes, too: a packed layer's parts need be neither parameters nor buffers.
        own = {**vars(module), **module._parameters, **module._buffers}
        for name, value in sorted(own.items()):
            if isinstance(value, torch.Tensor):
                data = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
                digest = sha256(data.data).hexdigest()
                rows.append(f"{path}.{name} {value.dtype} {tuple(value.shape)} {digest}")
    return rows


def _plain(values: Any) -> Any:
    if isinstance(values, dict):
        return {str(k): _plain(v) for k, v in values.items() if k not in _PLACES}
    if isinstance(values, list | tuple):
        return [_plain(value) for value in values]
    return values if isinstance(values, int | float | bool | None) else str(values)


def _text_digest(value: Any) -> str:
    return sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def tree_digest(folder: Path) -> dict[str, str]:
    """Return file -> SHA-256 of its bytes."""
    return {
        str(path.relative_to(folder)): sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
