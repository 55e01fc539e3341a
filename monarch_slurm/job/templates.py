"""Batch scripts that a site can copy and edit: the files of ``sbatch_templates``, and filling them in. Pure text.

What can be filled in is written in the template itself: Slurm's options, on (``#SBATCH --nodes=2``) or off
(``##SBATCH --partition=PARTITION``), and the shell variables in capitals (``VENV=""``).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from monarch_slurm.job.errors import JobError, JobSpecError
from monarch_slurm.job.request import TIME_LIMIT

_OPTION = re.compile(r"^##?SBATCH --([a-z-]+)=(.*)$", re.MULTILINE)
_SETTING = re.compile(r"""^([A-Z][A-Z_]*)=("[^"\n]*"|[^\s"]*)(\s+#.*)?$""", re.MULTILINE)
_COUNTS = ("nodes", "ntasks-per-node", "gpus-per-node", "cpus-per-task", "spares")


@dataclass(frozen=True)
class Template:
    """One batch script.

    Attributes:
        name: of its file, without the ending.
        text: the whole of it.
    """

    name: str
    text: str

    @property
    def title(self) -> str:
        """What it is for, in one line."""
        return self.text.splitlines()[1].removeprefix("# ")

    @property
    def fields(self) -> dict[str, str]:
        """What can be filled in, with what the template says itself; an option that is off has an empty text."""
        found = dict(_fields_of(self.text))
        return dict(sorted(found.items()))


def templates() -> dict[str, Template]:
    """Return all templates by name.

    Raises:
        JobError: this installation came without them.
    """
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "sbatch_templates", package.parent / "sbatch_templates"):
        if found := sorted(folder.glob("*.sbatch")):
            return {path.stem: Template(path.stem, path.read_text(encoding="utf-8")) for path in found}
    raise JobError(f"{package} was installed without the templates; install monarch_slurm from its source")


def find_template(name: str) -> Template:
    """Return the template of this name.

    Raises:
        JobSpecError: there is none.
    """
    known = templates()
    if name not in known:
        raise JobSpecError(f"no template {name!r}; there are: {', '.join(known)}")
    return known[name]


def render(template: Template, values: Mapping[str, str]) -> str:
    """Return the text of ``template`` with ``values`` filled in; an empty value turns an option of Slurm off.

    Raises:
        JobSpecError: the template has no such field, or a value makes no sense there.
    """
    fields = template.fields
    for name, value in values.items():
        if name not in fields:
            raise JobSpecError(f"template {template.name} has no {name!r}; it has: {', '.join(fields)}")
        _check(name, value)

    def fill_option(match: re.Match[str]) -> str:
        value = values.get(match[1])
        if value is None:
            return match[0]
        return f"#SBATCH --{match[1]}={shlex.quote(value)}" if value else f"##SBATCH --{match[1]}={match[2]}"

    def fill_setting(match: re.Match[str]) -> str:
        value = values.get(_name_of(match[1]))
        return match[0] if value is None else f"{match[1]}={shlex.quote(value)}{match[3] or ''}"

    return _SETTING.sub(fill_setting, _OPTION.sub(fill_option, template.text))


def _fields_of(text: str) -> Iterator[tuple[str, str]]:
    for match in _OPTION.finditer(text):
        yield match[1], "" if match[0].startswith("##") else match[2]
    for match in _SETTING.finditer(text):
        yield _name_of(match[1]), match[2].strip('"')


def _name_of(variable: str) -> str:
    return variable.lower().replace("_", "-")


def _check(name: str, value: str) -> None:
    if "\n" in value:
        raise JobSpecError(f"{name}: a value of one line expected")
    if name in _COUNTS and not re.fullmatch(r"[0-9]*[1-9][0-9]*|" if name != "spares" else r"[0-9]*", value):
        raise JobSpecError(f"{name}={value}: a whole number, {0 if name == 'spares' else 1} or more, expected")
    if name == "time" and value and not TIME_LIMIT.fullmatch(value):
        raise JobSpecError(f"time={value}: minutes, hours:minutes:seconds or days-hours:minutes:seconds expected")
