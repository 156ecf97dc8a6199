"""The quantization scheme of a layer as one value, shared by recipe, file, loader and report."""

from dataclasses import dataclass
from enum import Enum

from quantkit.numerics.formats import NumberFormat
from quantkit.numerics.granularity import Granularity
from quantkit.numerics.masks import Pattern


class Activation(Enum):
    """The quantization of a packed layer's input."""

    #: not at all: the weight is dequantized and multiplied in 16 bit
    NONE = "none"
    #: one calibrated scale per layer (or per timestep bucket)
    STATIC = "static"
    #: one scale per token (row), found at run time
    TOKEN = "token"  # noqa: S105  the field's word, not a password


@dataclass(frozen=True)
class Schedule:
    """The timesteps at which the quantization of an input changes."""

    #: ascending timesteps that split the schedule; empty when one static scale serves all of it
    edges: tuple[float, ...] = ()
    #: the timestep below which each row has a scale of its own; None: there is none
    token_below: float | None = None


@dataclass(frozen=True)
class Scheme:
    """One distinct treatment of layers."""

    weight: NumberFormat
    granularity: Granularity
    sparsity: Pattern | None
    activation: Activation
    #: ascending timesteps that split the schedule; empty when one scale serves all of it
    buckets: tuple[float, ...] = ()
    #: True when the layer carries an input_smooth vector
    smooth: bool = False
    #: of a static input: the timestep below which each row has a scale of its own
    token_below: float | None = None

    @property
    def schedule(self) -> Schedule | None:
        """The timesteps at which the quantization of the input changes; None: it never does."""
        found = Schedule(self.buckets, self.token_below)
        return None if found == Schedule() else found

    @property
    def codes(self) -> NumberFormat:
        """Format of the weight's codes as kernels read them.

        2:4 in int4 is decoded to int8, and so are blocks, whose scales are a separate tensor.
        """
        decoded = self.sparsity is not None or self.weight.block
        return self.weight.byte_format if decoded else self.weight

    @property
    def input(self) -> NumberFormat:
        """Format of the input's codes: kernels multiply floats by floats and integers by int8."""
        return self.weight.byte_format
