"""Models are pure PyTorch: `tpu_train.models` imports torch, itself and the standard library."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "tpu_train" / "models").rglob("*.py"))
IMPORT_ALL_WITH_OTHERS_BLOCKED = """
import importlib, pkgutil, sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"jax", "jaxlib", "hydra", "omegaconf"}:
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Block())
import tpu_train.models
for module in pkgutil.walk_packages(tpu_train.models.__path__, "tpu_train.models."):
    importlib.import_module(module.name)
from tpu_train.models.families import FAMILIES
print(*FAMILIES)
"""


def test_models_import_with_jax_hydra_and_omegaconf_blocked():
    result = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL_WITH_OTHERS_BLOCKED], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "llama3" in result.stdout.split()


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_model_file_names_no_other_package(file):
    for statement in ast.walk(ast.parse(file.read_text())):
        if isinstance(statement, ast.Import):
            names = [alias.name for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom):
            assert statement.level == 0
            names = [statement.module or ""]
        else:
            continue
        for name in names:
            assert name.partition(".")[0] in {"torch", *sys.stdlib_module_names} or name.startswith("tpu_train.models.")
