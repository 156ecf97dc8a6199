"""``make mutants``: how many small changes of the code do the tests notice?

All mutants of all modules take days. A seeded sample says within some percent how many survive, and
names survivors; with ``--sample 0`` a group or a module is tried to the end.
"""

import argparse
import functools
import itertools
import json
import os
import random
import resource
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from fnmatch import fnmatch
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
_TIMES, _MORE = 4, 60
_BASELINE_SECONDS = 3600


@dataclass(frozen=True)
class Baseline:
    """What the tests of one group did on the code as it is."""

    #: of tests and fixtures
    groups: list
    #: path -> line -> number of a group
    lines: dict
    seconds: dict
    #: test -> fixtures
    fixtures: dict

    def files(self):
        """Return the files of the tests."""
        return sorted({test.split("::")[0] for test in self.seconds})

    def is_imported(self, mutant):
        """Tell whether the changed statement runs while a module is imported."""
        return "" in self._contexts(mutant.path, range(mutant.first, mutant.line + 1))

    def tests_of(self, mutant):
        """Return the tests that run the changed statement, quick ones first.

        Of what runs while it is imported: all, first those that run another line of the module.
        """
        imported = self.is_imported(mutant)
        lines = self.lines[mutant.path] if imported else range(mutant.first, mutant.line + 1)
        contexts = self._contexts(mutant.path, lines)
        shared = {name.removeprefix("fixture:") for name in contexts}
        chosen = {
            test
            for test in self.seconds
            if test in contexts or shared & set(self.fixtures.get(test, ()))
        }
        asked = self.seconds if imported else chosen
        return sorted(asked, key=lambda test: (test not in chosen, self.seconds[test]))

    def _contexts(self, path, lines):
        known = self.lines.get(path, {})
        groups = {known[str(line)] for line in lines if str(line) in known}
        return {name for group in groups for name in self.groups[group]}

    def limit(self, tests):
        """Return the seconds that a trial of these tests may take."""
        return _MORE + _TIMES * sum(map(self.seconds.__getitem__, tests))


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
    parser.add_argument("--processes", type=int, default=2, help="trials at the same time")
    return parser.parse_args()


def _try_group(name, group, options):
    paths = sorted(
        str(path.relative_to(ROOT)) for glob in group["modules"] for path in ROOT.glob(glob)
    )
    paths = [path for path in paths if fnmatch(path, options.only)]
    everything = [mutant for path in paths for mutant in mutants_of(path, ROOT)]
    count = min(options.sample or len(everything), len(everything))
    drawn = random.Random(options.seed).sample(everything, count)
    sample = [mutant for mutant in drawn if mutant.compiles(ROOT)]
    print(f"{name}: {count} of {len(everything)} mutants in {len(paths)} modules", flush=True)
    known = {(e["path"], *e["change"]): e["why"] for e in TABLE["equivalent"]}
    diffs = {mutant: mutant.diff(ROOT) for mutant in sample}
    equivalent = [m for m in sample if (m.path, *diffs[m]) in known]
    tried = [m for m in sample if m not in equivalent]
    # Of trials: a change that asks for more is noticed. Files that are mapped do not count.
    memory = group.get("gigabytes", 16) << 30
    resource.setrlimit(resource.RLIMIT_DATA, (memory, resource.RLIM_INFINITY))
    baseline = _baseline(name, group["tests"], paths)
    started = monotonic()
    outcomes = _outcomes(tried, baseline, options.processes, diffs)
    return _score(name, outcomes, len(equivalent), monotonic() - started)


def _baseline(name, files, paths):
    """Run the tests of a group on the code as it is."""
    tests = [f"tests/{file}" for file in files]
    with tempfile.TemporaryDirectory() as folder:
        output, log = Path(folder) / "told.json", Path(folder) / "log.txt"
        plugin = functools.partial(trial.Recorder, paths, ROOT, output)
        trial.wait({trial.start(tests, ROOT, seconds=_BASELINE_SECONDS, log=log, plugin=plugin)})
        if not output.exists():
            sys.exit(f"{name}: its tests do not run:\n{log.read_text()[-5000:]}")
        told = json.loads(output.read_text(encoding="utf-8"))
        # What fails as the code is would notice every mutant.
        for test in told["failed"]:
            print(f"{name}: left out, for it fails on the code as it is: {test}", flush=True)
            told["seconds"].pop(test, None)
    return Baseline(told["groups"], told["lines"], told["seconds"], told["fixtures"])


def _outcomes(mutants: list[Mutant], baseline, processes, diffs):
    """Return mutant -> "passed", "failed", "timeout" or "unrun"; name those that survive."""
    run = [mutant for mutant in mutants if baseline.tests_of(mutant)]
    unrun = [(mutant, "unrun") for mutant in mutants if mutant not in run]
    inside = {m: codes for m in run if (codes := _inside(m, baseline)) is not None}
    anew = [mutant for mutant in run if mutant not in inside]
    outcomes = {}
    tried = (_try_inside(inside, baseline, processes), _try_anew(anew, baseline, processes))
    for mutant, outcome in itertools.chain(unrun, *tried):
        outcomes[mutant] = outcome
        if outcome in NOT_NOTICED:
            print(f"{mutant.path}:{mutant.line}: {NOT_NOTICED[outcome]} ({mutant.operator})")
            print(*(f"    {line}" for line in diffs[mutant]), sep="\n", flush=True)
    return outcomes


def _inside(mutant, baseline):
    """Return code -> changed code; None: what changes is no function, or runs while imported."""
    if baseline.is_imported(mutant):
        return None
    before = (ROOT / mutant.path).read_text(encoding="utf-8")
    return trial.replacements(before, mutant.text(ROOT))


def _try_inside(codes, baseline, processes):
    """Yield (mutant, outcome) of changes inside functions, mutant -> code -> changed code."""
    # The first trial changes nothing.
    trials = [(list(baseline.seconds), {}, _BASELINE_SECONDS)]
    for mutant, changed in codes.items():
        tests = baseline.tests_of(mutant)
        trials.append((tests, changed, baseline.limit(tests)))
    paths = sorted({mutant.path for mutant in codes})
    read, write = os.pipe()
    with tempfile.TemporaryDirectory() as folder, os.fdopen(read) as told:
        log = Path(folder) / "log.txt"
        plugin = functools.partial(trial.Forks, trials, paths, processes, write)
        process = trial.start(baseline.files(), ROOT, seconds=0, log=log, plugin=plugin)
        os.close(write)
        for line in told:
            number, outcome = json.loads(line)
            if number:
                yield list(codes)[number - 1], outcome
            elif outcome != "passed":
                sys.exit(f"tests fail where nothing changes:\n{log.read_text()[-5000:]}")
        if trial.wait({process}) != (process, "passed"):
            sys.exit(f"tests cannot be collected:\n{log.read_text()[-5000:]}")


def _try_anew(mutants, baseline, processes):
    """Yield (mutant, outcome) of changes of what runs while a module is imported."""
    running = {}
    for mutant in [*mutants, *[None] * processes]:
        if running and (mutant is None or len(running) == processes):
            process, outcome = trial.wait(running)
            yield running.pop(process), outcome
        if mutant is not None:
            tests = baseline.tests_of(mutant)
            change = (mutant.path, mutant.text(ROOT))
            process = trial.start(tests, ROOT, seconds=baseline.limit(tests), change=change)
            running[process] = mutant


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
