"""``monarch-slurm build-native``."""

from __future__ import annotations

import click


@click.command("build-native")
@click.option("--platform", type=click.Choice(["rocm", "cuda", "none"]), help="GPU platform [default: what is found].")
@click.option("--force", is_flag=True, help="Build again what is built already.")
def build(platform: str | None, force: bool) -> None:
    """Build the native modules against this Python and torch, into the cache; else they are built at first use."""
    from monarch_slurm.native_build import build_native

    for name, path in build_native(platform=platform, force=force).items():
        click.echo(f"{name}: {path}")
