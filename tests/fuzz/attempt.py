"""One case: copy a subject, damage the copy, run the commands, judge."""

import json
import os
import shutil
from pathlib import Path

from . import limits
from .cases import Case, Kind, Outcome, Scene, Verdict
from .families import FAMILIES, Family, Place
from .judging import judge
from .picking import nothing
from .running import Ran, run, told

#: case kind -> its family and its row
KINDS: dict[str, tuple[Family, Kind]] = {
    f"{family.name}/{kind.name}": (family, kind) for family in FAMILIES for kind in family.kinds
}

#: What loading may come to where checksums were redone: quantkit cannot know, diffusers may say so.
_TAKEN_ON = (Verdict.ANOTHER, Verdict.UNLOADABLE, Verdict.TRACEBACK)


def attempt(case: Case, subjects: Path, scratch: Path) -> Outcome:
    """Run one case in an empty folder.

    Args:
        case: what to do.
        subjects: from ``make_subjects``; never changed.
        scratch: the folder, empty; what a case leaves there is for the caller to drop.
    """
    family, kind = KINDS[case.kind]
    place = Place(subjects / "fixed", scratch / "output")
    try:
        scene = _scene(case, family, kind, subjects, scratch)
        kind.damage(scene)
    except Exception as error:  # noqa: BLE001  a fault of the fuzzer, told as one
        return Outcome(case, Verdict.FUZZER, f"{type(error).__name__}: {error}", told(error))
    with limits.small_files():
        runs, verdict, note = _commands(family, scene, place)
        if not verdict.failed:
            verdict, note = _confirmed(family, kind, scene, place, (verdict, note))
    if kind.damage is nothing and verdict is Verdict.REFUSED:
        verdict = Verdict.FUZZER
    if scene.marker.exists():
        verdict, note = Verdict.CODE, "code of the model was run"
    return Outcome(case, verdict, " ".join(note.split()), _detail(scene, runs))


def _scene(case: Case, family: Family, kind: Kind, subjects: Path, scratch: Path) -> Scene:
    rng = case.rng
    names = kind.subjects or sorted(path.name for path in (subjects / family.name).iterdir())
    subject = subjects / family.name / rng.choice(names)
    folder = scratch / "case"
    shutil.copytree(subject, folder, copy_function=os.link)
    return Scene(folder, subject, rng, done=[f"subject {family.name}/{subject.name}"])


def _commands(family: Family, scene: Scene, place: Place) -> tuple[list[Ran], Verdict, str]:
    """Run the commands; the first one's verdict stands unless a later one fails."""
    runs: list[Ran] = []
    stands: tuple[Verdict, str] | None = None
    for arguments in family.commands(scene, place):
        runs.append(run(arguments, closed=scene.closed))
        verdict, note = judge(runs[-1])
        if verdict.failed:
            return runs, verdict, f"{arguments[0]}: {note}"
        stands = stands or (verdict, note)
    assert stands is not None
    return runs, *stands


def _confirmed(
    family: Family, kind: Kind, scene: Scene, place: Place, judged: tuple[Verdict, str]
) -> tuple[Verdict, str]:
    """Look at what was accepted, and at what a refused model loads as."""
    verdict, note = judged
    if kind.refuse and verdict is Verdict.OK:
        return Verdict.ACCEPTED, "ok, and must be refused"
    if family.confirm is None or (verdict is Verdict.REFUSED and not kind.load):
        return verdict, note
    whole = json.loads((scene.subject.parent.parent / "whole.json").read_text())
    known = whole.get(f"{family.name}/{scene.subject.name}", {})
    found, more = family.confirm(scene, place, known, verdict is Verdict.REFUSED)
    if kind.resealed and found in _TAKEN_ON:
        return verdict, note
    return found, more or note


def _detail(scene: Scene, runs: list[Ran]) -> str:
    lines = [f"done: {text}" for text in scene.done]
    for ran in runs:
        lines.append(f"$ quantkit {' '.join(map(repr, ran.arguments))}\nexit code {ran.code}")
        parts = (("stdout", ran.out), ("stderr", ran.err))
        lines += [f"{name}: {text[:3000]!r}" for name, text in parts if text]
        lines += [ran.escaped] if ran.escaped else []
    return "\n".join(lines)


def measure_whole(subjects: Path, scratch: Path) -> None:
    """Note what every undamaged subject comes to, for ``attempt`` to compare with."""
    from .sameness import fingerprint, tree_digest

    whole = {}
    for family in FAMILIES:
        for subject in sorted((subjects / family.name).iterdir()):
            name = f"{family.name}/{subject.name}"
            if family.name == "packed":
                whole[name] = fingerprint(subject)
            elif family.name in {"calibration", "masks", "hessians", "streams"}:
                place = Place(subjects / "fixed", scratch / name)
                scene = Scene(subject, subject, Case(name, 0).rng)
                for arguments in family.commands(scene, place):
                    assert run(arguments).code == 0, arguments
                whole[name] = tree_digest(place.output)
    (subjects / "whole.json").write_text(json.dumps(whole))
