"""Denoisers without weights, in 16 bit and packed: shapes alone, on a card that is not here."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from quantkit.bench.estimate.tracing import Trace, trace
from quantkit.bench.kernels.kernel_benchmark import REFUSALS, one_line
from quantkit.bench.models.denoiser_inputs import make_inputs
from quantkit.bench.models.denoisers import Denoiser
from quantkit.bench.models.model_contenders import ModelContender
from quantkit.bench.models.model_result import ModelBenchSettings
from quantkit.bench.models.packed_copies import PackedVariant, Source
from quantkit.checkpoint.packed_attention import HeadShape, PackedAttention
from quantkit.device.archs import Arch
from quantkit.device.backends import fast_sums
from quantkit.device.choosing import supposing
from quantkit.errors import ModelError
from quantkit.fusion.fuse import with_patterns
from quantkit.fusion.patterns.channels_last import laid_out, reads_pixels, with_picture_calls
from quantkit.fusion.program import Program
from quantkit.fusion.simplify import simplify
from quantkit.inference.attention import coded_attention, coded_projections
from quantkit.inference.attention.head_factors import fix_factors
from quantkit.inference.layers import head_scales
from quantkit.inference.loading import installing
from quantkit.inference.loading.quantizing import replace_layers
from quantkit.models.attention_modules import attention_modules, why_kept
from quantkit.models.component_layers import list_layers
from quantkit.models.layer_plan import plan_layers
from quantkit.models.source import Component, open_model
from quantkit.pipelines.running import quiet_libraries
from quantkit.progress import silent

#: safetensors' names of the dtypes that denoisers are built in.
_DTYPES = {torch.float16: "F16", torch.float32: "F32"}
#: Where tensors of a FakeTensorMode say that they are.
_DEVICE = torch.device("cuda")
_NOWHERE = torch.device("meta")


@dataclass(frozen=True)
class Traced:
    """A contender's step."""

    contender: ModelContender
    trace: Trace
    #: of a replayed step, before row kernels; None for others, and where every call is kept
    program: Program | None
    #: of parameters and buffers
    weight_bytes: int


def trace_contender(
    denoiser: Denoiser, contender: ModelContender, settings: ModelBenchSettings, arch: Arch
) -> Traced:
    """Return what a step of a contender computes on a target.

    Args:
        denoiser: what to build.
        contender: as it is, or packed.
        settings: batch, size, projections, and from how many keys attention is quantized.
        arch: whose kernels are taken to be there.

    Raises:
        ModelError: the config does not describe such a model, or its inputs are not known.
        RecipeError: nothing of it is packed.
    """
    model = _build(denoiser)
    if contender.variant is not None:
        _pack(model, contender.variant)
    if settings.fuse_projections:
        with _Alike():
            model.fuse_qkv_projections()  # type: ignore[operator]
    static = _head_shapes(model) if contender.attention else {}
    head_scales.install(model, static)
    with FakeTensorMode(allow_non_fake_inputs=True), supposing(arch), torch.no_grad():
        _move(model)
        if contender.attention:
            _quantize_attention(model, contender.attention, settings.min_keys, static)
        inputs = make_inputs(model, settings.batch, settings.size, _DEVICE)
        with (
            as_compiled() if contender.compiled else nullcontext(),
            fast_sums() if contender.fast else nullcontext(),
        ):
            found = _trace(model, inputs, contender, settings)
            shorter = _shorter(found, inputs) if contender.replayed else None
        return Traced(contender, found, shorter, _bytes_of(model))


def _quantize_attention(
    model: nn.Module, qk_format: str, min_keys: int, static: Mapping[str, HeadShape]
) -> None:
    """Let attention multiply codes, of static scales as a packed model has them."""
    coded_attention.install(model, PackedAttention(qk_format, min_keys, static=static))
    with _Alike():
        coded_projections.install(model)
    for name in static:
        module = model.get_submodule(name)
        # What a first step makes, and later ones find.
        if (found := head_scales.scales_of(module)) is not None:
            fix_factors(module, found.scales, qk_format)


@contextmanager
def as_compiled() -> Iterator[None]:
    """Let modules compute what they compute while torch.compile looks at them."""
    usual = torch.compiler.is_compiling
    torch.compiler.is_compiling = lambda: True
    try:
        yield
    finally:
        torch.compiler.is_compiling = usual


def _trace(
    model: nn.Module,
    inputs: dict[str, Any],
    contender: ModelContender,
    settings: ModelBenchSettings,
) -> Trace:
    tensors = _tensors_in(inputs)
    try:
        return trace(lambda: model(**inputs), tensors, keeps=not contender.compiled)
    except (*REFUSALS, LookupError, ArithmeticError) as error:
        where = f"--batch {settings.batch} and --size {settings.size}"
        raise ModelError(
            f"{type(model).__name__}: no step runs at {where} with inputs that follow from its "
            f"forward and config: {one_line(error)}"
        ) from error


def _shorter(trace: Trace, inputs: dict[str, Any]) -> Program | None:
    """Return the program that replays a step; None where it cannot be recorded."""
    if trace.reason:
        return None
    program = simplify(trace.program)
    if reads_pixels(program):
        program, _ = laid_out(with_picture_calls(program), _tensors_in(inputs))
    return with_patterns(program)


def _tensors_in(inputs: dict[str, Any]) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]


def _move(model: nn.Module) -> None:
    """Let a model's tensors say that they are on a GPU: how it computes depends on it."""
    moved: dict[Tensor, Tensor] = {}
    for module in model.modules():
        for table in (module._parameters, module._buffers):  # noqa: SLF001  not all are to be had by name
            for name, tensor in table.items():
                if tensor is not None:
                    if tensor not in moved:
                        moved[tensor] = _like(tensor)
                    table[name] = moved[tensor]  # type: ignore[assignment]


def _like(tensor: Tensor) -> Tensor:
    made = torch.empty(tensor.shape, dtype=tensor.dtype, device=_DEVICE)
    is_parameter = isinstance(tensor, nn.Parameter)
    return nn.Parameter(made, requires_grad=False) if is_parameter else made


class _Alike(TorchFunctionMode):
    """Says that tensors of one shape are equal: they hold no numbers, as scales of one input."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        del types
        if func is torch.equal:
            return args[0].shape == args[1].shape
        return func(*args, **(kwargs or {}))


def _build(denoiser: Denoiser) -> nn.Module:
    import diffusers

    build: Any = getattr(diffusers, denoiser.class_name).from_config
    try:
        with quiet_libraries(), _in_float16(), _NOWHERE:
            model: nn.Module = build(dict(denoiser.config))
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{denoiser.source}: {one_line(error)}") from error
    return model.eval().requires_grad_(False)


@contextmanager
def _in_float16() -> Iterator[None]:
    usual = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float16)
        yield
    finally:
        torch.set_default_dtype(usual)


def _pack(model: nn.Module, variant: PackedVariant) -> None:
    """Put empty packed layers in place, those that packing such a model makes."""
    with TemporaryDirectory(prefix="quantkit-estimate-") as folder:
        _write_headers(model, Path(folder))
        (component,) = open_model(folder).components
        recipe = Source(Path(folder), model, lambda: None, silent).recipe(variant)
        plans = plan_layers(component, recipe, calibrated=True, masked=_masked(component, recipe))
    schemes = ((p.layer.name, p.layer.name, p.scheme) for p in plans if p.scheme is not None)
    replace_layers(model, schemes)
    model.eval()
    with _Alike():
        installing.install(model)


def _masked(component: Component, recipe: Any) -> list[str]:
    return [n.name for n in list_layers(component) if recipe.settings(n.name).sparse]


def _write_headers(model: nn.Module, folder: Path) -> None:
    """Write a component's config and the header of its weights, which are a hole in the file."""
    model.save_config(folder)  # type: ignore[operator]
    table, end = dict[str, Any](), 0
    for name, tensor in model.state_dict().items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        kind = _DTYPES.get(tensor.dtype, "I64")
        table[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [start, end]}
    header = json.dumps(table).encode()
    header += b" " * (-len(header) % 8)
    with (folder / "diffusion_pytorch_model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + end)


def _head_shapes(model: nn.Module) -> dict[str, HeadShape]:
    """Return the heads that a calibrated model has static scales of."""
    return {
        name: HeadShape(module.heads, module.inner_dim // module.heads)
        for name, module in attention_modules(model)
        if not why_kept(module.processor) and hasattr(module, "inner_dim")
    }


def _bytes_of(model: nn.Module) -> int:
    tensors: list[Tensor] = [*model.parameters(), *model.buffers()]
    return sum(t.numel() * t.element_size() for t in tensors)
