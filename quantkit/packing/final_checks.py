"""What pack adds to the files it has written: the judge's word, and the list of all files."""

from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from quantkit.checkpoint.directory import broken_pipeline, broken_weights
from quantkit.checkpoint.filelist import write_file_list
from quantkit.checkpoint.reader import Packed
from quantkit.errors import ModelError
from quantkit.models.building import read_skeleton
from quantkit.models.skeleton import Contents, misfits
from quantkit.packing.plan import ComponentPlan
from quantkit.storage.digest import sha256_of_file


@contextmanager
def checked_for_loading(plans: Sequence[ComponentPlan]) -> Iterator[None]:
    """Judge, while the body writes, whether a loader would take what the plans make.

    Building a model takes seconds, most of them for importing diffusers, which another process
    does meanwhile.

    Raises:
        ModelError: after the body: the first thing in which files and model do not fit.
    """
    pool = ThreadPoolExecutor(1)
    try:
        futures = [pool.submit(_judge, plan) for plan in plans]
        yield
        for future in futures:
            future.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def list_written(folder: Path, copied: Collection[Path], packed: Collection[Path]) -> None:
    """Write the list of all files, and refuse copied weights that are no numbers.

    Args:
        folder: what pack has written.
        copied: files that were copied, relative to the folder.
        packed: packed weight files, relative to the folder.

    Raises:
        ModelError: NaN or infinity in a copied safetensors file, or one that is damaged.
    """
    with ThreadPoolExecutor(2) as pool:
        digests = dict(pool.map(lambda file: (file, _digest(folder / file)), copied))
    write_file_list(folder, digests, packed)


def refuse_broken(packed: Packed) -> None:
    """Refuse a pipeline whose other components are not there.

    Raises:
        ModelError: the first disagreement of model_index.json and the folders.
    """
    if (packed.path / "model_index.json").is_file():
        classes = {component.name: component.class_name for component in packed.components}
        for breach in broken_pipeline(packed.path, classes):
            raise ModelError(breach)


def _judge(plan: ComponentPlan) -> None:
    path = plan.component.path
    tensors = {n: i.shape for shard in plan.shards for n, i in shard.source.tensors.items()}
    packed = {layer: bool(scheme.buckets) for layer, scheme in plan.config.layers.items()}
    cure = "keep what is no layer in 16 bit (overrides: keep), or download the model again"
    skeleton = read_skeleton(path / "config.json", plan.component.class_name, tensors)
    for misfit in misfits(Contents(path, packed, tensors, cure), skeleton):
        raise ModelError(misfit)


def _digest(path: Path) -> str:
    if path.suffix == ".safetensors":
        for breach in broken_weights(path):
            raise ModelError(breach)
    return sha256_of_file(path)
