"""Names, parameters and defaults that programs written for Monarch use, as recorded from it: all of them are here."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

OTHER_DEFAULTS = {"SlurmJob": {"python_exe", "monarch_port"}}
"""Defaults that are deliberately others."""


def recorded() -> Iterator[tuple[str, str]]:
    module = ""
    for line in (Path(__file__).parent / "monarch_signatures.txt").read_text().splitlines():
        if line.startswith(" "):
            yield module, line.strip()
        else:
            module = line


def find(module: str, name: str) -> Any:
    """Return what has the name, unbound; endpoints as the methods that they are."""
    first, *rest = name.split(".")
    found = getattr(importlib.import_module(f"monarch_slurm.{module}"), first)
    for part in rest:
        if not isinstance(found, type):
            return getattr(found, part)
        if part in getattr(found, "__dataclass_fields__", {}):
            return None
        found = inspect.getattr_static(found, part)
    return getattr(found, "_method", getattr(found, "__func__", found))


def parameters(text: str) -> list[inspect.Parameter]:
    """Return the parameters of a recorded signature; those whose default is ``...`` have one that no text can tell."""
    arguments = ast.parse(f"def f{text}: ...").body[0].args  # type: ignore[attr-defined]
    code = ast.unparse(arguments)
    namespace: dict[str, Any] = {}
    exec(f"def f({code}): ...", namespace)
    return list(inspect.signature(namespace["f"]).parameters.values())


STARS = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@pytest.mark.parametrize(("module", "entry"), list(recorded()))
def test_what_monarch_takes_is_taken(module: str, entry: str) -> None:
    name, bracket, rest = entry.partition("(")
    ours = find(module, name)
    if not bracket:
        return
    here = [p for p in inspect.signature(ours).parameters.values() if p.name not in ("self", "cls")]
    wanted = parameters(bracket + rest)
    by_name = {p.name: p for p in here}
    for place, parameter in enumerate(wanted):
        if parameter.kind in STARS:
            assert parameter.kind in [p.kind for p in here], f"{entry} takes any"
            continue
        assert parameter.name in by_name, f"{entry} has {parameter.name}"
        found = by_name[parameter.name]
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            assert here[place] is found, f"{parameter.name} is argument {place} of {entry}"
        if parameter.default not in (parameter.empty, ...) and parameter.name not in OTHER_DEFAULTS.get(name, ()):
            assert found.default == parameter.default, f"{entry}: {parameter.name}"
        elif parameter.default is not parameter.empty:
            assert found.default is not parameter.empty, f"{entry}: {parameter.name} may be left out"
    names = {p.name for p in wanted}
    for p in here:
        optional = p.default is not p.empty or p.kind in STARS
        assert p.name in names or optional, f"{entry}: Monarch's programs do not give {p.name}"
