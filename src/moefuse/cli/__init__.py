"""The command line: ``moefuse info``, ``check``, ``bench``, ``gguf``, ``run`` and ``tune``.

Everywhere ``--json`` prints plain data to the standard output instead of tables, and ``--plot`` names a picture.
A mistake in an option or in an environment variable is a message and exit code 2; a wrong result is exit code 1.
"""

from __future__ import annotations

from typing import Annotated

import typer

import moefuse
from moefuse.cli import options
from moefuse.cli.bench import bench
from moefuse.cli.check import check
from moefuse.cli.gguf import gguf
from moefuse.cli.info import info
from moefuse.cli.run import run
from moefuse.cli.tune import tune

app = typer.Typer(
    name="moefuse",
    help="The mixture-of-experts feed-forward block, fused.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(info)
app.command()(check)
app.command()(bench)
app.command()(gguf)
app.command()(run)
app.command()(tune)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"moefuse {moefuse.__version__}")
        raise typer.Exit


@app.callback()
def _before(
    version: Annotated[  # noqa: ARG001  # its callback ends the program
        bool, typer.Option("--version", is_eager=True, callback=_version, help="Print the version and exit.")
    ] = False,
) -> None:
    options.environment()


def main() -> None:
    app()
