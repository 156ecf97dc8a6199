"""Building the model of a config.json without weights, for checks of its files.

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
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from quantkit.errors import CheckpointError
from quantkit.models.encoder_skeleton import build_encoder, find_class
from quantkit.models.sizes import oversized
from quantkit.models.skeleton import Skeleton, on_meta, skeleton_of
from quantkit.models.skeleton_cache import recall, remember
from quantkit.storage.jsonfile import parse_json, read_json, short

#: Seconds that a child process may take; importing diffusers takes most of them.
_PATIENCE = 120
#: Optional imports of diffusers, for adapters, other models and text encoders. A third
#: of the seconds, and few of its models want it.
_RARELY_NEEDED = ("pandas", "peft", "scipy", "sklearn", "torchvision", "transformers")

#: Answers of a child process on models that were not requested yet.
_ahead: dict[str, str] = {}


@dataclass(frozen=True)
class SkeletonRequest:
    """A model to build, as ``read_skeleton`` is asked for it."""

    config: Path
    class_name: str
    names: Collection[str]
    library: str = ""


def read_skeleton(
    config: Path,
    class_name: str,
    names: Collection[str],
    *,
    tensors: int | None = None,
    library: str = "",
) -> Skeleton:
    """Return the skeleton of the model that a config.json describes.

    Args:
        config: of a diffusers model, which says its class, or of a transformers model.
        class_name: of a transformers model.
        names: tensors of its files, in which a transformers model is told.
        tensors: of the files, than which no model is larger; None: as many as there are names.
        library: of the class, as model_index.json has it: it may be a folder of
            ``diffusers.pipelines``.

    Raises:
        CheckpointError: unreadable, or no model can be built from it.
    """
    text = _text(SkeletonRequest(config, class_name, names, library), tensors)
    try:
        return _build(text) if _is_built_here(text) else _built_by_child(text)
    except ValueError as error:
        raise CheckpointError(f"{config}: {error}") from error


def build_ahead(asked: Iterable[SkeletonRequest]) -> None:
    """Build several models in one child process, which imports the libraries once for all.

    What is wrong with one ``read_skeleton`` tells.
    """
    texts = []
    for one in asked:
        with contextlib.suppress(CheckpointError):
            texts.append(_text(one, None))
    texts = [text for text in texts if not _is_built_here(text) and recall(text) is None]
    if len(texts) > 1:
        with contextlib.suppress(ValueError):
            _ahead.update(zip(texts, _said_by_child(texts), strict=True))


def _text(asked: SkeletonRequest, tensors: int | None) -> str:
    """Return the inputs that decide a skeleton, as JSON."""
    values = read_json(asked.config, error=CheckpointError, cure="download it again")
    values.pop("quantization_config", None)
    count = len(asked.names) if tensors is None else tensors
    if problem := oversized(values, count):
        raise CheckpointError(f"{asked.config}: {problem}; download it again")
    place = "" if asked.library in ("diffusers", "transformers") else asked.library
    of_diffusers = "_class_name" in values
    more = [] if of_diffusers else [asked.class_name, sorted(asked.names)]
    return json.dumps([values, count, place, *more])


def _is_of_diffusers(text: str) -> bool:
    return len(json.loads(text)) == 3


def _is_built_here(text: str) -> bool:
    return ("diffusers" if _is_of_diffusers(text) else "transformers") in sys.modules


@lru_cache(maxsize=8)
def _build(text: str) -> Skeleton:
    """Return the skeleton of a config; ValueError when there is no such model."""
    config, tensors, place, *asked = json.loads(text)
    if not asked:
        return _build_diffusers_model(config, tensors, place)
    try:
        return build_encoder(config, *asked, tensors=tensors, place=place)
    except Exception as error:
        # As below.
        raise ValueError(f"{asked[0]} cannot be built from it ({short(error)})") from error


def _build_diffusers_model(config: Mapping[str, Any], tensors: int, place: str) -> Skeleton:
    import diffusers
    from diffusers.utils import logging

    name = config.get("_class_name")
    found = find_class(diffusers, name, place) if isinstance(name, str) else None
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
    from quantkit.models.attention_modules import attention_modules, why_kept

    return {name: why_kept(module.processor) for name, module in attention_modules(model)}


@lru_cache(maxsize=8)
def _built_by_child(text: str) -> Skeleton:
    known = recall(text)
    said = (_ahead.pop(text, "") or _found_out(text)) if known is None else known
    answer = parse_json(said)
    if problem := answer.get("problem"):
        raise ValueError(problem)
    if known is None:
        remember(text, said)
    tensors = {name: tuple(shape) for name, shape in answer["tensors"].items()}
    arguments = tuple(answer["arguments"])
    return Skeleton(
        answer["class_name"], answer["modules"], tensors, arguments, answer["attention"]
    )


def _found_out(text: str) -> str:
    """Return the skeleton as JSON, or the problem; ValueError when the process failed."""
    if _is_of_diffusers(text):
        with contextlib.suppress(ValueError):
            (said,) = _said_by_child([text], _RARELY_NEEDED)
            if "problem" not in parse_json(said):
                return said
    return _said_by_child([text])[0]


def _said_by_child(texts: Sequence[str], hidden: Iterable[str] = ()) -> list[str]:
    """Return a child process's answer for each; some libraries are hidden from it."""
    command = [sys.executable, "-m", "quantkit.models.building", *hidden]
    # The modules that are imported here, and none that lie where the user happens to be.
    path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
    try:
        done = subprocess.run(
            command,
            input="\n".join(texts),
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
    return done.stdout.splitlines()


def _serve(hidden: Iterable[str]) -> None:
    """Read configs from stdin, one a line, and print the skeleton, or the problem, of each."""
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]  # Python's word for what is not there
    for text in sys.stdin:
        with contextlib.redirect_stdout(sys.stderr):
            try:
                answer = asdict(_build(text))
            except ValueError as error:
                answer = {"problem": str(error)}
        print(json.dumps(answer))  # noqa: T201  the answer to the parent process


if __name__ == "__main__":
    _serve(sys.argv[1:])
