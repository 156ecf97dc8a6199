"""Kinds of damage to the other files that quantkit reads: artefacts, measurements, prompts."""

import json
from collections.abc import Callable
from pathlib import Path

from . import binary, headers, places, text
from .cases import Kind, Scene
from .picking import files, nothing, on, table

_TENSORS = ("calibration", "masks", "hessians")


def _tensor_files(scene: Scene) -> list[Path]:
    """Return the files of tensors: one without a suffix, or those of a folder."""
    return [p for p in files(scene) if p.name == "file" or p.suffix == ".safetensors"]


def any_tensors(scene: Scene) -> Path:
    """Return a safetensors file, whatever it is called."""
    return scene.rng.choice(_tensor_files(scene))


def any_text(scene: Scene) -> Path:
    """Return a JSON file."""
    return scene.rng.choice([p for p in files(scene) if p.suffix == ".json"])


def placed(name: str) -> Callable[[Scene], None]:
    """Return what puts something in place of a file or a folder."""

    def damage(scene: Scene) -> None:
        path = scene.rng.choice(sorted(scene.folder.rglob("*")))
        scene.say(f"{path.relative_to(scene.folder)}: {name}")
        places.PLACES[name](scene, path)

    return damage


def _reopened(path: Path):
    """Return what an artefact holds, by quantkit's own reader: kind, tensors, about."""
    from quantkit.storage.artefact import read_artefact

    entries, _ = headers.load_header(path)
    (kind,) = entries["__metadata__"]
    return kind, *read_artefact(path, kind)


def _resealed(path: Path, kind: str, tensors, about) -> None:
    from quantkit.storage.artefact import write_artefact

    path.unlink()
    write_artefact(path, kind, tensors, about, force=True)


def not_finite(scene: Scene) -> None:
    """Put NaN or infinity into a tensor, the checksum redone."""
    path = any_tensors(scene)
    kind, tensors, about = _reopened(path)
    name = scene.rng.choice(sorted(n for n, t in tensors.items() if t.is_floating_point()))
    flat = tensors[name].reshape(-1)
    value = scene.rng.choice((float("nan"), float("inf"), float("-inf")))
    place = scene.rng.randrange(flat.numel())
    flat[place] = value
    scene.say(f"{path.name}: {name}[{place}] is {value}")
    _resealed(path, kind, {**tensors, name: flat.reshape(tensors[name].shape)}, about)


def odd_moments(scene: Scene) -> None:
    """Write numbers that are finite and no moments: negative, huge, tiny; the checksum redone."""
    path = any_tensors(scene)
    kind, tensors, about = _reopened(path)
    name = scene.rng.choice(sorted(n for n, t in tensors.items() if t.is_floating_point()))
    factor = scene.rng.choice((-1.0, 0.0, 1e30, 1e-38))
    scene.say(f"{path.name}: {name} times {factor}")
    _resealed(path, kind, {**tensors, name: tensors[name] * factor}, about)


def about(scene: Scene) -> None:
    """Change what an artefact says of its tensors, the checksum redone."""
    path = any_tensors(scene)
    kind, tensors, said = _reopened(path)
    scene.rng.choice(text.MEANINGS)(scene, said)
    _resealed(path, kind, tensors, said)


def illegal_bits(scene: Scene) -> None:
    """Let a mask keep three weights of four, or all, the checksum redone."""
    import torch

    path = any_tensors(scene)
    kind, tensors, said = _reopened(path)
    name = scene.rng.choice(sorted(tensors))
    bits = tensors[name].clone()
    bits.view(-1)[scene.rng.randrange(bits.numel())] = scene.rng.choice(
        (0x77, 0xFF, 0xE3, 0x3D, 0x0F)
    )
    scene.say(f"{name}: a byte of other bits")
    assert bits.dtype == torch.uint8
    _resealed(path, kind, {**tensors, name: bits}, said)


def other_layer(scene: Scene) -> None:
    """Exchange the files of two layers."""
    a, b = scene.rng.sample(_tensor_files(scene), 2)
    first, second = a.read_bytes(), b.read_bytes()
    binary.replace(a, second)
    binary.replace(b, first)


SAFETENSORS = (
    Kind("nothing", nothing),
    Kind("bytes", on(any_tensors, binary.any_bytes), 8),
    *(
        Kind(f"header/{name}", table(any_tensors, name))
        for name in headers.MEANINGS
        # A header of one tensor has no two to exchange.
        if name != "swapped tensors"
    ),
    *(Kind(f"header/{name}", on(any_tensors, form)) for name, form in headers.FORMS.items()),
    *(Kind(f"place/{name}", placed(name)) for name in places.PLACES),
    Kind("sealed/about", about, 6, resealed=True),
)

CALIBRATION = (
    *SAFETENSORS,
    Kind("sealed/not finite", not_finite, 3, refuse=True),
    Kind("sealed/odd", odd_moments, 2, resealed=True),
)
MASKS = (*SAFETENSORS, Kind("sealed/illegal bits", illegal_bits, 3, refuse=True))
HESSIANS = (
    *SAFETENSORS,
    Kind("json/index", on(any_text, text.any_json), 4, resealed=True),
    Kind("sealed/not finite", not_finite, 3, refuse=True),
    Kind("sealed/odd", odd_moments, 3, resealed=True),
    Kind("tree/other layer", other_layer, refuse=True),
)

#: Of files without a checksum: another number in them is another measurement, and no fault.
MEASURED = (
    Kind("nothing", nothing),
    Kind("bytes", on(any_text, binary.any_bytes), 4),
    Kind("json", on(any_text, text.any_json), 12),
    *(Kind(f"place/{name}", placed(name)) for name in places.PLACES),
)


def any_object(scene: Scene) -> Path:
    """Return a kernel's object file."""
    return scene.rng.choice([p for p in files(scene) if p.suffix == ".co"])


def _tile(scene: Scene) -> None:
    """Let a kernel have a tile that there is not, or a block of no threads."""
    path = scene.folder / "manifest.json"
    manifest = json.loads(path.read_text())
    kernel = scene.rng.choice([k for k in manifest["kernels"] if "tile" in k["choices"]])
    if scene.rng.random() < 0.3:
        kernel["block"] = scene.rng.choice((0, -32, 31, 2**40, 10**30))
    else:
        kernel["choices"]["tile"] = scene.rng.choice(
            ("tx", "t99", "t-1", "t", "", "1", "no", "t1e9")
        )
    binary.replace(path, json.dumps(manifest).encode())


KERNELS = (*MEASURED, Kind("tile", _tile, 3), Kind("object", on(any_object, binary.any_bytes), 6))


# Text


def _lines(scene: Scene) -> None:
    """Put hostile lines into a text file."""
    path = scene.rng.choice(files(scene))
    lines = path.read_bytes().split(b"\n")
    line = scene.rng.choice(text.HOSTILE).encode("utf-8", "surrogateescape")
    lines.insert(scene.rng.randrange(len(lines) + 1), line)
    scene.say(f"{path.name}: line {line[:40]!r}")
    binary.replace(path, b"\n".join(lines))


def _whole(scene: Scene) -> None:
    """Put another text in place of a file's."""
    path = scene.rng.choice(files(scene))
    whole = (
        b"\n" * 100_000, b"a" * 3_000_000, "è".encode("latin-1"), b"\xff\xfea\0", b"\0", b"\r" * 9,
        "\u2028".encode(), b"\xef\xbb\xbf", b"a\n" * 50_000, b'"' * 9, b"1,2\n3", b"1,2,3,4",
        b"9" * 5000 + b",1,1", b"1e3,1,1", b"-1,0,1", b"m,n,k", b'"1\n2",3,4', b"1,2,\x1b[31m",
        *text.TEXTS[:10],
    )  # fmt: skip
    chosen = scene.rng.choice(whole)
    scene.say(f"{path.name}: {chosen[:20]!r} of {len(chosen)} bytes")
    binary.replace(path, chosen)


TEXT = (
    Kind("nothing", nothing),
    Kind("bytes", lambda s: binary.any_bytes(s, s.rng.choice(files(s))), 3),
    Kind("lines", _lines, 3),
    Kind("whole", _whole, 3),
    *(Kind(f"place/{name}", placed(name)) for name in places.PLACES),
)
