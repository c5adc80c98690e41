"""The wheel carries the YAML, and what it installs works from any folder."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_wheel_works_without_the_repository(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    installed = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    shipped = {path.relative_to(ROOT / "conf") for path in (ROOT / "conf").rglob("*.yaml")}
    assert {path.relative_to(installed / "tpu_train/conf") for path in installed.rglob("*.yaml")} == shipped
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    check = [sys.executable, "-c", "import tpu_train.cli as cli; print(cli.__file__); cli.main(['check', '--json'])"]
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run(
        check, cwd=elsewhere, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(installed))
    assert '"model": "qwen3_debug"' in done.stdout
