"""The command line: ``moefuse info``, ``check``, ``bench``, ``gguf`` and ``run``."""

from __future__ import annotations

import typer

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


def main() -> None:
    app()
