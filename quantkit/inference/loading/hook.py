"""Import hook that registers "quantkit" in diffusers and transformers, in any order of imports.

Neither library has entry points for quantization methods; both keep tables in a module. A finder in
front of ``sys.meta_path`` waits for exactly those modules and fills the tables right after they
have run, in the thread and under the lock of that very import.

Every ``import quantkit`` runs this: nothing is imported that Python has not loaded for itself.
"""

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType


def _register_quantizer(module: "ModuleType") -> None:
    from quantkit.inference.loading.diffusers_loading import register

    register(module)


def _agree_on_dtypes(module: "ModuleType") -> None:
    from quantkit.inference.loading.pipeline_dtype import register

    register(module)


def _register_in_transformers(module: "ModuleType") -> None:
    from quantkit.inference.loading.transformers_loading import register

    register(module)


def _move_codes(module: "ModuleType") -> None:
    from quantkit.inference.loading.offloading import register

    register(module)


def _refuse_copies(module: "ModuleType") -> None:
    from quantkit.inference.loading.refused_copies import register

    register(module)


def _pad_adapters(module: "ModuleType") -> None:
    from quantkit.inference.loading.narrow_adapters import register

    register(module)


#: Modules of diffusers with classes that copy a denoiser's weights.
_COPIERS = (
    "controlnets.controlnet", "controlnets.controlnet_flux", "controlnets.controlnet_hunyuan",
    "controlnets.controlnet_qwenimage", "controlnets.controlnet_sd3",
    "controlnets.controlnet_sparsectrl", "controlnets.controlnet_union",
    "controlnets.controlnet_xs", "unets.unet_motion_model",
)  # fmt: skip

#: Modules of accelerate with the function that moves the tensors of an offloaded layer.
_MOVERS = ("accelerate.utils.modeling", "accelerate.hooks")

#: Module -> action right after it has run. Each action may be called twice.
ACTIONS: "dict[str, Callable[[ModuleType], None]]" = {
    "diffusers.quantizers.auto": _register_quantizer,
    "diffusers.pipelines.pipeline_utils": _agree_on_dtypes,
    "diffusers.loaders.lora_pipeline": _pad_adapters,
    "transformers.quantizers.auto": _register_in_transformers,
    **dict.fromkeys(_MOVERS, _move_codes),
    **{f"diffusers.models.{name}": _refuse_copies for name in _COPIERS},
}


class _Finder:
    """A finder that asks the other finders and adds the action to the loader."""

    #: By this a finder of an earlier import of this module is known: two would ask each other.
    is_quantkit = True

    def find_spec(
        self,
        fullname: str,
        path: "Sequence[str] | None",
        target: "ModuleType | None" = None,
    ) -> "ModuleSpec | None":
        """Return the other finders' spec, with the action after its loader."""
        action = ACTIONS.get(fullname)
        if action is None:
            return None
        for finder in sys.meta_path:
            if hasattr(finder, "is_quantkit") or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                _follow(spec, action)
                return spec
        return None


def _follow(spec: "ModuleSpec", action: "Callable[[ModuleType], None]") -> None:
    """Let the loader of ``spec`` call ``action`` once it has run the module."""
    loader = spec.loader
    if loader is None:
        return
    execute = loader.exec_module

    def exec_module(module: "ModuleType") -> None:
        execute(module)
        if module.__name__ == spec.name:
            action(module)

    # On the instance: a wrapper class would hide get_source and the like. Most loaders serve one
    # module; that of a zip file serves all, hence the name above.
    loader.exec_module = exec_module  # type: ignore[method-assign]


def install() -> None:
    """Install the finder, and register in libraries that are imported already. Idempotent."""
    if not any(hasattr(finder, "is_quantkit") for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    for name, action in ACTIONS.items():
        if name in sys.modules:
            __import__(name)  # waits for another thread that is still running the module
            action(sys.modules[name])
