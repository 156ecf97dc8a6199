"""Write docs/notes/results.md from docs/notes/results: ``python docs/make_results.py``."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean
from typing import Any

HERE = Path(__file__).parent / "notes"


@dataclass(frozen=True)
class Run:
    """A file of figures, and what made it."""

    file: str
    title: str
    command: str
    note: str = ""


KERNELS = (
    Run(
        "h200-products.json",
        "Products",
        "quantkit kernels bench --op gemm_fp8 --op gemm_fp8_sparse --shapes all --against torch "
        "--seconds 0.12 --save-baseline h200-products.json",
    ),
    Run(
        "h200-layers.json",
        "Quantize and multiply",
        "quantkit kernels bench --op quantize_fp8_token --op linear_fp8 --shapes sdxl "
        "--against torch --save-baseline h200-layers.json",
    ),
    Run(
        "h200-geglu.json",
        "Multiply, gate and quantize",
        "quantkit kernels bench --op geglu_fp8 --op geglu_fp8_sparse --shapes ff.json "
        "--against torch --seconds 0.4 --save-baseline h200-geglu.json",
        "`ff.json` is `[[8192, 5120, 640], [2048, 10240, 1280], [4608, 12288, 3072]]`; N counts "
        "outputs and their gates.",
    ),
)
_IN_A_ROW = (
    "--compile blocks --graph --profile --in-a-row 20 --attention e4m3fn --static-scales "
    "--contenders f16-compiled{also} --contenders fp8-static-replayed "
    "--contenders sparse-static-replayed --contenders fp8-static-fast-replayed "
    "--contenders sparse-static-fast-replayed"
)
_ATTENTION = (
    "quantkit bench model --config {} --compile blocks --graph --in-a-row 20 --seconds 2 "
    "--repeats 6 --profile --contenders f16-compiled --contenders int8-static-replayed "
    "--contenders fp8-static-replayed --attention e4m3fn --attention int8 --static-scales"
)
MODELS = (
    Run(
        "h200-sdxl.json",
        "SDXL's UNet, compiled by blocks and replayed",
        "quantkit bench model --config sdxl --compile blocks --graph --profile --seconds 14 "
        "--contenders f16-compiled --contenders fp8-static-compiled "
        "--contenders fp8-static-fast-compiled --contenders sparse-static-compiled "
        "--contenders sparse-static-fast-compiled --contenders torchao-compiled "
        "--contenders f16 --contenders fp8-static --contenders sparse-static "
        "--save h200-sdxl.json",
        "The last three are called from Python, module by module: the host limits them, and the "
        "device idles for most of the time.",
    ),
    Run(
        "h200-flux-quarter.json",
        "A quarter of FLUX, compiled by blocks and replayed",
        "quantkit bench model --config flux-quarter --compile blocks --graph --profile "
        "--seconds 8 --contenders f16-compiled --contenders fp8-static-compiled "
        "--contenders sparse-static-compiled --contenders fp8-static-fast-compiled "
        "--contenders sparse-static-fast-compiled --contenders torchao-compiled "
        "--save h200-flux-quarter.json",
        "FLUX.1-dev's transformer with 5 of its 19 double and 10 of its 38 single blocks: "
        '`flux-quarter/config.json` says `"_class_name": "FluxTransformer2DModel", '
        '"guidance_embeds": true, "num_layers": 5, "num_single_layers": 10`. 4096 tokens '
        "of the picture, 512 of the prompt. torchao's sums are fast ones.",
    ),
    Run(
        "h200-sdxl-replayed.json",
        "SDXL's UNet, replayed",
        "quantkit bench model --config sdxl --compile blocks --graph --profile --in-a-row 20 "
        "--seconds 2 --repeats 8 --contenders f16-compiled --contenders fp8-static-replayed "
        "--contenders sparse-static-replayed --contenders fp8-static-fast-replayed "
        "--contenders sparse-static-fast-replayed --save h200-sdxl-replayed.json",
        "float16 is compiled by blocks and replayed, packed models are replayed and not compiled.",
    ),
    Run(
        "h100-step-sdxl.json",
        "SDXL's UNet, twenty steps in a row, attention on codes",
        "quantkit bench model --config sdxl --seconds 6 --repeats 12 "
        f"{_IN_A_ROW.format(also=' --contenders torchao-compiled')} --save h100-step-sdxl.json",
        "float16 and torchao are compiled by blocks and replayed, packed models are replayed. "
        "Compared with [estimates](../guides/benchmark.md#against-what-was-measured).",
    ),
    Run(
        "h200-step-flux-quarter.json",
        "A quarter of FLUX, twenty steps in a row",
        f"quantkit bench model --config flux-quarter {_IN_A_ROW.format(also='')} "
        "--save h200-step-flux-quarter.json",
        "float16 is compiled by blocks and replayed, packed models are replayed.",
    ),
    Run(
        "h200-attention-sdxl.json",
        "SDXL's UNet in INT8 and FP8, replayed, attention on codes",
        f"{_ATTENTION.format('sdxl')} --save h200-attention-sdxl.json",
        "Codes of e4m3fn by static scales; on Hopper attention on int8 is torch's.",
    ),
    Run(
        "h200-attention-sd3.json",
        "SD 3's transformer in INT8 and FP8, replayed, attention on codes",
        f"{_ATTENTION.format('sd3')} --save h200-attention-sd3.json",
    ),
)

_DENSE, _PACKED = "f16-compiled", "int8-static-replayed"
_FAMILY_CONTENDERS = ("f16", _DENSE, _PACKED, "int8-static-compiled", "torchao-compiled")
_FAMILY_COLUMNS = ("card", "batch", *_FAMILY_CONTENDERS, "compiled f16 / replayed int8",
                   "peak MB, f16", "peak MB, int8")  # fmt: skip
_FAMILY_COMMAND = (
    "quantkit bench model --config NAME --batch BATCH --compile blocks --graph --in-a-row 20 "
    "--seconds 2 --repeats 6 --profile "
    f"{' '.join(f'--contenders {name}' for name in _FAMILY_CONTENDERS)} --save NAME.json"
)
_FAMILIES = (
    f"## Families\n\n```console\n{_FAMILY_COMMAND}\n```\n\n"
    "Milliseconds a step, many in a row, one run a family: twenty, ten for FLUX.2 and Z-Image, "
    "five for Sana and Wan.\n`torchao` is its dynamic FP8. A quarter has a quarter of the blocks: "
    "`--config docs/notes/configs/NAME`. Chroma's run\nhas no `--graph`: its forward copies a "
    "tensor from the CPU, which no CUDA graph of a compiled model takes,\nso that compiled rows "
    "wait for the host (5 of 40 ms in f16, 17 of torchao's), and the mean leaves it out. SDXL's "
    "run has\nno `f16`. Peak memory in 16 bit is that of `f16`, where it ran, else of "
    "`f16-compiled`.\n"
)


_RUNS = (*KERNELS, *MODELS)
_HEAD = """\
# Results

Made by `python docs/make_results.py` from `docs/notes/results`; a test holds it to them.
[Benchmarks](../guides/benchmark.md) has what the contenders are, and how times are taken. All runs
had {}.

Tables of kernels have microseconds (p50); in brackets: how many times as fast as the best of the
others, float16 aside. Tables of models are of one step, batch 2, latents 128x128. `error` is that
of the worst packed layer from `reference`, and of others from float16. The files say where the
milliseconds go, too.
"""


def page() -> str:
    """Return the whole page."""
    found = {run: json.loads((HERE / "results" / run.file).read_text("utf-8")) for run in _RUNS}
    kernels = (_section(run, found[run], _kernel_tables) for run in KERNELS)
    models = (_section(run, found[run], _model_tables) for run in MODELS)
    return "\n".join([_HEAD.format(_versions(found.values())), *kernels, _families(), *models])


def _versions(runs: Iterable[dict[str, Any]]) -> str:
    """Return what all runs were made with."""
    machines = [run["machine"]["versions"] for run in runs]
    versions = {k: v for machine in machines for k, v in machine.items() if k != "quantkit"}
    assert all(versions.get(k, v) == v for machine in machines for k, v in machine.items())
    (driver,) = {run["clocks"]["after"]["driver_version"] for run in runs}
    return ", ".join([f"driver {driver}", *(f"{k} {v}" for k, v in versions.items())])


def _families() -> str:
    """Return one row for each file of results/families."""
    files = sorted(HERE.glob("results/families/*.json"))
    runs = {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in files}
    times = [list(_family_cells(name, found)) for name, found in runs.items()]
    profiles = {name: _timed(found)[_PACKED]["profile"] for name, found in runs.items()}
    groups = dict.fromkeys(group for profile in profiles.values() for group in profile)
    spent = [[n, *(f"{profile.get(g, 0):.2f}" for g in groups)] for n, profile in profiles.items()]
    shown = (_table(("", *_FAMILY_COLUMNS), times), _table(("ms of int8", *groups), spent))
    return "\n".join((_FAMILIES, shown[0], _mean_ratio(runs.values()), shown[1]))


def _mean_ratio(runs: Iterable[dict[str, Any]]) -> str:
    # Without a graph the host's time would count for quantkit.
    rows = [_timed(run) for run in runs if run["settings"]["graph"]]
    ms = [[row[key]["in_a_row"]["p50_us"] for key in (_DENSE, _PACKED)] for row in rows]
    mean = geometric_mean(dense / packed for dense, packed in ms)
    return f"Geometric mean of compiled f16 / replayed int8 over {len(ms)} families: {mean:.2f}.\n"


def _timed(found: dict[str, Any]) -> dict[str, Any]:
    return {row["contender"]: row for row in found["rows"] if row["timing"]}


def _family_cells(name: str, found: dict[str, Any]) -> Iterator[str]:
    rows = _timed(found)
    yield name
    yield found["machine"]["device"].removeprefix("NVIDIA ").split()[0]
    yield str(found["settings"]["batch"])
    ms = {contender: row["in_a_row"]["p50_us"] / 1e3 for contender, row in rows.items()}
    yield from (f"{ms[key]:.2f}" if key in ms else "-" for key in _FAMILY_CONTENDERS)
    yield f"{ms[_DENSE] / ms[_PACKED]:.2f}"
    dense = rows.get("f16") or rows[_DENSE]
    yield from (f"{row['peak_bytes'] / 1e6:.0f}" for row in (dense, rows[_PACKED]))


def _section(run: Run, found: dict[str, Any], tables: Any) -> str:
    machine = found["machine"]
    made = f"{machine['device']}; kernel sources {machine['kernel_sources'][:12]}. {run.note}"
    return "\n".join(
        [f"## {run.title}\n", f"```console\n{run.command}\n```\n", made.rstrip() + "\n",
         *tables(found)]
    )  # fmt: skip


def _kernel_tables(run: dict[str, Any]) -> Iterator[str]:
    for op in dict.fromkeys(row["op"] for row in run["rows"]):
        every = [row for row in run["rows"] if row["op"] == op]
        rows = [row for row in every if row["timing"]]
        # Without them the best of the others is not known.
        missing = {_label(row) for row in every if not row["own"] and not row["timing"]}
        yield f"`{op}`:\n"
        found = dict.fromkeys((row["contender"], row["own"]) for row in rows)
        # Dense kernels have a table of their own.
        contenders = [pair for pair in found if pair[0] != "quantkit dense"]
        shapes = dict.fromkeys(_label(row) for row in rows)
        times = {(row["contender"], _label(row)): row["timing"]["p50_us"] for row in rows}
        lines = [
            [shape, *_cells(contenders, times, shape, compare=shape not in missing)]
            for shape in shapes
        ]
        yield _table(("M x N x K", *(name for name, _ in contenders)), lines)


def _cells(
    contenders: Sequence[tuple[str, bool]],
    times: dict[tuple[str, str], float],
    shape: str,
    *,
    compare: bool,
) -> Iterator[str]:
    others = [
        times[name, shape]
        for name, own in contenders
        if compare and not own and "f16" not in name and (name, shape) in times
    ]
    for name, own in contenders:
        us = times.get((name, shape))
        ratio = f" ({min(others) / us:.2f})" if own and us and others else ""
        yield "-" if us is None else f"{us:.1f}{ratio}"


def _model_tables(found: dict[str, Any]) -> Iterator[str]:
    rows = [row for row in found["rows"] if row["timing"]]
    in_a_row = any(row.get("in_a_row") for row in rows)
    columns = ("", *("in a row, ms",) * in_a_row, "ms", "host ms", "weights MB", "peak MB", "error")
    yield _table(columns, [list(_model_cells(row, in_a_row=in_a_row)) for row in rows])


def _model_cells(row: dict[str, Any], *, in_a_row: bool) -> Iterator[str]:
    timing = row["timing"]
    yield row["contender"]
    if in_a_row:
        yield f"{row['in_a_row']['p50_us'] / 1e3:.2f}"
    yield from (f"{timing[key] / 1e3:.2f}" for key in ("p50_us", "host_us"))
    yield f"{row['weight_bytes'] / 1e6:.0f}"
    yield f"{row['peak_bytes'] / 1e6:.0f}"
    yield f"{row['error']:.1e}"


def _label(row: dict[str, Any]) -> str:
    return "x".join(str(row["shape"][axis]) for axis in "mnk")


def _table(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    head, *rows = (f"| {' | '.join(row)} |\n" for row in (columns, *lines))
    return f"{head}|{'---|' * len(columns)}\n{''.join(rows)}"


if __name__ == "__main__":
    HERE.joinpath("results.md").write_text(page(), encoding="utf-8")
