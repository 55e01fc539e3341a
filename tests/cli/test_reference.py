"""site/cli.md is what the commands say of themselves. ``pytest --update tests/cli/test_reference.py`` renews it."""

from __future__ import annotations

from collections.abc import Iterator

import click
import pytest
from support import REPOSITORY

from monarch_slurm.cli.main import cli

PAGE = REPOSITORY / "site" / "cli.md"
WIDTH = 110

HEAD = """\
# The command line

```sh
monarch-slurm submit --nodes 4 --partition mi300 --gpus-per-node 8 train.py   # or: train, template
monarch-slurm status            # your jobs; with a number, what one of them is doing
monarch-slurm logs -f 12345     # what its program prints; --host, --rank: what its nodes print
monarch-slurm attach 12345      # a second terminal onto it
monarch-slurm cancel 12345
```

A job is named by Slurm's number or by the path of its folder. The commands find the folder by what Slurm says of the
job, or, when Slurm has forgotten it, as `runs/NUMBER` here (`--log-dir` names another place). `status` and `attach` ask
the program itself, over an encrypted connection whose keys are in the job's folder; the machine that you type on must
reach the head node.

| exit code | means |
| --- | --- |
| 0 | success |
| 1 | what was asked for has failed; a line on standard error says why |
| 2 | a wrong command line: an unknown option, a value that cannot be, a file that is not there or not of the kind |
| 3 | `doctor`: something must be mended |
| 75 | `train`: ended early, and the state is saved |
| 130 | interrupted |
| other | of the program that `exec`, `submit --follow` or `train` runs |

`submit` looks for the program's file, `--venv` and the image of `--container` before it asks Slurm, unless `--setup`
may make them.

## Completion

bash, in `~/.bashrc`: `eval "$(_MONARCH_SLURM_COMPLETE=bash_source monarch-slurm)"`.
zsh, in `~/.zshrc`: `eval "$(_MONARCH_SLURM_COMPLETE=zsh_source monarch-slurm)"`.
fish, in `~/.config/fish/completions/monarch-slurm.fish`: `_MONARCH_SLURM_COMPLETE=fish_source monarch-slurm | source`.

# Commands

What follows is what `--help` prints.
"""


def commands(group: click.Group, context: click.Context) -> Iterator[tuple[str, str]]:
    """Name and help of each command, in order; those of a group after it."""
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        command._help_option = None  # click keeps what the first who asked has got, maybe a test without the group
        inner = click.Context(command, context, name, terminal_width=WIDTH, max_content_width=WIDTH)
        yield inner.command_path, command.get_help(inner)
        if isinstance(command, click.Group):
            yield from commands(command, inner)


def reference() -> str:
    context = click.Context(cli, info_name="monarch-slurm", **cli.context_settings)
    parts = [f"\n## {name}\n\n```text\n{text}\n```\n" for name, text in commands(cli, context)]
    return HEAD + "".join(parts)


def test_the_page_is_up_to_date(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--update"):
        PAGE.write_text(reference())
    assert PAGE.read_text() == reference()


def test_every_command_and_option_says_what_it_is() -> None:
    for name, command in cli.commands.items():
        assert command.help, name
        assert len(command.get_short_help_str(60)) > 10, name


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_can_be_had_for(shell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None
    completion = kind(cli, {}, "monarch-slurm", "_MONARCH_SLURM_COMPLETE")
    assert {item.value for item in completion.get_completions(["template"], "")} == {"list", "render", "show"}
    assert "--dry-run" in {item.value for item in completion.get_completions(["submit"], "--d")}
