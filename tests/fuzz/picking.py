"""Which file of a scene is damaged, and how a damage of one file becomes one of a scene."""

from collections.abc import Callable
from pathlib import Path

from . import headers, places
from .cases import Scene

#: of an unsharded denoiser
WEIGHTS = "unet/diffusion_pytorch_model.safetensors"


def shard(scene: Scene) -> Path:
    """Return a packed weight file."""
    return scene.rng.choice(sorted((scene.folder / "unet").glob("*.safetensors")))


def copied_weights(scene: Scene) -> Path:
    """Return a weight file that was copied."""
    found = (p for n in ("vae", "text_encoder") for p in (scene.folder / n).glob("*.safetensors"))
    return scene.rng.choice(sorted(found))


def copied_config(scene: Scene) -> Path:
    """Return a JSON file of what was copied."""
    return scene.rng.choice(
        sorted(p for p in files(scene) if p.suffix == ".json" and "unet" not in str(p))
    )


def files(scene: Scene) -> list[Path]:
    """Return every file."""
    return sorted(p for p in scene.folder.rglob("*") if p.is_file())


def named(name: str) -> Callable[[Scene], Path]:
    """Return what picks one file."""
    return lambda scene: scene.folder / name


def on(
    pick: Callable[[Scene], Path], damage: Callable[[Scene, Path], None]
) -> Callable[[Scene], None]:
    """Return the damage done to the file that ``pick`` picks."""
    return lambda scene: damage(scene, pick(scene))


def table(pick: Callable[[Scene], Path], name: str) -> Callable[[Scene], None]:
    """Return damage of the header's table."""
    return lambda scene: headers.change_table(scene, pick(scene), name)


def in_place(name: str) -> Callable[[Scene], None]:
    """Return what puts something in place of a file, or of a folder now and then."""

    def damage(scene: Scene) -> None:
        found = files(scene)
        if scene.rng.random() < 0.15:
            found = sorted(p for p in scene.folder.rglob("*") if p.is_dir()) or found
        path = scene.rng.choice(found)
        scene.say(f"{path.relative_to(scene.folder)}: {name}")
        places.PLACES[name](scene, path)

    return damage


def nothing(scene: Scene) -> None:
    """Damage nothing: it must be ok."""
