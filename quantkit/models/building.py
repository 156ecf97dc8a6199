"""Building the model of a config.json without weights, to see what its files must fit.

diffusers and transformers build on the meta device; where they are not imported yet, a child
process does that, for it takes 0.3 GB and seconds that a command which only reads files need not
spend; what it said is kept.
"""

import contextlib
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from quantkit.errors import CheckpointError
from quantkit.models.encoder_skeleton import build_encoder
from quantkit.models.sizes import oversized
from quantkit.models.skeleton import Skeleton, on_meta, skeleton_of
from quantkit.models.skeleton_cache import recall, remember
from quantkit.storage.jsonfile import parse_json, read_json, short

#: Seconds that a child process may take; importing diffusers takes most of them.
_PATIENCE = 120
#: What diffusers imports where it is there, for adapters, other models and text encoders. A third
#: of the seconds, and few of its models want it.
_RARELY_NEEDED = ("pandas", "peft", "scipy", "sklearn", "torchvision", "transformers")


def read_skeleton(
    config: Path, class_name: str, names: Collection[str], *, tensors: int | None = None
) -> Skeleton:
    """Return the skeleton of the model that a config.json describes.

    Args:
        config: of a diffusers model, which says its class, or of a transformers model.
        class_name: of a transformers model.
        names: tensors of its files, in which a transformers model is told.
        tensors: of the files, than which no model is larger; None: as many as there are names.

    Raises:
        CheckpointError: unreadable, or no model can be built from it.
    """
    values = read_json(config, error=CheckpointError, cure="download it again")
    values.pop("quantization_config", None)
    of_diffusers = "_class_name" in values
    count = len(names) if tensors is None else tensors
    if problem := oversized(values, count):
        raise CheckpointError(f"{config}: {problem}; download it again")
    asked = [values, count] + ([] if of_diffusers else [class_name, sorted(names)])
    text = json.dumps(asked)
    try:
        if ("diffusers" if of_diffusers else "transformers") in sys.modules:
            return _build(text)
        return _built_by_child(text)
    except ValueError as error:
        raise CheckpointError(f"{config}: {error}") from error


@lru_cache(maxsize=8)
def _build(text: str) -> Skeleton:
    """Return the skeleton of a config; ValueError when there is no such model."""
    config, tensors, *asked = json.loads(text)
    if not asked:
        return _build_denoiser(config, tensors)
    try:
        return build_encoder(config, *asked, tensors=tensors)
    except Exception as error:
        # As below.
        raise ValueError(f"{asked[0]} cannot be built from it ({short(error)})") from error


def _build_denoiser(config: Mapping[str, Any], tensors: int) -> Skeleton:
    import diffusers
    from diffusers.utils import logging

    name = config.get("_class_name")
    found = getattr(diffusers, name, None) if isinstance(name, str) else None
    if not (inspect.isclass(found) and issubclass(found, diffusers.ModelMixin)):
        raise ValueError(
            f"_class_name {name!r:.80} is no model of diffusers {diffusers.__version__}; upgrade "
            "diffusers, or download it again"
        )
    cls: Any = found
    level = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)  # it warns of keys that it does not know
    try:
        with on_meta(tensors):
            model = cls.from_config(config)
            return replace(skeleton_of(model), attention=_attention_of(model))
    except Exception as error:
        # The constructor of somebody else, called with what a file says: it raises what it likes.
        raise ValueError(f"{name} cannot be built from it ({short(error)})") from error
    finally:
        logging.set_verbosity(level)


def _attention_of(model: Any) -> dict[str, str]:
    from quantkit.models.attention import attention_modules, why_kept

    return {name: why_kept(module.processor) for name, module in attention_modules(model)}


@lru_cache(maxsize=8)
def _built_by_child(text: str) -> Skeleton:
    known = recall(text)
    said = _found_out(text) if known is None else known
    answer = parse_json(said)
    if known is None:
        remember(text, said)
    tensors = {name: tuple(shape) for name, shape in answer["tensors"].items()}
    arguments = tuple(answer["arguments"])
    return Skeleton(
        answer["class_name"], answer["modules"], tensors, arguments, answer["attention"]
    )


def _found_out(text: str) -> str:
    """Return the skeleton as JSON; ValueError when there is no such model."""
    if len(json.loads(text)) == 2:
        with contextlib.suppress(ValueError):
            return _said_by_child(text, _RARELY_NEEDED)
    return _said_by_child(text)


def _said_by_child(text: str, hidden: Iterable[str] = ()) -> str:
    """Return what a process says that finds no library of some names."""
    command = [sys.executable, "-m", "quantkit.models.building", *hidden]
    # The modules that are imported here, and none that lie where the user happens to be.
    path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
    try:
        done = subprocess.run(
            command,
            input=text,
            capture_output=True,
            text=True,
            check=True,
            timeout=_PATIENCE,
            cwd="/",
            env={**os.environ, "PYTHONPATH": path},
        )
    except subprocess.TimeoutExpired as error:
        raise ValueError(f"no model was built in {_PATIENCE} s") from error
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines() or [f"exit code {error.returncode}"]
        raise ValueError(f"no model was built ({short(ValueError(lines[-1]))})") from error
    if problem := parse_json(done.stdout).get("problem"):
        raise ValueError(problem)
    return done.stdout


def _serve(hidden: Iterable[str]) -> None:
    """Read a config from stdin and print its skeleton, or the problem, as JSON."""
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]  # Python's word for what is not there
    with contextlib.redirect_stdout(sys.stderr):
        try:
            answer = asdict(_build(sys.stdin.read()))
        except ValueError as error:
            answer = {"problem": str(error)}
    print(json.dumps(answer))  # noqa: T201  the answer to the parent process


if __name__ == "__main__":
    _serve(sys.argv[1:])
