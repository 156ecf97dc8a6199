"""The command line: one module per command, imported here, added below. Nothing heavy at import."""

import sys

import click

from quantkit import __version__
from quantkit.cli import (
    bench,
    bench_model,
    calibrate,
    demo,
    doctor,
    evaluate,
    hessian,
    inspect,
    kernels,
    optimize,
    pack,
    recover,
    run,
    sensitivity,
    sparsify,
    verify,
)
from quantkit.errors import QuantkitError


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="quantkit")
def quantkit() -> None:
    """Pack diffusers pipelines to FP8 and 4:2 sparsity, and prove what it cost."""


calibrate.calibrate.add_command(sensitivity.sensitivity)
calibrate.calibrate.add_command(optimize.optimize)
calibrate.calibrate.add_command(hessian.hessian)
quantkit.add_command(calibrate.calibrate)
quantkit.add_command(sparsify.sparsify)
quantkit.add_command(recover.recover)
quantkit.add_command(pack.pack)
quantkit.add_command(inspect.inspect)
quantkit.add_command(verify.verify)
quantkit.add_command(evaluate.evaluate)
quantkit.add_command(run.run)
kernels.kernels.add_command(bench.bench)
quantkit.add_command(kernels.kernels)
quantkit.add_command(bench_model.bench)
quantkit.add_command(doctor.doctor)
quantkit.add_command(demo.demo)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; exit 2 for bad input, 1 for work that failed."""
    try:
        quantkit(args=arguments, prog_name="quantkit", standalone_mode=True)
    except QuantkitError as error:
        click.echo(f"quantkit: error: {error}", err=True)
        sys.exit(error.exit_code)
