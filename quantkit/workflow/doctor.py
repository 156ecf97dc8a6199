"""A report on this machine: devices, compilers, and the backend of each operation or layer."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quantkit.device.survey import Survey, survey
from quantkit.inference.attention.attention_choices import AttentionChoice, attention_choices
from quantkit.inference.layers.layer_choices import LayerChoice, layer_choices
from quantkit.pipelines.running import choose_device
from quantkit.workflow.inspect import require_packed


@dataclass(frozen=True)
class Examination:
    """The survey of this machine, and of a packed directory's layers on it."""

    survey: Survey
    #: empty: no directory was given
    layers: tuple[LayerChoice, ...]
    #: of the components whose config asks for attention on codes
    attention: tuple[AttentionChoice, ...] = ()

    def __repr__(self) -> str:
        """Return the devices, and how many layers run on a kernel."""
        kernels = sum(layer.runs_on_kernel for layer in self.layers)
        found = self.survey
        lines = [found.headline.text, f"torch {found.torch_version}", *found.devices]
        if self.layers:
            lines.append(f"{kernels} of {len(self.layers)} packed layers run on a kernel")
        if self.attention:
            kernels = sum(module.runs_on_kernel for module in self.attention)
            lines.append(f"{kernels} of {len(self.attention)} attention modules run on a kernel")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        found = self.survey
        return {
            "headline": found.headline.text,
            "fine": found.headline.fine,
            "torch": found.torch_version,
            "devices": list(found.devices),
            "gpus": [asdict(gpu) for gpu in found.gpus],
            "tools": [asdict(tool) for tool in found.tools],
            "cache": str(found.cache),
            "cache_bytes": found.cache_bytes,
            "cache_limit": found.cache_limit,
            "operations": [
                {
                    "op": o.op,
                    "device": o.device,
                    "backend": o.backend,
                    "reason": o.choice.reason,
                }
                for o in found.operations
            ],
            "layers": [asdict(layer) for layer in self.layers],
            "attention": [asdict(module) for module in self.attention],
        }


def examine(packed: str | Path | None = None, *, device: str = "auto") -> Examination:
    """Survey devices, compilers and caches, and the backend of each operation with its reason.

    Args:
        packed: a packed directory, to say the same of each of its layers and attention modules;
            None: of none.
        device: where its layers would run; auto is cuda if there is one.

    Returns:
        what was found.

    Raises:
        CheckpointError: ``packed`` is not packed, or breaks a rule.
        ModelError: the device is not on this machine.
    """
    place = choose_device(device)
    if packed is None:
        return Examination(survey(), ())
    opened = require_packed(packed)
    return Examination(survey(), layer_choices(opened, place), attention_choices(opened, place))
