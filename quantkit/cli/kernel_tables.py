"""Terminal tables and JSON of the gates' findings."""

from typing import TYPE_CHECKING, Any

from quantkit.cli.console import echo, print_json, print_table

if TYPE_CHECKING:
    from quantkit.device.aot.check import Finding, Report
    from quantkit.device.aot.k_loop import Loop
    from quantkit.device.aot.whole_block import WholeBlock

_COLUMNS = ("kernel", "VGPRs", "waves/SIMD", "spills", "LDS", "matrix instructions", "verdict")
_LOOP_COLUMNS = (
    "K loop of",
    "matrix",
    "other",
    "of these",
    "LDS bytes per matrix",
    "LDS bytes/clk",
    "issue allows",
    "LDS allows",
)
#: K of which whole blocks are shown: a narrow and a wide layer of SDXL, and FLUX's.
_KS = (640, 1280, 3072)
_SILICON_COLUMNS = ("kernel", *(f"K = {k}" for k in _KS))
_BLOCK_COLUMNS = (
    "block of",
    "others per pass",
    "others outside",
    *(f"K = {k}" for k in _KS),
    "code",
)


def print_reports(reports: "list[Report]", *, bounds: bool, as_json: bool) -> None:
    """Print tables per folder: each object's resources, and the share of the peak it may reach.

    Args:
        reports: one a folder.
        bounds: show what the share is counted from: K loops and whole blocks.
        as_json: print JSON instead, which has all.
    """
    if as_json:
        print_json([_report_json(report) for report in reports])
        return
    for report in reports:
        rows = [_row(finding) for finding in report.findings]
        print_table(f"{report.manifest.target}: {report.manifest.compiler}", _COLUMNS, rows)
        _print_shares(report, bounds=bounds)
        failed = sum(bool(finding.problems) for finding in report.findings)
        echo(f"{report.manifest.target}: {len(rows)} kernels, {failed} with problems")


def _print_shares(report: "Report", *, bounds: bool) -> None:
    with_loop = [(finding, finding.loop) for finding in report.findings if finding.loop]
    if not with_loop:
        return
    shares = [_silicon_row(finding) for finding, _ in with_loop]
    print_table("Share of the matrix peak, calibrated on published times", _SILICON_COLUMNS, shares)
    if bounds:
        loops = [_loop_row(finding, loop) for finding, loop in with_loop]
        print_table("What issue allows, per pass of a wave", _LOOP_COLUMNS, loops)
        blocks = [_block_row(f, f.block) for f in report.findings if f.block]
        print_table("What issue allows, per block", _BLOCK_COLUMNS, blocks)


def _silicon_row(finding: "Finding") -> tuple[object, ...]:
    # Attention's does not depend on K.
    expected = (finding.expected(k) for k in (_KS if finding.block else _KS[:1]))
    told = [f"{share[0]:.0%} to {share[1]:.0%}" for share in expected if share]
    return (finding.kernel.symbol, *told, *[""] * (len(_KS) - len(told)))


def _row(finding: "Finding") -> tuple[object, ...]:
    kernel = finding.kernel
    counts = ", ".join(f"{count} {name}" for name, count in finding.instructions.items())
    verdict = "; ".join(finding.problems) or "ok"
    return (
        kernel.symbol,
        kernel.vgprs,
        finding.occupancy,
        kernel.spills,
        kernel.lds_bytes,
        counts,
        verdict,
    )


def _loop_row(finding: "Finding", loop: "Loop") -> tuple[object, ...]:
    others = sorted(loop.others.items(), key=lambda item: -item[1])
    return (
        finding.kernel.symbol,
        loop.matrix,
        sum(loop.others.values()),
        ", ".join(f"{count} {name}" for name, count in others),
        loop.lds_bytes // loop.matrix,
        f"{loop.lds_rate:.0f} of {loop.unit.lds_rate:.0f}",
        f"{loop.issue_share:.0%}",
        f"{loop.lds_share:.0%}",
    )


def _block_row(finding: "Finding", block: "WholeBlock") -> tuple[object, ...]:
    shares = (f"{block.share(k):.0%}" for k in _KS)
    size = f"{finding.code_bytes / 1024:.1f} KB"
    return (finding.kernel.symbol, block.others, round(block.rest), *shares, size)


def _block_json(block: "WholeBlock") -> dict[str, Any]:
    return {
        "step": block.step,
        "busy_cycles": block.busy,
        "other_cycles": block.others,
        "cycles_outside": block.rest,
        "share": {str(k): block.share(k) for k in _KS},
    }


def _loop_json(loop: "Loop") -> dict[str, Any]:
    return {
        "issued": loop.issued,
        "lds_bytes_per_matrix_instruction": loop.lds_bytes / loop.matrix,
        "lds_bytes_per_clock": loop.lds_rate,
        "lds_bytes_per_clock_limit": loop.unit.lds_rate,
        "issue_share": loop.issue_share,
        "lds_share": loop.lds_share,
        "share": loop.share,
    }


def _report_json(report: "Report") -> dict[str, Any]:
    return {
        "target": report.manifest.target,
        "compiler": report.manifest.compiler,
        "passed": report.passed,
        "kernels": [
            {
                "symbol": finding.kernel.symbol,
                "vgprs": finding.kernel.vgprs,
                "waves_per_simd": finding.occupancy,
                "spills": finding.kernel.spills,
                "lds_bytes": finding.kernel.lds_bytes,
                "matrix_instructions": finding.instructions,
                "loop": _loop_json(finding.loop) if finding.loop else None,
                "code_bytes": finding.code_bytes,
                "expected_share": {str(k): finding.expected(k) for k in _KS},
                "block": _block_json(finding.block) if finding.block else None,
                "problems": list(finding.problems),
            }
            for finding in report.findings
        ],
    }
