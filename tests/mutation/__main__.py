"""``make mutants``: how many small changes of the code do the tests notice?

All mutants of all modules take days. A seeded sample says within some percent how many survive, and
names survivors; with ``--sample 0`` a group or a module is tried to the end.
"""

import argparse
import functools
import json
import random
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from fnmatch import fnmatch
from math import inf
from pathlib import Path
from time import monotonic

import yaml

from tests.mutation import trial
from tests.mutation.mutants import Mutant, mutants_of

ROOT = Path(__file__).parents[2]
TABLE = yaml.safe_load((Path(__file__).parent / "table.yaml").read_text(encoding="utf-8"))
#: What is said of mutants that no test notices.
NOT_NOTICED = {"passed": "survived", "unrun": "no test runs it"}
#: Share of mutants that must be noticed.
WANTED = 0.95
#: What a trial may take: so many times as long as its tests took, and so many seconds more.
_TIMES, _MORE = 4, 30
_BASELINE_SECONDS = 3600


@dataclass(frozen=True)
class Baseline:
    """What the tests of one group did on the code as it is."""

    #: path -> line -> tests and fixtures
    lines: dict
    seconds: dict
    #: test -> fixtures
    fixtures: dict

    def tests_of(self, mutant):
        """Return the tests that run the changed statement, quick ones first; None: none does."""
        known = self.lines.get(mutant.path, {})
        contexts = {
            name
            for line in range(mutant.first, mutant.line + 1)
            for name in known.get(str(line), ())
        }
        if "" in contexts and len(contexts) == 1:
            chosen = set(self.seconds)
        else:
            shared = {name.removeprefix("fixture:") for name in contexts}
            chosen = {
                test
                for test in self.seconds
                if test in contexts or shared & set(self.fixtures.get(test, ()))
            }
        return sorted(chosen, key=self.seconds.__getitem__)


def main():
    """Run the command; the exit code is 1 where too few mutants are noticed."""
    options = _parse()
    groups = [g for g in TABLE["groups"] if not options.group or g in options.group]
    scores = [_try_group(name, TABLE["groups"][name], options) for name in groups]
    sys.exit(0 if all(score >= WANTED for score in scores) else 1)


def _parse():
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("group", nargs="*", choices=[[], *TABLE["groups"]], help="all without one")
    parser.add_argument("--sample", type=int, default=200, help="mutants of a group; 0: all")
    parser.add_argument("--seed", type=int, default=1, help="of the sample")
    parser.add_argument("--only", default="*", help="modules, as '*/obs.py'")
    parser.add_argument("--seconds", type=float, default=inf, help="of a group; no trial after it")
    parser.add_argument("--processes", type=int, default=2, help="trials at the same time")
    return parser.parse_args()


def _try_group(name, group, options):
    paths = sorted(
        str(path.relative_to(ROOT)) for glob in group["modules"] for path in ROOT.glob(glob)
    )
    paths = [path for path in paths if fnmatch(path, options.only)]
    everything = [mutant for path in paths for mutant in mutants_of(path, ROOT)]
    count = min(options.sample or len(everything), len(everything))
    # In the order of the draw: what a limit of time leaves out is drawn at random, too.
    sample = random.Random(options.seed).sample(everything, count)
    print(f"{name}: {count} of {len(everything)} mutants in {len(paths)} modules", flush=True)
    known = {(e["path"], *e["change"]): e["why"] for e in TABLE["equivalent"]}
    diffs = {mutant: mutant.diff(ROOT) for mutant in sample}
    equivalent = [m for m in sample if (m.path, *diffs[m]) in known]
    tried = [m for m in sample if m not in equivalent]
    baseline = _baseline(name, group["tests"], paths)
    started = monotonic()
    outcomes = _outcomes(tried, baseline, options, diffs)
    return _score(name, outcomes, len(equivalent), monotonic() - started)


def _baseline(name, files, paths):
    """Run the tests of a group on the code as it is, and load what they loaded."""
    tests = [f"tests/{file}" for file in files]
    with tempfile.TemporaryDirectory() as folder:
        output, log = Path(folder) / "told.json", Path(folder) / "log.txt"
        plugin = functools.partial(trial.Recorder, paths, ROOT, output)
        trial.wait({trial.start(tests, ROOT, seconds=_BASELINE_SECONDS, log=log, plugin=plugin)})
        if not output.exists():
            sys.exit(f"{name}: its tests do not run:\n{log.read_text()[-5000:]}")
        told = json.loads(output.read_text(encoding="utf-8"))
        for module in told["loaded"]:
            _load(module)
        # What fails as the code is would notice every mutant.
        for test in told["failed"]:
            print(f"{name}: left out, for it fails on the code as it is: {test}", flush=True)
            told["seconds"].pop(test, None)
        # As a mutant is tried, but for the change.
        unchanged = (paths[0], (ROOT / paths[0]).read_text(encoding="utf-8"))
        process = trial.start(
            list(told["seconds"]), ROOT, seconds=_BASELINE_SECONDS, log=log, change=unchanged
        )
        if trial.wait({process}) != (process, "passed"):
            sys.exit(f"{name}: its tests fail where nothing changes:\n{log.read_text()[-5000:]}")
    return Baseline(told["lines"], told["seconds"], told["fixtures"])


def _load(module):
    """Import what a trial would import again, unless it is of the tests."""
    import importlib

    if module.split(".")[0] in {"torch", "numpy", "scipy", "diffusers", "transformers", "skimage"}:
        try:
            importlib.import_module(module)
        except Exception:  # noqa: BLE001  what cannot be loaded here is loaded there
            return


def _outcomes(mutants: list[Mutant], baseline, options, diffs):
    """Return mutant -> "passed", "failed", "timeout" or "unrun"; name those that survive."""
    outcomes, running, start = {}, {}, monotonic()

    def took(mutant, outcome):
        outcomes[mutant] = outcome
        if outcome in NOT_NOTICED:
            print(f"{mutant.path}:{mutant.line}: {NOT_NOTICED[outcome]} ({mutant.operator})")
            print(*(f"    {line}" for line in diffs[mutant]), sep="\n", flush=True)

    def collect():
        process, outcome = trial.wait(running)
        took(running.pop(process), outcome)

    for mutant in mutants:
        if monotonic() > start + options.seconds:
            break
        tests = baseline.tests_of(mutant)
        if not tests:
            took(mutant, "unrun")
            continue
        if len(running) == options.processes:
            collect()
        seconds = _MORE + _TIMES * sum(map(baseline.seconds.__getitem__, tests))
        change = (mutant.path, mutant.text(ROOT))
        running[trial.start(tests, ROOT, seconds=seconds, change=change)] = mutant
    while running:
        collect()
    return outcomes


def _score(name, outcomes, equivalent, seconds):
    count = Counter(outcomes.values())
    score = (count["failed"] + count["timeout"]) / len(outcomes) if outcomes else 1.0
    print(
        f"{name}: {100 * score:.1f} % of {len(outcomes)} noticed: {count['failed']} failed, "
        f"{count['timeout']} timed out, {count['passed']} survived, {count['unrun']} run by no "
        f"test; {equivalent} equivalent; {seconds:.0f} s",
        flush=True,
    )
    return score


if __name__ == "__main__":
    main()
