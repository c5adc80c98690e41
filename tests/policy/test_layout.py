"""The rules of the package's layout: imports point one way, jax stays behind the lowering, files stay readable."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "tpu_train"

# A stage imports only stages before it.
STAGES = (
    "config",
    "models",
    "kernels",
    "sharding",
    "lowering",
    "optim",
    "objectives",
    "graph",
    "execution",
    "planning",
    "data",
    "training",
    "checking",
    "sweeps",
    "cli",
)
MAY_IMPORT_JAX = {"kernels", "lowering", "execution", "planning"}

FILES = sorted(PACKAGE.rglob("*.py"))
SCRIPTS = sorted(path for path in (ROOT / "scripts").rglob("*.py"))


def stage_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_modules(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_every_folder_is_a_stage() -> None:
    assert {stage_of(path) for path in FILES} - {"__init__"} <= set(STAGES)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path: Path) -> None:
    if path == PACKAGE / "__init__.py":
        return
    allowed = STAGES[: STAGES.index(stage_of(path)) + 1]
    for module in imported_modules(path):
        parts = module.split(".")
        if parts[0] == "tpu_train" and len(parts) > 1:
            assert parts[1] in allowed, f"{path.name} imports {module}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_only_the_stages_behind_the_lowering_import_jax(path: Path) -> None:
    names = {module.split(".")[0] for module in imported_modules(path)}
    assert "jax" not in names or stage_of(path) in MAY_IMPORT_JAX


@pytest.mark.parametrize("path", [*FILES, *SCRIPTS], ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_stay_readable(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= 500
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno <= 80, f"{path.name}:{node.lineno} {node.name}"
