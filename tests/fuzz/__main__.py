"""``python -m tests.fuzz``: damage what quantkit reads, and count what comes of it."""

import os

# Before torch: workers are forked, and a forked process has none of its parent's threads.
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"
os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "COLUMNS": "100"}
os.environ |= {"TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}

import gc  # noqa: E402
import json  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
import time  # noqa: E402
import warnings  # noqa: E402
from contextlib import contextmanager  # noqa: E402
from pathlib import Path  # noqa: E402

import click  # noqa: E402

from .cases import Case, Outcome, deal, parse_case  # noqa: E402
from .report import failures, table, to_json  # noqa: E402


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--cases", default=2000, show_default=True, help="How many.")
@click.option("--seed", default=0, show_default=True, help="Where the seeds of each kind begin.")
@click.option("--kind", "kinds", multiple=True, metavar="NAME", help="Only kinds that begin so.")
@click.option("--case", "single", metavar="KIND:SEED", help="One case, and all that it printed.")
@click.option("--keep", type=click.Path(path_type=Path), help="With --case: leave its files here.")
@click.option(
    "--jobs",
    default=len(os.sched_getaffinity(0)),
    show_default="the cores",
    help="Cases at once.",
)
@click.option("--subjects", type=click.Path(path_type=Path), help="Make them here, or take them.")
@click.option("--json", "output", type=click.Path(path_type=Path), help="Write every case here.")
def fuzz(  # noqa: PLR0917  click passes options as they come
    cases: int,
    seed: int,
    kinds: tuple[str, ...],
    single: str | None,
    keep: Path | None,
    jobs: int,
    subjects: Path | None,
    output: Path | None,
) -> None:
    """Damage what quantkit reads, and count what comes of it; exit with 1 when something failed."""
    start = time.monotonic()
    import_all()
    with _scratch() as scratch:
        made = subjects or scratch / "subjects"
        _make(made, scratch)
        if single:
            _repeat(parse_case(single), made, keep or scratch / "kept")
            return
        chosen = [(name, weight) for name, weight in _weights(made) if name.startswith(kinds or "")]
        outcomes = _run(deal(chosen, cases, seed), made, scratch, jobs)
    click.echo(table(outcomes, by_kind=True))
    click.echo(f"\n{table(outcomes, by_kind=False)}\n\n{failures(outcomes)}")
    if output:
        output.write_text(json.dumps(to_json(outcomes), indent=1) + "\n")
    failed = sum(outcome.verdict.failed for outcome in outcomes)
    seconds = time.monotonic() - start
    click.echo(f"{len(outcomes)} cases, {failed} failures, {seconds:.0f} s with {jobs} processes")
    sys.exit(failed > 0)


def import_all() -> None:
    """Import once what every case needs, quietly, without starting a thread."""
    import diffusers
    import torch
    import transformers
    from diffusers.utils import logging as diffusers_logging

    from quantkit import load_pipeline
    from quantkit.packing import pack_model as pipeline

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    assert load_pipeline
    assert pipeline
    for name in ("StableDiffusionPipeline", "UNet2DConditionModel", "AutoencoderKL"):
        getattr(diffusers, name)
    for name in ("CLIPTextModel", "CLIPTokenizer"):
        getattr(transformers, name)
    # What a load prints besides is not ours; commands are judged by what they print themselves.
    for library in (diffusers_logging, transformers.utils.logging):
        library.set_verbosity_error()
        library.disable_progress_bar()


@contextmanager
def _scratch():
    from .pool import drop

    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    try:
        yield folder
    finally:
        drop(folder)


def _make(subjects: Path, scratch: Path) -> None:
    """Make the subjects in a process of its own: this one is to have no threads to fork."""
    from .attempt import measure_whole
    from .subjects import make_subjects

    if (subjects / "whole.json").exists():
        return
    process = os.fork()
    if not process:
        status = 1
        try:
            make_subjects(subjects)
            measure_whole(subjects, scratch / "whole")
            status = 0
        except BaseException:  # noqa: BLE001  told here, because the parent will not
            import traceback

            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    if os.waitpid(process, 0)[1]:
        raise click.ClickException("the subjects could not be made")


def _weights(subjects: Path) -> list[tuple[str, int]]:
    """Return the kinds whose family could be made here, and their weights."""
    from .attempt import KINDS

    return [
        (name, kind.weight)
        for name, (family, kind) in KINDS.items()
        if any((subjects / family.name).glob("*/*"))
    ]


def _run(cases: list[Case], subjects: Path, scratch: Path, jobs: int) -> list[Outcome]:
    from .pool import run_cases

    gc.collect()
    gc.freeze()
    with click.progressbar(
        run_cases(cases, subjects, scratch / "cases", jobs), length=len(cases), file=sys.stderr
    ) as bar:
        outcomes = list(bar)
    # Or libraries complain at exit of what was never collected.
    gc.unfreeze()
    return sorted(outcomes, key=lambda outcome: (outcome.case.kind, outcome.case.seed))


def _repeat(case: Case, subjects: Path, keep: Path) -> None:
    """Run one case as a worker would, and print all of it."""
    from .pool import run_cases

    (outcome,) = run_cases([case], subjects, keep, 1)
    click.echo(f"{outcome.detail}\n{case}: {outcome.verdict.value}: {outcome.note}")
    sys.exit(outcome.verdict.failed)


if __name__ == "__main__":
    fuzz()
