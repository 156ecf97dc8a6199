"""Loading packed text encoders in transformers: the quantizer that ``from_pretrained`` calls.

transformers builds the model on the meta device, renames the tensors of the files to its own names,
and sets them one by one. Layers are replaced before that, and codes and scales keep their dtype.
"""

import itertools
import weakref
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import __version__ as transformers_version
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from quantkit.checkpoint.spec import PACKED_PARTS, QUANT_METHOD
from quantkit.errors import CheckpointError, InputError
from quantkit.inference.layers.packed_layer import PackedLayer, bare
from quantkit.inference.loading import dequantizing, model_methods
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
from quantkit.models.encoder_skeleton import encoder_skeleton, loaded_names
from quantkit.models.skeleton import some
from quantkit.storage.digest import Hashing

#: The first transformers whose loader works as described above.
TRANSFORMERS = 5


class QuantkitConfig(CarriedConfig, QuantizationConfigMixin):  # type: ignore[misc]  # untyped base
    """The ``quantization_config`` of a packed text encoder, as transformers carries it."""


class QuantkitQuantizer(HfQuantizer):  # type: ignore[misc]  # untyped base
    """Replaces the layers that the schemes name, and sees that all of them were filled."""

    def __init__(self, quantization_config: QuantkitConfig, **kwargs: Any) -> None:
        refuse_unpacked(kwargs)
        if int(transformers_version.partition(".")[0]) < TRANSFORMERS:
            raise InputError(
                f"transformers {transformers_version}: packed text encoders want {TRANSFORMERS} or "
                "newer; upgrade transformers, or use the 16-bit text encoder"
            )
        super().__init__(quantization_config, **kwargs)
        self.packed = quantization_config.packed
        #: the dtype of float tensors other than codes; set while loading
        self.compute_dtype: torch.dtype | None = None
        #: the files that the tensors came from, kept for saving
        self.files: tuple[Path, ...] = ()
        #: the model's names of their tensors
        self.names: dict[str, str] = {}
        self._device = torch.device("cpu")
        self._layers: dict[str, PackedLayer] = {}
        #: of the model's tensors, as it was built
        self._dtypes: dict[str, torch.dtype] = {}
        self._ahead = ReadAhead({})
        self._hashing = Hashing(())

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """Refuse disk offload."""
        del args
        self._device = device_of(kwargs.get("device_map")) or self._device

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the compute dtype; ``auto`` may have found that of codes."""
        found = default_dtype(self._device) if dtype.itemsize == 1 else dtype
        self.compute_dtype = check_dtype(found, "from_pretrained")
        return self.compute_dtype

    def _process_model_before_weight_loading(self, model: nn.Module, **kwargs: Any) -> None:
        self.files = tuple(Path(file) for file in kwargs.get("checkpoint_files") or ())
        if not self.files:
            raise InputError("a packed text encoder is loaded from its directory: from_pretrained")
        component = check_component(self.files[0].parent, model, encoder_skeleton)
        self._ahead = read_ahead(component, self._device)
        self._hashing = hash_component(component, besides=self._ahead.names)
        weakref.finalize(self, self._ahead.cancel)
        weakref.finalize(self, self._hashing.cancel)
        self._dtypes = {name: tensor.dtype for name, tensor in model.state_dict().items()}
        schemes = self.packed.layers
        weights = loaded_names(model, [f"{name}.weight" for name in schemes])
        self._layers = replace_layers(
            model,
            (
                (name, weights[f"{name}.weight"].removesuffix(".weight"), scheme)
                for name, scheme in schemes.items()
            ),
            _widened(model, self.compute_dtype),
        )
        for path, layer in self._layers.items():
            # Tensors are set by their names in the files, the codes as ``weight``.
            model.set_submodule(path, bare(layer))
        self.names = loaded_names(model, component.tensors)

    def get_new_dtype(
        self, converter: Any, param: Any, dtype: torch.dtype | None
    ) -> torch.dtype | None:
        """Return None, no cast, for codes: T5 asks for all of ``wo`` in float32."""
        name = str(param.get_dtype() if hasattr(param, "get_dtype") else param.dtype)
        is_code = "F8" in name or "float8" in name
        new: torch.dtype | None = super().get_new_dtype(converter, param, dtype)
        return None if is_code else new

    def _process_model_after_weight_loading(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        del kwargs
        empty = [
            f"{name}.{part}"
            for name, layer in self._layers.items()
            for part, tensor in _parts(layer)
            if not getattr(tensor, "_is_hf_initialized", False)
        ]
        if empty:
            raise CheckpointError(f"{self.files[0].parent}: not loaded as packed: {some(empty)}")
        stored = {name: file_name for file_name, name in self.names.items()}
        for path, layer in self._layers.items():
            for part, tensor in _parts(layer):
                name = stored.get(f"{path}.{part}", "")
                layer.fill(part, self._own(name, tensor.detach()))
            model.set_submodule(path, layer)
        self._layers = {}
        self._cast(model)
        self._hashing.join()
        self._hashing = Hashing(())
        model_methods.install(model)
        return model

    def _cast(self, model: nn.Module) -> None:
        """Cast tensors that are no codes: transformers before 5.21 skips those it renames."""
        is_wide = _widened(model, self.compute_dtype)
        for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
            built = self._dtypes.get(name)
            if built is not None and tensor.is_floating_point():
                tensor.data = tensor.data.to(torch.float32 if is_wide(name) else built)

    def _own(self, name: str, value: Tensor) -> Tensor:
        """Return a copy of the tensor that transformers has set."""
        found = self._ahead.take(name)
        if found is not None:
            return found.to(value.device)
        # A mapped file is not aligned as kernels want it, and may be replaced.
        return value.clone() if value.device.type == "cpu" else value

    def dequantize(self, model: Any, dtype: torch.dtype | None = None) -> Any:
        """Return the model with dense layers, in ``dtype`` or the one that it computes in.

        Not the base class's, which takes the dtype that it was loaded in.

        Raises:
            InputError: weights are offloaded.
        """
        dense: Any = dequantizing.dequantize(model)
        self.remove_quantization_config(dense)
        return dense if dtype is None else dense.to(dtype)

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
    """Add "quantkit" to the tables of ``transformers.quantizers.auto``."""
    module.AUTO_QUANTIZATION_CONFIG_MAPPING[QUANT_METHOD] = QuantkitConfig
    module.AUTO_QUANTIZER_MAPPING[QUANT_METHOD] = QuantkitQuantizer


def _widened(model: Any, dtype: torch.dtype | None) -> Callable[[str], object]:
    """Return a predicate for tensors that transformers keeps in float32, as T5's ``wo``."""
    from transformers.core_model_loading import build_glob_alternation

    names = list(model._get_dtype_plan(dtype))  # noqa: SLF001  what its loader asks
    return build_glob_alternation(names)[0].search if names else lambda _: False


def _parts(layer: PackedLayer) -> list[tuple[str, Tensor]]:
    """Return the tensors of a packed layer, its bias left out."""
    parts = ((part, layer.part(part)) for part in PACKED_PARTS)
    return [(part, tensor) for part, tensor in parts if tensor is not None]
