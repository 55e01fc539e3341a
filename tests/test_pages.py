"""What README and the pages of site/ show can be typed: commands have these options, programs these names."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
from support import REPOSITORY

from monarch_slurm.cli.main import cli

PAGES = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *sorted((REPOSITORY / "site").glob("*.md"))]

ASSUMED = ["hosts", "procs", "trainers", "train"]
"""Names that examples may have from the text around them."""


def blocks(page: Path, kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def commands(page: Path) -> list[str]:
    """Command lines of ``monarch-slurm`` in shell blocks and in the text."""
    lines = [line for block in blocks(page, "sh") for line in block.splitlines()]
    lines += re.findall(r"`(monarch-slurm [^`\n]+)`", page.read_text())
    return [line for line in lines if line.startswith("monarch-slurm ")]


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.name)
def test_names_in_programs_are_defined(page: Path) -> None:
    program = "\n".join(blocks(page, "python"))
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--isolated", "--select=F821,E9", "--output-format=concise",
         f"--config=builtins={ASSUMED!r}", "--stdin-filename", f"{page.stem}.py", "-"],
        input=program, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=lambda page: page.name)
def test_commands_are_understood(page: Path) -> None:
    for line in commands(page):
        words = shlex.split(line, comments=True)[1:]
        command: click.Command = cli
        context = click.Context(cli, info_name="monarch-slurm")
        while isinstance(command, click.Group):
            name = words.pop(0) if words else ""
            if name.startswith("-"):
                break
            found = command.get_command(context, name)
            assert found is not None, f"{line}: there is no {name!r}"
            command = found
            context = click.Context(command, context, info_name=name)
            if not words:
                break  # it is spoken of by its name
        else:
            try:
                command.make_context(line, words)
            except click.exceptions.Exit:  # --help
                continue
            except click.MissingParameter:
                continue  # a part of a command line
            except click.UsageError as error:
                pytest.fail(f"{line}: {error.format_message()}")
