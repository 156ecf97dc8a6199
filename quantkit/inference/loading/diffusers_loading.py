"""Loading packed components in diffusers: the quantizer that ``from_pretrained`` calls.

diffusers builds the model on the meta device, then calls this: layers are replaced, and a packed
tensor is taken from the uncast state dict, because the value that diffusers passes was cast to the
compute dtype before (float32 scales rounded, e5m2 codes destroyed).
"""

import weakref
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from diffusers.configuration_utils import FrozenDict
from diffusers.quantizers.base import DiffusersQuantizer
from diffusers.quantizers.quantization_config import QuantizationConfigMixin
from torch import Tensor, nn

from quantkit.checkpoint.spec import PACKED_PARTS, QUANT_METHOD
from quantkit.errors import CheckpointError, InputError
from quantkit.inference.layers import head_scales
from quantkit.inference.loading import dequantizing, installing
from quantkit.inference.loading.checksums import hash_component
from quantkit.inference.loading.component_checks import check_component
from quantkit.inference.loading.pipeline_dtype import check_dtype, default_dtype
from quantkit.inference.loading.quantizing import (
    CarriedConfig,
    device_of,
    refuse_unpacked,
    replace_layers,
)
from quantkit.inference.loading.read_ahead import ReadAhead, read_ahead
from quantkit.models.quantizers import CONFIG_KEY
from quantkit.models.skeleton import some
from quantkit.storage.digest import Hashing

#: As pyproject.toml asks for; before 0.39 a quantizer is not told the weight files.
DIFFUSERS = "0.40"


class QuantkitConfig(CarriedConfig, QuantizationConfigMixin):  # type: ignore[misc]  # untyped base
    """The ``quantization_config`` of a packed component, as diffusers carries it."""


class QuantkitQuantizer(DiffusersQuantizer):  # type: ignore[misc]  # untyped base
    """Replaces the layers that the schemes name, fills them, counts them."""

    use_keep_in_fp32_modules = True

    def __init__(self, quantization_config: QuantkitConfig, **kwargs: Any) -> None:
        refuse_unpacked(kwargs)
        super().__init__(quantization_config, **kwargs)
        self.packed = quantization_config.packed
        #: the dtype of float tensors other than codes; set while loading
        self.compute_dtype: torch.dtype | None = None
        #: the files that the tensors came from, kept for saving
        self.files: tuple[Path, ...] = ()
        self._device = torch.device("cpu")
        self._expected: frozenset[str] = frozenset()
        self._filled: set[str] = set()
        self._ahead = ReadAhead({})
        self._hashing = Hashing(())

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """Refuse disk offload; diffusers calls this before and after it knows the device map."""
        del args
        self._device = device_of(kwargs.get("device_map")) or self._device

    def update_torch_dtype(self, torch_dtype: torch.dtype | None) -> torch.dtype:
        """Return the compute dtype: what was asked for, else the default of the device."""
        if torch_dtype is None:
            torch_dtype = default_dtype(self._device)
        self.compute_dtype = check_dtype(torch_dtype, "from_pretrained")
        return self.compute_dtype

    def maybe_update_loaded_keys(
        self, loaded_keys: list[str], checkpoint_files: list[str]
    ) -> list[str]:
        """Remember the files; they are checked when the model's shapes are known."""
        self.files = tuple(Path(file) for file in checkpoint_files)
        return loaded_keys

    def _process_model_before_weight_loading(self, model: nn.Module, **kwargs: Any) -> None:
        wide = frozenset(kwargs.get("keep_in_fp32_modules") or ())
        if not self.files:
            raise InputError(
                "a packed component is loaded from its directory: use from_pretrained, not "
                f"from_single_file, with diffusers {DIFFUSERS} or newer"
            )
        component = check_component(self.files[0].parent, model)
        self._ahead = read_ahead(component, self._device)
        self._hashing = hash_component(component, besides=self._ahead.names)
        # A load that fails elsewhere needs no more of them.
        weakref.finalize(self, self._ahead.cancel)
        weakref.finalize(self, self._hashing.cancel)
        schemes = self.packed.layers.items()
        layers = replace_layers(
            model,
            ((name, name, scheme) for name, scheme in schemes),
            lambda tensor: not wide.isdisjoint(tensor.split(".")),
        )
        parts = {
            f"{name}.{part}"
            for name, layer in layers.items()
            for part in PACKED_PARTS
            if layer.part(part) is not None
        }
        if self.packed.attention is not None:
            parts |= head_scales.install(model, self.packed.attention.static)
        self._expected = frozenset(parts)

    def update_missing_keys(
        self, model: nn.Module, missing_keys: list[str], prefix: str
    ) -> list[str]:
        """Refuse a file that lacks tensors of the model; diffusers would leave them empty."""
        del model, prefix
        if missing_keys:
            raise CheckpointError(
                f"{self.files[0].parent}: lacks {some(missing_keys)}; pack the model again"
            )
        return missing_keys

    def check_if_quantized_param(
        self, model: nn.Module, param_value: Tensor, param_name: str, *args: Any, **kwargs: Any
    ) -> bool:
        """Tell whether the tensor belongs to a packed layer (its bias does not)."""
        del model, param_value, args, kwargs
        return param_name in self._expected

    def check_quantized_param_shape(
        self, param_name: str, current_param: Tensor, loaded_param: Tensor
    ) -> bool:
        """Refuse a tensor of another shape, but for the axes that ``PackedLayer.fill`` adds.

        Raises:
            CheckpointError: naming both shapes.
        """
        if param_name.endswith(".weight") and current_param.numel() == loaded_param.numel():
            return True
        raise CheckpointError(
            f"{self.files[0].parent}: {param_name}: shape {list(loaded_param.shape)}, expected "
            f"{list(current_param.shape)}; pack the model again"
        )

    def create_quantized_param(
        self,
        model: nn.Module,
        param_value: Tensor,
        param_name: str,
        target_device: str | int | torch.device,
        state_dict: dict[str, Tensor],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Put the uncast tensor into its layer."""
        del param_value, args, kwargs
        name, _, part = param_name.rpartition(".")
        layer: Any = model.get_submodule(name)
        value = self._ahead.take(param_name)
        if value is None:
            # A copy, also on the CPU: kernels want aligned operands, which a mapped file need not
            # give, and a mapped file that is replaced later takes the weights with it.
            value = state_dict[param_name].to(target_device, copy=True)
        assert value.dtype == layer.part(part).dtype, "the headers were checked"
        layer.fill(part, value.to(target_device))
        self._filled.add(param_name)

    def _process_model_after_weight_loading(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        del kwargs
        if self._expected != self._filled:
            raise CheckpointError(
                f"{self.files[0].parent}: not loaded as packed: "
                f"{some(self._expected - self._filled)}; load without offload_state_dict"
            )
        self._hashing.join()
        self._hashing = Hashing(())
        # Says to diffusers that to(dtype) may be called: packed layers keep their codes themselves.
        model.is_quantized = False  # type: ignore[assignment]  # ModelMixin's own attribute
        installing.install(model, self.packed.attention)
        return model

    def _dequantize(self, model: Any) -> nn.Module:
        dequantizing.dequantize(model)
        config = {key: value for key, value in model.config.items() if key != CONFIG_KEY}
        model._internal_dict = FrozenDict(config)  # noqa: SLF001  where ConfigMixin keeps it
        dense: nn.Module = model
        return dense

    def get_state_dict_and_metadata(
        self,
        state_dict: dict[str, Tensor],
        safe_serialization: bool = False,  # noqa: FBT001, FBT002  diffusers' signature
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Refuse: ``model.save_pretrained`` copies the files and does not call this.

        Raises:
            InputError: always.
        """
        del state_dict, safe_serialization
        raise InputError("save_pretrained: a packed model is saved with model.save_pretrained(dir)")

    @property
    def is_serializable(self) -> bool:
        """True: see ``saving``."""
        return True

    @property
    def is_trainable(self) -> bool:
        """False: codes have no gradient."""
        return False

    @property
    def is_compileable(self) -> bool:
        """True: the operators have fake implementations."""
        return True


def register(module: ModuleType) -> None:
    """Add "quantkit" to the tables of ``diffusers.quantizers.auto``."""
    module.AUTO_QUANTIZATION_CONFIG_MAPPING[QUANT_METHOD] = QuantkitConfig
    module.AUTO_QUANTIZER_MAPPING[QUANT_METHOD] = QuantkitQuantizer
