"""Imports go downwards only, at the top of modules and inside of functions, and what is public is what is listed."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import REPOSITORY

PACKAGE = REPOSITORY / "monarch_slurm"
LAYERS = [
    "config", "wire", "native_build", "gpu", "host", "actor", "rdma", "collectives", "controller", "health", "spmd",
    "job", "tensor", "train", "cli", "_rust_bindings", "_src", "tools", "__main__",
]  # fmt: skip
"""From the lowest. The modules of ``BASE`` lie below all of them."""

BASE = {
    "errors",
    "_version",
    "durations",
    "inherited",
    "interpreter",
    "interrupts",
    "monarch_keys",
    "owned_files",
    "prompt",
    "py_buffer",
    "rank_ranges",
    "tensor_memory",
    "transport",
}
PUBLIC = [
    "monarch_slurm",
    *(f"monarch_slurm.{name}" for name in ("wire", "host", "actor", "rdma", "collectives", "controller")),
]


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def layer_of(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    """Line and full name of every module of this package that ``path`` imports, wherever in its text."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_downwards(path: Path) -> None:
    here = layer_of(path)
    if here == "__init__":
        return
    for line, name in imports_of(path):
        parts = name.split(".")
        if parts[0] != "monarch_slurm" or len(parts) < 2 or parts[1].startswith("__"):
            continue
        there = parts[1]
        assert there in {*LAYERS, *BASE}, f"{path}:{line}: {name} is of no known layer"
        if there in BASE or there == here:
            continue
        assert here in LAYERS, f"{path}:{line}: {here} imports nothing of ours"
        assert LAYERS.index(there) < LAYERS.index(here), f"{path}:{line}: {here} may not import {name}"


@pytest.mark.parametrize("layer", ["wire", "host", "actor", "controller"])
def test_no_cycle_is_dodged_by_an_import_inside_of_a_function(layer: str) -> None:
    for path in sorted((PACKAGE / layer).glob("*.py")):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                for node in ast.walk(function):
                    assert not isinstance(node, ast.Import | ast.ImportFrom), f"{path}:{node.lineno}"


@pytest.mark.parametrize("name", PUBLIC)
def test_export_lists(name: str) -> None:
    module = importlib.import_module(name)
    listed = module.__all__
    assert listed == sorted(listed, key=_ruff_order), "in ruff's order"
    assert len(set(listed)) == len(listed)
    for exported in listed:
        assert hasattr(module, exported), exported
    tree = ast.parse(Path(str(module.__file__)).read_text())
    imported = {
        alias.asname or alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert imported - {"annotations"} == set(listed), "what is imported here is what is exported"


def _ruff_order(name: str) -> tuple[int, str]:
    if name.isupper():
        return 0, name
    return (1, name) if name.lstrip("_")[0].isupper() else (2, name)


@pytest.mark.parametrize("name", [*PUBLIC, "monarch_slurm.actor.proc_main", "monarch_slurm.host.zygote"])
def test_each_part_can_be_imported_first(name: str) -> None:
    subprocess.run([sys.executable, "-c", f"import {name}"], check=True, cwd=REPOSITORY)


def test_the_runtime_imports_nothing_heavy() -> None:
    code = (
        "import sys, monarch_slurm.controller; print([m for m in ('torch', 'numpy', 'submitit') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], check=True, cwd=REPOSITORY, capture_output=True, text=True)
    assert run.stdout.strip() == "[]"


def test_modules_are_of_a_size_that_can_be_read() -> None:
    for layer in ("wire", "host", "actor", "controller"):
        for path in (PACKAGE / layer).glob("*.py"):
            assert len(path.read_text().splitlines()) <= 450, path
