"""The exceptions of quantkit. Every text is one line: where, what, found, expected, cure.

A text names arguments as Python has them, without dashes. Those that would cure the fault are in
``fields`` too, so that the command line can say which options they are.

QuantkitError
|-- InputError            the user's input cannot be used: exit code 2, nothing written
|   |-- ModelError            not a diffusers directory, no weights, an unknown family
|   |-- NonFiniteError        NaN or Inf in a named tensor
|   |-- ShapeError            a dimension that does not divide, shapes that do not agree
|   |-- RecipeError           an unknown key, a value out of range
|   |-- ArtefactError         a calibration or mask file that is damaged or for another model
|   |-- CheckpointError       a packed checkpoint that breaks a rule of FORMAT.md
|   |-- PromptError           a prompt file that is empty or not UTF-8
|   `-- OutputError           the output exists, or cannot be written
`-- KernelError           a kernel that cannot be built or run here
`-- CompilerMissingError  no compiler for the target on this machine
"""

from collections.abc import Sequence


class QuantkitError(Exception):
    """Base of everything that quantkit raises on purpose."""

    #: of the command line
    exit_code = 1

    def __init__(self, text: str = "", *, fields: Sequence[str] = ()) -> None:
        super().__init__(text)
        #: names of the arguments to give, to change or to drop
        self.fields = tuple(fields)


class InputError(QuantkitError):
    """The user's input cannot be used; nothing was written."""

    exit_code = 2


class ModelError(InputError):
    """The model directory is not what it should be."""


class NonFiniteError(InputError):
    """NaN or Inf where numbers were expected."""


class ShapeError(InputError):
    """A dimension does not divide, or shapes do not agree."""


class RecipeError(InputError):
    """The recipe has an unknown key or a value out of range."""


class ArtefactError(InputError):
    """A calibration or mask file is damaged or belongs to another model."""


class CheckpointError(InputError):
    """A packed checkpoint breaks a rule of FORMAT.md."""


class PromptError(InputError):
    """The prompt file is empty or not UTF-8."""


class OutputError(InputError):
    """The output exists already, or cannot be written."""


class KernelError(QuantkitError):
    """A kernel cannot be built or run here."""


class CompilerMissingError(KernelError):
    """No compiler for the target is on this machine."""
