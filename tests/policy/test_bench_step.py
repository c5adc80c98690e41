"""scripts/bench_step runs, its contenders agree, and its JSON has what it says."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_step.py"
TINY = ["model.dim=16", "model.num_layers=1", "model.ffn_dim=32", "model.vocab_size=300", "training.seq_len=16"]


def test_the_contenders_agree_on_a_tiny_model() -> None:
    words = ["--json", "--steps", "2", "--warmup", "1", "--without", "compile", *TINY]
    done = subprocess.run([sys.executable, SCRIPT, *words], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["contenders"].keys() == {"eager", "jax", "graph"}
    for row in result["contenders"].values():
        assert row["seconds"] > 0
        assert row["ratio_to_graph"] == row["seconds"] / result["contenders"]["graph"]["seconds"]
