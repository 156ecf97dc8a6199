"""quantkit: pack diffusers pipelines to INT8, INT4, FP8 and 2:4, validate them, load them back.

Importing this package is enough for ``DiffusionPipeline.from_pretrained`` to load a packed
directory. It imports nothing heavy: torch and diffusers come with the first call that needs them.
"""

from quantkit._version import __version__ as __version__
from quantkit.inference.loading import hook as _hook

TYPE_CHECKING = False  # the typing module takes longer to import than all of this
if TYPE_CHECKING:
    from quantkit.device.backends import fast_sums as fast_sums
    from quantkit.inference.attention.coded_attention import attention as attention
    from quantkit.inference.loading.pipeline_loading import load_pipeline as load_pipeline
    from quantkit.models.source import SingleFile as SingleFile
    from quantkit.models.source import open_model as open_model
    from quantkit.pipelines.replay import replay as replay
    from quantkit.recipe.load import load_recipe as load_recipe
    from quantkit.workflow.calibrate import calibrate as calibrate
    from quantkit.workflow.calibrate import merge_calibrations as merge_calibrations
    from quantkit.workflow.evaluate import EvaluationSettings as EvaluationSettings
    from quantkit.workflow.evaluate import Limits as Limits
    from quantkit.workflow.evaluate import compare as compare
    from quantkit.workflow.evaluate import evaluate as evaluate
    from quantkit.workflow.export import export as export
    from quantkit.workflow.hessians import calibrate_hessians as calibrate_hessians
    from quantkit.workflow.inspect import inspect as inspect
    from quantkit.workflow.optimize import optimize as optimize
    from quantkit.workflow.pack import pack as pack
    from quantkit.workflow.quantize import quantize as quantize
    from quantkit.workflow.recover import recover as recover
    from quantkit.workflow.recovery_settings import Training as Training
    from quantkit.workflow.run import run as run
    from quantkit.workflow.sensitivity import measure_sensitivity as measure_sensitivity
    from quantkit.workflow.single_file import import_file as import_file
    from quantkit.workflow.sparsify import sparsify as sparsify
    from quantkit.workflow.verify import verify as verify

#: Every name of the API, and the module that it is imported from when it is first asked for.
_HOMES = {
    "EvaluationSettings": "workflow.evaluate",
    "Limits": "workflow.evaluate",
    "SingleFile": "models.source",
    "Training": "workflow.recovery_settings",
    "attention": "inference.attention.coded_attention",
    "calibrate": "workflow.calibrate",
    "calibrate_hessians": "workflow.hessians",
    "compare": "workflow.evaluate",
    "evaluate": "workflow.evaluate",
    "export": "workflow.export",
    "fast_sums": "device.backends",
    "import_file": "workflow.single_file",
    "inspect": "workflow.inspect",
    "load_pipeline": "inference.loading.pipeline_loading",
    "load_recipe": "recipe.load",
    "measure_sensitivity": "workflow.sensitivity",
    "merge_calibrations": "workflow.calibrate",
    "open_model": "models.source",
    "optimize": "workflow.optimize",
    "pack": "workflow.pack",
    "quantize": "workflow.quantize",
    "recover": "workflow.recover",
    "replay": "pipelines.replay",
    "run": "workflow.run",
    "sparsify": "workflow.sparsify",
    "verify": "workflow.verify",
}

__all__ = [
    "EvaluationSettings",
    "Limits",
    "SingleFile",
    "Training",
    "__version__",
    "attention",
    "calibrate",
    "calibrate_hessians",
    "compare",
    "evaluate",
    "export",
    "fast_sums",
    "import_file",
    "inspect",
    "load_pipeline",
    "load_recipe",
    "measure_sensitivity",
    "merge_calibrations",
    "open_model",
    "optimize",
    "pack",
    "quantize",
    "recover",
    "replay",
    "run",
    "sparsify",
    "verify",
]

_hook.install()


def __getattr__(name: str) -> object:
    """Return a name of the API, importing what it needs only now."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    """Return what tab completion shows."""
    return sorted(__all__)
