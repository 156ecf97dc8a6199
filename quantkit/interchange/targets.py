"""Capabilities of other programs' files: formats, scales and inputs that they can hold."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from quantkit.interchange.denoiser import Denoiser
from quantkit.interchange.layer_codes import are_powers_of_two
from quantkit.numerics.formats import NumberFormat
from quantkit.numerics.granularity import PerChannel, PerGroup
from quantkit.numerics.scheme import Activation, Scheme

_CONVOLUTION = 4


@dataclass(frozen=True)
class Target:
    """The capabilities of a program's files."""

    #: as messages call it
    program: str
    #: of weights: those that are taken over, the first what other formats become; none: weights are
    #: dequantized
    formats: tuple[NumberFormat, ...] = ()
    #: those of them whose inputs the program rotates, as the file says, where a 16-bit model is
    #: quantized on the way
    may_rotate: tuple[NumberFormat, ...] = ()
    #: and those whose inputs it always rotates
    must_rotate: tuple[NumberFormat, ...] = ()
    #: those of them whose weights have one scale, not one for each output channel
    one_scale: tuple[NumberFormat, ...] = ()
    #: a convolution may be quantized
    convolutions: bool = False
    #: an input may have a static scale: any, or powers of two alone
    static: Literal["no", "pow2", "any"] = "no"
    #: the treatment of inputs without a static scale
    inputs: str = ""
    #: the last part of the name of a weight's scale
    scale: str = "weight_scale"
    #: the cure in messages: how to get a model that the files can hold
    cure: str = ""


def obstacles(source: Denoiser, name: str, target: Target) -> Iterator[str]:
    """Yield the properties of a packed weight that a target cannot hold.

    Args:
        source: the packed model.
        name: of the weight.
        target: where it is to go.
    """
    if target.formats:
        yield from _of_input(source, name, target)
        yield from _of_weight(source, name, target)


def held_format(scheme: Scheme, target: Target) -> NumberFormat:
    """Return the format of a weight's codes in a file: its own, or that of whole bytes."""
    own = scheme.weight
    return own if own in target.formats else own.byte_format


def holds_as_convolution(source: Denoiser, name: str, target: Target) -> bool:
    """Tell whether a weight is no convolution, or one of a target that quantizes them."""
    return target.convolutions or len(source.shapes[name]) != _CONVOLUTION


def _of_input(source: Denoiser, name: str, target: Target) -> Iterator[str]:
    scheme = source.schemes[name]
    if scheme.schedule is not None:
        yield "input scales by timestep"
    if scheme.smooth:
        yield "a smoothed input"
    if target.static == "pow2" and _has_odd_input_scale(source, name, scheme):
        yield "a static input scale that is no power of two"


def _has_odd_input_scale(source: Denoiser, name: str, scheme: Scheme) -> bool:
    if scheme.activation is not Activation.STATIC:
        return False
    return not are_powers_of_two(source.part(name, "input_scale"))


def _of_weight(source: Denoiser, name: str, target: Target) -> Iterator[str]:
    scheme = source.schemes[name]
    fmt = held_format(scheme, target)
    if not holds_as_convolution(source, name, target):
        yield "a quantized convolution"
    elif scheme.weight.block or isinstance(scheme.granularity, PerGroup):
        yield f"scales of groups ({scheme.weight.name})"
    elif fmt not in target.formats:
        yield f"format {fmt.name}"
    elif fmt in target.must_rotate:
        yield from _of_rotated(source, name, scheme)
    elif (
        fmt in target.one_scale
        and isinstance(scheme.granularity, PerChannel)
        and not are_powers_of_two(source.part(name, "weight_scale"))
    ):
        yield "scales by channel that are no powers of two"


def _of_rotated(source: Denoiser, name: str, scheme: Scheme) -> Iterator[str]:
    if source.reference is None:
        yield f"{scheme.weight.name} codes of a weight that is not rotated"
    elif scheme.sparsity is not None:
        yield "2:4, which a rotation undoes"
    elif source.reference.corrects_bias([name]):
        yield "a bias that makes up for the rounding of a weight that is not rotated"
