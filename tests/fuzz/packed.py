"""Kinds of damage to packed pipelines."""

from functools import partial
from pathlib import Path

from . import binary, contents, headers, places, text, trees
from .cases import Kind, Scene
from .picking import (
    WEIGHTS,
    copied_config,
    copied_weights,
    files,
    in_place,
    named,
    nothing,
    on,
    shard,
    table,
)


def _flip_header(scene: Scene, path: Path) -> None:
    data = path.read_bytes()
    binary.flip(scene, path, data, 0, 8 + int.from_bytes(data[:8], "little"))


_OWN = (
    Kind("nothing", nothing),
    *(Kind(f"bytes/{d.__name__}", on(shard, d), 2) for d in dict.fromkeys(binary.ANY_BYTES)),
    Kind("bytes/header", lambda s: _flip_header(s, shard(s)), 6),
    Kind("bytes/copied weights", on(copied_weights, binary.any_bytes), 4),
    Kind("bytes/any file", lambda s: binary.any_bytes(s, s.rng.choice(files(s))), 4),
    *(Kind(f"header/{name}", table(shard, name), 3) for name in headers.MEANINGS),
    *(Kind(f"header/{name}", on(shard, form), 2) for name, form in headers.FORMS.items()),
    *(Kind(f"copied header/{name}", table(copied_weights, name)) for name in headers.MEANINGS),
    *(Kind(f"copied header/{n}", on(copied_weights, form)) for n, form in headers.FORMS.items()),
    Kind("json/config", on(named("unet/config.json"), text.any_json), 4),
    Kind("json/schemes", contents.scheme, 6),
    Kind("json/metadata", contents.metadata, 6),
    Kind("json/model index", on(named("model_index.json"), text.any_json), 4),
    Kind(
        "json/shard index",
        on(named(f"{WEIGHTS}.index.json"), text.any_json),
        4,
        subjects=("sparse",),
    ),
    Kind("json/list", on(named("quantkit.files.json"), text.any_json), 4),
    Kind("json/sizes", contents.sizes, 6),
    Kind("json/copied", on(copied_config, text.any_json), 6),
    *(Kind(f"place/{name}", in_place(name), 2) for name in places.PLACES),
    Kind("meaning/norm eps", contents.norm_eps, refuse=True),
    Kind("meaning/bucket edge", contents.bucket_edge, refuse=True, subjects=("static",)),
    Kind("meaning/any number", contents.any_number, 3),
    Kind("meaning/version", contents.version, refuse=True),
    Kind("meaning/cut vae", trees.cut_vae, refuse=True),
    Kind("meaning/empty index", trees.empty_index, refuse=True),
    Kind(
        "meaning/no text encoder", partial(trees.lost_component, name="text_encoder"), refuse=True
    ),
    Kind("meaning/no vae", partial(trees.lost_component, name="vae"), refuse=True),
    Kind("meaning/no unet", partial(trees.lost_component, name="unet"), refuse=True),
    Kind(
        "nan/bias",
        contents.forged(partial(contents.packed_nan, parts=(".bias",))),
        refuse=True,
        resealed=True,
    ),
    Kind(
        "nan/scale",
        contents.forged(partial(contents.packed_nan, parts=("_scale", "_smooth"))),
        refuse=True,
        resealed=True,
    ),
    Kind(
        "nan/any",
        contents.forged(partial(contents.packed_nan, parts=())),
        2,
        refuse=True,
        resealed=True,
    ),
    Kind("nan/copied", contents.forged(contents.copied_nan), 2, refuse=True, resealed=True),
    Kind("sealed/bad scale", contents.forged(contents.bad_scale), refuse=True, resealed=True),
    Kind("sealed/stray weight", contents.forged(contents.stray_weight), resealed=True),
    Kind("tree/lost file", trees.lost_file, 3),
    Kind("tree/extra file", trees.extra_file, 4),
    Kind("tree/other variant", trees.other_variant, 2, refuse=True),
    Kind("tree/swapped shards", trees.swapped_shards, refuse=True, subjects=("sparse",)),
    Kind("name/file", trees.hostile_file, 3),
    Kind("name/folder", trees.hostile_folder, 3),
    Kind("name/component", trees.hostile_component, 2),
    Kind("code/pickle", trees.pickled, 2),
    Kind("code/python", trees.python_code, 3),
)

#: Whose damage is done with the list of files redone or deleted, too.
_FORGED = ("bytes", "header", "copied header", "json", "meaning", "code", "name")

KINDS = (
    *_OWN,
    *(
        Kind(
            f"{how.__name__}/{kind.name}",
            how(kind.damage),
            # A model without the list is no model; of a list redone digests say nothing.
            refuse=how is contents.unlisted,
            resealed=how is contents.forged,
            # Diffusers takes its time to say what digests cannot. Code is not to run, though, and
            # structures are not to grow.
            load=how is contents.unlisted or kind.name.startswith(("code", "json/sizes")),
            subjects=kind.subjects,
        )
        for how in (contents.forged, contents.unlisted)
        for kind in _OWN
        if kind.name.split("/")[0] in _FORGED and kind.name not in {"name/folder", "json/list"}
    ),
)
