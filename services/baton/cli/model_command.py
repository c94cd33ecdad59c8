"""Implements `baton model`, which downloads and creates models."""

from pathlib import Path

import click

from baton.core.errors import BatonError

SHAPES = ("tiny-42m", "tiny-moe", "qwen3-0.6b", "qwen3-4b", "qwen3-8b", "llama3-8b", "gemma3-270m")
"""Keys of `model.loading.model_shapes.SHAPES`, repeated here because importing that module takes seconds."""


@click.group()
def model() -> None:
    """Download or create models."""


@model.command()
@click.argument("name", metavar="HUB_ID")
def fetch(name: str) -> None:
    """Download a model from the Hugging Face hub and print its directory.

    Only the files that Baton reads are downloaded, into the cache (HF_HOME). Files that exist are kept.
    """
    from baton.model.loading.model_source import resolve_model

    click.echo(resolve_model(name))


@model.command()
@click.option("--like", "shape", required=True, type=click.Choice(SHAPES), help="Model shape to imitate.")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="New or empty directory for the model.")
def init(shape: str, out: Path) -> None:
    """Write a model with random weights, for benchmarks.

    It has the compute cost of a real model of that shape, but its output is meaningless.
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from baton.model.loading.random_init import init_like

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn())
    try:
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(shape, total=None)
            init_like(shape, out, progress=lambda written, total: bar.update(task, completed=written, total=total))
    except OSError as error:
        raise BatonError(f"cannot write {out}: {error.strerror or error}") from error
    click.echo(f"wrote {out}; serve it with: baton up --model {out}")
