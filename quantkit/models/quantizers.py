"""Other tools that quantize diffusers pipelines: their names and requirements."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from quantkit.errors import ModelError

#: The key of config.json under which diffusers and transformers find how weights are stored.
CONFIG_KEY = "quantization_config"


@dataclass(frozen=True)
class Quantizer:
    """A tool that quantized a component, and whose own code computes it."""

    name: str
    #: pip requirement, with the oldest version that diffusers or its files work with
    requirement: str
    #: imported before loading: some register with transformers by that
    module: str
    #: keys of quantization_config that say what was done; "a:b" is b where a is set
    settings: tuple[str, ...]
    #: diffusers refuses to load it for a CPU; transformers may not
    needs_gpu: bool = False
    #: runs in the dtype of the tensors that stayed in 16 bit alone: torchao's products want it, and
    #: transformers leaves the embeddings of bitsandbytes' models in it whatever it is asked for
    own_dtype: bool = False

    @property
    def package(self) -> str:
        """The requirement without its version."""
        return self.requirement.partition(">=")[0]

    @property
    def version(self) -> str:
        """The installed version; empty when nothing is installed."""
        try:
            return version(self.package)
        except PackageNotFoundError:
            return ""


#: By quant_method. GGUF has no config: its files are recognized by themselves.
QUANTIZERS: dict[str, Quantizer] = {
    "sdnq": Quantizer(
        "SDNQ", "sdnq>=0.2.2", "sdnq",
        ("weights_dtype", "group_size", "quant_conv", "use_quantized_matmul",
         "use_quantized_matmul:quantized_matmul_dtype", "use_svd:svd_rank",
         "use_hadamard:hadamard_group_size", "use_codebook"),
    ),
    "torchao": Quantizer(
        "torchao", "torchao>=0.16", "torchao", ("quant_type",), own_dtype=True
    ),
    "bitsandbytes": Quantizer(
        "bitsandbytes", "bitsandbytes>=0.43.3", "bitsandbytes",
        ("load_in_8bit", "load_in_4bit:bnb_4bit_quant_type", "load_in_4bit:bnb_4bit_compute_dtype",
         "load_in_4bit:bnb_4bit_use_double_quant"),
        needs_gpu=True, own_dtype=True,
    ),
    "quanto": Quantizer(
        "optimum-quanto", "optimum-quanto>=0.2.6", "optimum.quanto", ("weights_dtype",)
    ),
    "gguf": Quantizer("GGUF", "gguf>=0.17", "gguf", ("types",)),
    "compressed-tensors": Quantizer(
        "compressed-tensors", "compressed-tensors>=0.15", "compressed_tensors", ("format",)
    ),
    "modelopt": Quantizer(
        "ModelOpt", "nvidia-modelopt", "modelopt", ("quant_type", "weight_only")
    ),
    "auto-round": Quantizer(
        "AutoRound", "auto-round>=0.13", "auto_round", ("bits", "group_size", "sym")
    ),
    "nunchaku_lite": Quantizer(
        "Nunchaku Lite", "kernels", "kernels", ("svdq_w4a4", "awq_w4a16"), needs_gpu=True
    ),
}  # fmt: skip


def find_quantizer(entry: object, config: Path) -> Quantizer:
    """Return the tool that a quantization_config names.

    Args:
        entry: the value of the key.
        config: the file that it is from.

    Raises:
        ModelError: no object, or of a tool that is not in ``QUANTIZERS``.
    """
    if not isinstance(entry, Mapping):
        raise ModelError(
            f"{config}: {CONFIG_KEY} is a {type(entry).__name__}, expected an object with "
            "quant_method; save the model again with the tool that quantized it"
        )
    method = entry.get("quant_method")
    if method is None and (entry.get("load_in_4bit") or entry.get("load_in_8bit")):
        # What bitsandbytes wrote before it had a quant_method; diffusers takes these, too.
        method = "bitsandbytes"
    if not isinstance(method, str) or method not in QUANTIZERS:
        found = "no quant_method" if method is None else f"quant_method {method!r:.60}"
        raise ModelError(f"{config}: {found}, expected one of {', '.join(QUANTIZERS)}")
    return QUANTIZERS[method]


def name_quantizer(entry: object) -> str:
    """Return the name in messages of the tool of a quantization_config, known or not."""
    method = entry.get("quant_method") if isinstance(entry, Mapping) else None
    known = QUANTIZERS.get(method) if isinstance(method, str) else None
    return known.name if known else str(method or "an unnamed method")


def require_package(quantizer: Quantizer, path: Path) -> None:
    """Refuse what cannot be loaded here for want of the tool's package.

    Args:
        quantizer: the tool.
        path: what it quantized, for the message.

    Raises:
        ModelError: it is not installed, or too old.
    """
    from packaging.requirements import Requirement

    found, expected = quantizer.version, quantizer.requirement
    if not found:
        raise ModelError(
            f"{path}: quantized by {quantizer.name}, whose package {quantizer.package} is not "
            f"installed; pip install '{expected}'"
        )
    if not Requirement(expected).specifier.contains(found, prereleases=True):
        raise ModelError(
            f"{path}: quantized by {quantizer.name}, found {quantizer.package} {found}, expected "
            f"{expected}; pip install -U '{expected}'"
        )


def settings_of(quantizer: Quantizer, entry: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Return the settings of the weights' quantization, by key; keys that are off are left out."""
    found = []
    for setting in quantizer.settings:
        switch, _, key = setting.rpartition(":")
        value = entry.get(key)
        if value is not None and value is not False and entry.get(switch or key) is not False:
            found.append((key, _words(value)))
    return tuple(found)


def _words(value: object) -> str:
    """Return a value of another tool's config in a few words, on one line."""
    if isinstance(value, Mapping):
        # torchao's: {"default": {"_type": "Int8WeightOnlyConfig", "_data": {...}}}
        if isinstance(value.get("_type"), str):
            return _words(value["_type"])
        parts = [_words(v) if k == "default" else f"{k} {_words(v)}" for k, v in value.items()]
        return _words(", ".join(parts))
    text = str(value)
    return (text if text.isprintable() else repr(text))[:80]
