"""Final checks of a packed model: whether a loader takes it, and the list of all files."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from quantkit.checkpoint.copied import misfits_of_copies
from quantkit.checkpoint.directory import broken_pipeline, broken_weights
from quantkit.checkpoint.filelist import write_file_list
from quantkit.errors import ModelError
from quantkit.models.building import read_skeleton
from quantkit.models.skeleton import Contents, misfits
from quantkit.packing.plan import ComponentPlan
from quantkit.progress import Progress, tracked
from quantkit.storage.digest import sha256_of_file


@contextmanager
def checked_for_loading(model: Path, plans: Sequence[ComponentPlan]) -> Iterator[None]:
    """Check, while the body writes, whether a loader would take what the plans make.

    Copied files are checked as well.

    Building a model takes seconds, most of them for importing diffusers, which another process
    does meanwhile.

    Raises:
        ModelError: after the body: the first thing in which files and model do not fit.
    """
    pool = ThreadPoolExecutor(1)
    try:
        futures = [pool.submit(_judge, plan) for plan in plans]
        if (model / "model_index.json").is_file():
            packed = {plan.component.name for plan in plans}
            futures.append(pool.submit(_judge_copies, model, packed))
        yield
        for future in futures:
            future.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def refuse_broken_copies(model: Path, copied: Iterable[Path], *, progress: Progress) -> None:
    """Refuse NaN and infinity in weights that will be copied, before the long work.

    Args:
        model: the source.
        copied: files, relative to it.
        progress: told of files done.

    Raises:
        ModelError: NaN or infinity in a safetensors file, or one that is damaged.
    """
    if not (files := [model / file for file in copied if file.suffix == ".safetensors"]):
        return
    with ThreadPoolExecutor(2) as pool:
        found = pool.map(lambda file: list(broken_weights(file)), files)
        for _ in tracked(progress, "look at what is copied", files):
            for breach in next(found):
                raise ModelError(breach)


def list_written(folder: Path, copied: Collection[Path], packed: Collection[Path]) -> None:
    """Write the list of all files.

    Args:
        folder: what pack has written.
        copied: files that were copied, relative to the folder.
        packed: packed weight files, relative to the folder.
    """
    with ThreadPoolExecutor(2) as pool:
        digests = dict(pool.map(lambda file: (file, sha256_of_file(folder / file)), copied))
    write_file_list(folder, digests, packed)


def refuse_broken(model: Path, classes: Mapping[str, str]) -> None:
    """Refuse a pipeline whose components are not there.

    Args:
        model: the source.
        classes: of the components that are packed, by name.

    Raises:
        ModelError: the first disagreement of model_index.json and the folders.
    """
    if (model / "model_index.json").is_file():
        for breach in broken_pipeline(model, classes):
            raise ModelError(breach)


def _judge_copies(model: Path, packed: Collection[str]) -> None:
    for misfit in misfits_of_copies(model, packed):
        raise ModelError(misfit)


def _judge(plan: ComponentPlan) -> None:
    path = plan.component.path
    tensors = {n: i.shape for shard in plan.shards for n, i in shard.source.tensors.items()}
    packed = {layer: scheme.schedule is not None for layer, scheme in plan.config.layers.items()}
    cure = "keep what is no layer in 16 bit (overrides: keep), or download the model again"
    skeleton = read_skeleton(path / "config.json", plan.component.class_name, tensors)
    for misfit in misfits(Contents(path, packed, tensors, cure), skeleton):
        raise ModelError(misfit)
