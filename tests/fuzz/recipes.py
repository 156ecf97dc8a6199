"""Kinds of damage to recipes."""

from pathlib import Path
from typing import Any

import yaml

from . import binary, places, text
from .artefacts import placed
from .cases import Kind, Scene
from .picking import nothing, on


def recipe(scene: Scene) -> Path:
    """Return the file."""
    return scene.folder / "recipe.yaml"


def _values(scene: Scene) -> dict[str, Any]:
    return yaml.safe_load(recipe(scene).read_text())


def _write(scene: Scene, values: Any) -> None:
    binary.replace(
        recipe(scene), yaml.safe_dump(values, allow_unicode=True).encode("utf-8", "replace")
    )


def meaning(scene: Scene) -> None:
    """Change the meaning: wrong types, lost, renamed and added keys; JSON is YAML, too."""
    values = _values(scene)
    raw = scene.rng.choice(text.MEANINGS)(scene, values)
    binary.replace(recipe(scene), text.dumped(values, raw))


def unknown_key(scene: Scene) -> None:
    """Add a key that recipes do not have."""
    values = _values(scene)
    places_ = [values, *(v for v in values.values() if isinstance(v, dict))]
    key = scene.rng.choice(("wieght", "Keep", "keeep", 3, "__class__", "\x1b[31mkeep", "a\nb"))
    scene.rng.choice(places_)[key] = scene.rng.choice((1, "x", []))
    _write(scene, values)


#: What stands twice in the recipe, once at its top or further in.
_TWICE = (
    "name: again\nname: once more\n",
    "keep: []\nkeep: []\n",
    "smooth: 0.1\nsmooth: 0.9\n",
    "gates: {ssim: 0.9, ssim: 0.1}\n",
    "budget: {bytes: 0.5, bytes: 0.6}\n",
    "calibration: {steps: 2, steps: 3}\n",
    "weight: {format: e5m2, format: e4m3fn}\n",
)


def repeated_key(scene: Scene) -> None:
    """Let a key stand twice, at the top or further in."""
    twice = scene.rng.choice(_TWICE)
    key = twice.split(":", 1)[0]
    values = {name: value for name, value in _values(scene).items() if name != key}
    scene.say(twice.strip())
    binary.replace(recipe(scene), (yaml.safe_dump(values) + twice).encode())


def no_match(scene: Scene) -> None:
    """Add a glob that matches no layer."""
    values = _values(scene)
    glob = scene.rng.choice(("nowhere.*", "*.to_kk", "down_blocks.9.*", "", "[", "\x1b[31m*x"))
    rule = scene.rng.choice(("keep", "override"))
    scene.say(f"{rule}: {glob!r}")
    if rule == "keep":
        values["keep"] = [*values.get("keep", ()), glob]
    else:
        entry = {"layers": [glob], "keep": True}
        values["overrides"] = [*values.get("overrides", ()), entry]
    _write(scene, values)


def _bomb(levels: int, width: int) -> str:
    rows = (f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * width)}]" for i in range(1, levels))
    return "\n".join(("a0: &a0 [x, x]", *rows))


#: Texts that harm a reader: by size when written out, by depth, by digits, by tags that make
#: objects, by form.
TEXTS = (
    _bomb(9, 9),
    _bomb(30, 2),
    "name: t\nkeep: " + _bomb(8, 9).replace("\n", "\n  ").replace("a0:", "\n  a0:", 1),
    "name: &a [*a]",
    "&a {name: *a}",
    "name: t\nkeep: &k [*k]",
    "name: t\noverrides: &o [{layers: *o}]",
    "[" * 100_000,
    "{a: " * 50_000,
    "- " * 100_000,
    "a:\n" + "".join(" " * i + "a:\n" for i in range(1, 1500)),
    "name: t\nsmooth: " + "9" * 5000,
    "name: t\ncalibration: {steps: " + "9" * 4400 + "}",
    "name: t\ncalibration: {seed: 0x" + "f" * 5000 + "}",
    "name: t\nsmooth: 1e999",
    "name: t\nsmooth: .nan",
    "name: t\nsmooth: -.inf",
    "name: t\nactivation: {buckets: [.nan, 1]}",
    "name: t\nactivation: {buckets: [1, .inf]}",
    "name: t\nactivation: {buckets: 1000000000}",
    "name: t\ncalibration: {steps: 1000000000000, buckets: 900000000000}",
    "name: t\nweight: {granularity: 'group:99999999999999999999999'}",
    "name: t\nweight: {granularity: 'group:0'}",
    "name: t\nweight: {granularity: 'group:-16'}",
    "name: t\nsparsity: {pattern: '1000000:2000000'}",
    "name: t\nsparsity: {pattern: '2:-4'}",
    "name: t\nsparsity: {pattern: '" + "9" * 5000 + ":4'}",
    "!!python/object/apply:os.system ['true']",
    "name: !!python/name:os.system",
    "name: !<tag:x> t",
    "name: !!binary aGk=",
    "name: !!set {a, b}",
    "name: 2001-01-01",
    "name: 190:20:30",
    "name: 012",
    "? [a]\n: b",
    "? {a: b}\n: c",
    "name: t\n---\nname: u",
    "<<: {name: t}",
    "<<: &a [*a]",
    "%YAML 9.9\n---\nname: t",
    "name:\tt",
    "\tname: t",
    "name: 't",
    "name: |\n  a\x1b[31m\n  b",
    'name: "\\e[31m\\a"',
    'name: "a\\nb"',
    'name: "\\uD800"',
    'name: "\\0"',
    "*a",
    "&a",
    "'",
    "",
    "null",
    "[]",
    "t",
    "name: t\n" * 50_000,
    "name: " + "x" * 5_000_000,
    "name: t\ndescription: " + "y " * 500_000,
    "# " + "c" * 5_000_000 + "\nname: t",
    "name: t\nkeep: [" + ", ".join(f"k{i}" for i in range(50_000)) + "]",
    "name: t\nunmatched: ignore\nkeep: [" + ", ".join(f"'k{i}*'" for i in range(20_000)) + "]",
    "name: t\nunmatched: ignore\nkeep: [" + ", ".join(f"k.{i}" for i in range(40_000)) + "]",
    "name: t\nunmatched: ignore\nkeep: [" + ", ".join(f"'*a*{i}*b'" for i in range(999)) + "]",
    "name: t\nunmatched: ignore\noverrides: [" + "{layers: ['*a'], keep: true}, " * 990 + "]",
    "name: t\nkeep: ['" + "*a" * 40 + "b']",
    "name: t\nkeep: ['" + "[" * 5000 + "']",
    "name: t\noverrides: [" + "{layers: ['*'], keep: true}, " * 5000 + "]",
    "name: t\ngates: {ssim: .nan}",
    "name: t\nbudget: {bytes: -1}",
    "name: t\nbudget: {error: .inf}",
    "name: t\nsparsity: {error_budget: .nan}",
    "name: t\nsparsity: {error_budget: .inf}",
    "name: t\ncalibration: {guidance: .nan}",
    "name: t\nactivation: {percentile: .nan}",
)


def hostile_text(scene: Scene) -> None:
    """Put one of these texts in place of the recipe."""
    chosen = scene.rng.choice(TEXTS)
    scene.say(f"{chosen[:60]!r} of {len(chosen)} characters")
    binary.replace(recipe(scene), chosen.encode("utf-8", "surrogatepass"))


def hostile_string(scene: Scene) -> None:
    """Put a hostile string at a place that takes strings."""
    values = _values(scene)
    string = scene.rng.choice(text.HOSTILE)
    match scene.rng.randrange(5):
        case 0:
            values["name"] = string
        case 1:
            values["keep"] = [string]
        case 2:
            values["weight"] = {"format": string}
        case 3:
            values["overrides"] = [{"layers": ["*"], "reason": string, "keep": True}]
        case 4:
            values["sparsity"] = {"pattern": string}
    scene.say(f"{string!r:.60}")
    binary.replace(recipe(scene), text.dumped(values, {}))


def _as_json(scene: Scene) -> Path:
    binary.replace(recipe(scene), text.dumped(_values(scene), {}))
    return recipe(scene)


KINDS = (
    Kind("nothing", nothing),
    Kind("bytes", on(recipe, binary.any_bytes), 8),
    Kind("json", on(_as_json, text.any_json), 2),
    Kind("meaning", meaning, 12),
    Kind("unknown key", unknown_key, 2, refuse=True),
    Kind("repeated key", repeated_key, 2, refuse=True),
    Kind("no match", no_match, 2, refuse=True),
    Kind("text", hostile_text, 16),
    Kind("name", hostile_string, 4),
    *(Kind(f"place/{name}", placed(name)) for name in places.PLACES),
)
