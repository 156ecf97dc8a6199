"""Options that several commands share, and how ``--help`` groups them."""

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantkit.recipe.recommended import DEFAULT
from quantkit.storage.limits import MAX_COUNT, MAX_SEED, MAX_STEPS, MAX_THREADS

if TYPE_CHECKING:
    from quantkit.models.source import Model, SingleFile
    from quantkit.recipe.schema import Recipe


class CheckedPath(click.Path):
    """A path that can be looked up: not too long, no loop of links, not in a closed folder."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(
        self,
        value: Any,
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> Any:
        """Return the path, there or not, or fail as click does."""
        path = super().convert(value, param, ctx)
        try:
            os.stat(path)  # noqa: PTH116  of what click made of it
        except (FileNotFoundError, NotADirectoryError):
            return path
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            self.fail(f"{str(value)!r:.100}: {reason}.", param, ctx)
        return path


class Finite(click.types.FloatParamType):
    """A finite number; click's own type accepts nan and inf."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number, or fail as click does."""
        return _finite(self, super().convert(value, param, ctx), param, ctx)


class FiniteRange(click.FloatRange):
    """A finite number within bounds; click's own type accepts nan."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number, or fail as click does."""
        return _finite(self, super().convert(value, param, ctx), param, ctx)


def _finite(
    kind: "click.ParamType[Any]",
    number: float,
    param: click.Parameter | None,
    ctx: click.Context | None,
) -> float:
    if not math.isfinite(number):
        kind.fail(f"{number} is not a finite number.", param, ctx)
    return number


#: Where click keeps these options between themselves and the argument.
_CONFIG, _VARIANT, _CHANGES = "quantkit.config", "quantkit.variant", "quantkit.set"

PATH = CheckedPath()
COUNT = click.IntRange(1, MAX_COUNT)
STEPS = click.IntRange(1, MAX_STEPS)
SEED = click.IntRange(0, MAX_SEED)
NUMBER = Finite()
THREADS = click.IntRange(1, MAX_THREADS)


def model(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add MODEL, the directory that completes one of a single file, and the variant of weights."""
    config = click.option(
        "--config",
        type=PATH,
        expose_value=False,
        is_eager=True,
        callback=_remember,
        metavar="DIR|HUBID",
        help="Where MODEL is a .safetensors or .gguf file: the pipeline with all but its weights; "
        "default: the denoiser alone, as its tensors say.",
    )
    variant = click.option(
        "--variant",
        expose_value=False,
        is_eager=True,
        callback=_remember,
        metavar="NAME",
        help="Which weights of MODEL, as fp16; default: those of the plain name, or the only ones.",
    )
    argument = click.argument("model", metavar="MODEL", callback=_complete)
    return argument(config(variant(command)))


def optional_model(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add MODEL, which may be left out."""
    argument = click.argument("model", metavar="[MODEL]", required=False, callback=_somewhere)
    return argument(command)


def _remember(context: click.Context, option: click.Parameter, value: Any) -> None:
    context.meta[f"quantkit.{option.name}"] = value


def _complete(
    context: click.Context, argument: click.Parameter, value: str
) -> "str | SingleFile | Model":
    """Return MODEL with its config and variant, if given."""
    del argument
    config: Path | None = context.meta.get(_CONFIG)
    variant: str | None = context.meta.get(_VARIANT)
    if config is None:
        from quantkit.workflow.paths import refuse_nowhere

        refuse_nowhere(value)
    if config is None and variant is None:
        return value
    from quantkit.workflow.arguments import as_model
    from quantkit.workflow.single_file import single_file

    model = value if config is None else single_file(value, config)
    return model if variant is None else as_model(model, variant=variant)


def there(context: click.Context, parameter: click.Parameter, value: Path | None) -> Path | None:
    """Return the path of a file to read, which is there: a callback."""
    del context, parameter
    if value is not None:
        from quantkit.workflow.paths import refuse_missing

        refuse_missing(value)
    return value


def directory(
    context: click.Context, parameter: click.Parameter, value: Path | None
) -> Path | None:
    """Return the path of a directory of diffusers: a callback."""
    del context, parameter
    if value is not None:
        from quantkit.workflow.paths import refuse_no_directory

        refuse_no_directory(value)
    return value


def _directory_or_file(
    context: click.Context, parameter: click.Parameter, value: Path | None
) -> Path | None:
    is_file = value is not None and value.is_file()
    return value if is_file else directory(context, parameter, value)


def _somewhere(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    del context, parameter
    if value is not None:
        from quantkit.workflow.paths import refuse_nowhere

        refuse_nowhere(value)
    return value


packed = click.argument("packed", metavar="PACKED", type=PATH)
packed_directory = click.argument("packed", metavar="PACKED", type=PATH, callback=directory)
packed_or_file = click.argument("packed", metavar="PACKED", type=PATH, callback=_directory_or_file)


def recipe_option(default: str | None, text: str) -> Callable[..., Any]:
    """Return a decorator that adds ``--recipe``, and ``--set``, which changes what it names.

    Args:
        default: the recipe's name; None: the job decides.
        text: what help says of ``--recipe``.
    """
    option = click.option(
        "-r",
        "--recipe",
        default=default,
        show_default=default is not None,
        callback=changed_recipe,
        metavar="NAME|FILE",
        help=text,
    )
    return lambda command: option(changes(command))


def changed_recipe(
    context: click.Context, parameter: click.Parameter, value: str | None
) -> "str | Recipe | None":
    """Return a recipe's name or file, or the recipe with what ``--set`` changes: a callback."""
    del parameter
    given: tuple[str, ...] = context.meta.get(_CHANGES, ())
    if not given:
        return value
    if value is None:
        raise click.BadParameter("needs --recipe, which it changes.", context, param_hint="--set")
    from quantkit.workflow.arguments import recipe_with

    return recipe_with(value, given)


changes = click.option(
    "--set",
    multiple=True,
    expose_value=False,
    is_eager=True,
    callback=_remember,
    metavar="KEY=VALUE",
    help="Set a key of the recipe, as calibration.steps=8; repeatable.",
)
recipe = recipe_option(DEFAULT, "A bundled recipe's name ('quantkit recipes') or a YAML file.")
output = click.option("-o", "--output", type=PATH, required=True, help="Where to write.")
force = click.option("--force", is_flag=True, help="Replace an output that quantkit wrote.")
calibration = click.option(
    "-c",
    "--calibration",
    type=PATH,
    callback=there,
    help="Statistics written by 'quantkit calibrate model'.",
)
hessians = click.option(
    "--hessians",
    type=PATH,
    help="Second moments written by 'quantkit calibrate hessian'.",
)
prompts = click.option(
    "--prompts",
    type=PATH,
    callback=there,
    help="A UTF-8 file with one prompt a line; default: the bundled set.",
)
count = click.option(
    "--count",
    type=COUNT,
    help="Use the first so many prompts; default: all of --prompts, or the recipe's number.",
)
device = click.option(
    "--device",
    default="auto",
    show_default=True,
    metavar="auto|cpu|cuda[:N]|hip[:N]",
    help="Where the pipeline runs.",
)
quiet = click.option(
    "-q", "--quiet", is_flag=True, help="No progress and no tables, only the result."
)
as_json = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
dry_run = click.option(
    "-n", "--dry-run", is_flag=True, help="Say what would be written, and write nothing."
)
