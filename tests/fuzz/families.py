"""One row per family of files: its kinds of damage, its commands, and what "ok" must mean."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from . import artefacts, gguf, outputs, packed, recipes, sources, text
from .cases import Kind, Scene, Verdict
from .judging import judge
from .running import run, told
from .sameness import differences, fingerprint, tree_digest

#: What a command is given, without the program's name.
Arguments = list[str]


@dataclass(frozen=True)
class Place:
    """Where a case finds what it needs."""

    #: what lies beside the subjects, undamaged
    fixed: Path
    #: where a command writes
    output: Path


@dataclass(frozen=True)
class Family:
    """A kind of file."""

    name: str
    kinds: tuple[Kind, ...]
    #: the commands that a scene is put through, the first deciding whether it is refused
    commands: Callable[[Scene, Place], list[Arguments]]
    #: what a case without a checksum's protection came to; None: nothing more is looked at
    confirm: "Confirm | None" = None


#: (scene, place, what the undamaged subject came to, whether it was refused) -> verdict and note
Confirm = Callable[[Scene, Place, dict[str, str], bool], tuple[Verdict, str]]


def _verify(scene: Scene, place: Place) -> list[Arguments]:
    del place
    more = scene.rng.choice(([], [], ["--all"], ["--json"], ["--all", "--json"]))
    commands = [["verify", str(scene.folder), "-q", *more]]
    if scene.rng.random() < 0.3:
        commands.append(["inspect", str(scene.folder)])
    return commands


def load(scene: Scene, place: Place, whole: dict[str, str], refused: bool) -> tuple[Verdict, str]:
    """Load a packed pipeline as by default: what is refused must not load as another model.

    And what ``verify`` calls ok must load, and as the same model.
    """
    from quantkit.errors import QuantkitError

    del place
    try:
        found = fingerprint(scene.folder)
    except (QuantkitError, OSError) as error:
        return (Verdict.REFUSED if refused else Verdict.UNLOADABLE), f"load_pipeline: {error}"
    except MemoryError as error:
        return Verdict.MEMORY, f"load_pipeline: {error}"
    except Exception as error:  # noqa: BLE001  whatever a user would see
        kind = Verdict.TRACEBACK if refused else Verdict.UNLOADABLE
        return kind, f"load_pipeline: {_last_line(error)}"
    if other := differences(found, whole):
        return Verdict.ANOTHER, f"load_pipeline {'(refused by verify)' if refused else ''}: {other}"
    return (Verdict.REFUSED if refused else Verdict.OK), ""


def same_bytes(
    scene: Scene, place: Place, whole: dict[str, str], refused: bool
) -> tuple[Verdict, str]:
    """Compare what was packed with what the undamaged artefact gives."""
    del scene
    if refused:
        return Verdict.REFUSED, ""
    other = differences(tree_digest(place.output), whole)
    return (Verdict.ANOTHER, f"packed otherwise: {other}") if other else (Verdict.OK, "")


def sound(scene: Scene, place: Place, whole: dict[str, str], refused: bool) -> tuple[Verdict, str]:
    """Verify what was packed from a source that was not refused, and load its denoiser."""
    del whole
    if refused:
        return Verdict.REFUSED, ""
    verdict, note = judge(run(["verify", str(place.output), "-q"]))
    if verdict is not Verdict.OK:
        return Verdict.UNLOADABLE, f"packed, then verify: {note}"
    return _loads(place.output)


def _loads(output: Path) -> tuple[Verdict, str]:
    """Load the denoiser alone: what was copied is as good as the source's."""
    import diffusers

    folder = output / "unet" if (output / "unet").is_dir() else output
    try:
        diffusers.UNet2DConditionModel.from_pretrained(folder)
    except Exception as error:  # noqa: BLE001  whatever a user would see
        return Verdict.UNLOADABLE, f"packed, then from_pretrained: {_last_line(error)}"
    return Verdict.OK, ""


def _last_line(error: BaseException) -> str:
    return told(error).strip().splitlines()[-1][:300]


def _pack(recipe: str, *more: str) -> Callable[[Scene, Place], list[Arguments]]:
    def commands(scene: Scene, place: Place) -> list[Arguments]:
        model, rules = place.fixed / "pipeline" / "unet", place.fixed / f"{recipe}.yaml"
        own = [word.format(folder=scene.folder) for word in more]
        return [["pack", str(model), "-r", str(rules), *own, "-o", str(place.output), "-q"]]

    return commands


def _pack_source(scene: Scene, place: Place) -> list[Arguments]:
    rules = str(place.fixed / "token.yaml")
    return [["pack", str(scene.folder), "-r", rules, "-o", str(place.output), "-q"]]


def _pack_with(scene: Scene, place: Place) -> list[Arguments]:
    model, rules = place.fixed / "pipeline" / "unet", scene.folder / "recipe.yaml"
    return [["pack", str(model), "-r", str(rules), "-o", str(place.output), "-n", "-q"]]


def _optimize(scene: Scene, place: Place) -> list[Arguments]:
    file, rules = scene.folder / "file.json", place.fixed / "token.yaml"
    goal = ["--set", "budget.bytes=0.99", "-o", f"{place.output}.yaml", "-q"]
    return [["calibrate", "optimize", str(file), "-r", str(rules), *goal]]


def _prompts(scene: Scene, place: Place) -> list[Arguments]:
    model, rules = place.fixed / "pipeline", place.fixed / "few.yaml"
    prompts = ["--prompts", str(scene.folder / "prompts.txt")]
    out = ["-o", str(place.output), "-n", "-q"]
    return [["calibrate", "hessian", str(model), "-r", str(rules), *prompts, *out]]


def _shapes(scene: Scene, place: Place) -> list[Arguments]:
    del place
    return [["read-shapes", str(scene.folder / f"shapes.{s}")] for s in ("json", "csv")]


def _import(scene: Scene, place: Place) -> list[Arguments]:
    config = ["--config", str(place.fixed / "denoiser")]
    return [["import", str(scene.folder / "file.gguf"), *config, "-o", str(place.output), "-q"]]


def finite(scene: Scene, place: Place, whole: dict[str, str], refused: bool) -> tuple[Verdict, str]:
    """Look through what was imported: every number is one."""
    from safetensors.torch import load_file

    del scene, whole
    if refused:
        return Verdict.REFUSED, ""
    for path in place.output.glob("*.safetensors"):
        for name, tensor in load_file(path).items():
            if not tensor.isfinite().all():
                return Verdict.ACCEPTED, f"imported, and {name} is not finite"
    return Verdict.OK, ""


def _forced(scene: Scene, place: Place) -> list[Arguments]:
    fixed, out = place.fixed, ["-o", str(scene.folder / outputs.NAME), "--force", "-q"]
    model = str(fixed / "pipeline" / "unet")
    commands = (
        ["sparsify", model, "-r", str(fixed / "few-masked.yaml")],
        ["calibrate", "optimize", str(fixed / "sensitivity.json"), "--set", "budget.bytes=0.99",
         "-r", str(fixed / "token.yaml")],
        ["export", model, "--to", "fp8r"],
        ["export", str(fixed / "denoiser"), "--to", "gguf:Q4_0"],
    )  # fmt: skip
    return [[*scene.rng.choice(commands), *out]]


def kept(scene: Scene, place: Place, whole: dict[str, str], refused: bool) -> tuple[Verdict, str]:
    """Look whether a file that was not replaced is as it was, and nothing is left beside it."""
    del place, whole
    if left := [p.name for p in scene.folder.iterdir() if "quantkit-" in p.name]:
        return Verdict.ACCEPTED, f"left behind: {left}"
    path = scene.folder / outputs.NAME
    if refused and path.is_file() and scene.found is not None:
        same = path.read_bytes() == scene.found
        return (Verdict.REFUSED, "") if same else (Verdict.ACCEPTED, "refused, and replaced")
    return (Verdict.REFUSED if refused else Verdict.OK), ""


def _streamed(scene: Scene, place: Place) -> list[Arguments]:
    packed = str(scene.folder)
    more = scene.rng.choice((["inspect"], ["inspect", "--json"], ["verify"], ["verify", "--all"]))
    return [*_pack("token")(scene, place), [*more, packed, *["-q"] * (more[0] == "verify")]]


def _argument(scene: Scene, place: Place) -> list[Arguments]:
    said = scene.rng.choice([t for t in text.HOSTILE if "\0" not in t])
    model, out = str(place.fixed / "pipeline" / "unet"), str(place.output)
    return [
        scene.rng.choice(
            (
                ["verify", said, "-q"],
                ["inspect", said],
                ["pack", said, "-o", out, "-q"],
                ["pack", model, "-r", said, "-o", out, "-q"],
                ["pack", model, "-c", said, "-o", out, "-q"],
                ["pack", model, "--masks", said, "-o", out, "-n", "-q"],
                ["pack", model, "--hessians", said, "-o", out, "-q"],
                ["calibrate", "optimize", said, "-o", out, "-q"],
                ["kernels", "check", said],
                ["read-shapes", said],
                ["sparsify", said, "-o", out, "-q"],
                ["calibrate", "model", said, "-o", out, "-q"],
                ["pack", model, "-o", f"{scene.folder}/{said or 'x'}/{said}", "-q"],
            )
        )
    ]


FAMILIES = (
    Family("packed", packed.KINDS, _verify, load),
    Family("source", sources.KINDS, _pack_source, sound),
    Family("calibration", artefacts.CALIBRATION, _pack("few", "-c", "{folder}/file"), same_bytes),
    Family("masks", artefacts.MASKS, _pack("few-masked", "--masks", "{folder}/file"), same_bytes),
    Family(
        "hessians",
        artefacts.HESSIANS,
        _pack("few-gptq", "--hessians", "{folder}/folder"),
        same_bytes,
    ),
    Family("sensitivity", artefacts.MEASURED, _optimize),
    Family(
        "baseline",
        artefacts.MEASURED,
        lambda scene, _: [["read-baseline", str(scene.folder / "file.json")]],
    ),
    Family("shapes", artefacts.TEXT, _shapes),
    Family(
        "kernels",
        artefacts.KERNELS,
        lambda scene, _: [["kernels", "check", str(scene.folder), "-q"]],
    ),
    Family("prompts", artefacts.TEXT, _prompts),
    Family("recipe", recipes.KINDS, _pack_with),
    Family("gguf", gguf.KINDS, _import, finite),
    Family("force", outputs.FORCE, _forced, kept),
    Family("streams", outputs.STREAMS, _streamed, same_bytes),
    Family("argument", (Kind("hostile", lambda scene: None, 16),), _argument),
)
