"""The commands about a run folder, on the real command line."""

import json
from pathlib import Path

import pytest
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.unit.training.test_train_command import TINY, tpu_train
from tpu_train.checking import compose_checked
from tpu_train.training.saved_run import SavedRun
from tpu_train.training.trainer import train


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of a tokenizer of its own, and one of bytes."""
    folder = tmp_path_factory.mktemp("commands")
    vocab = {char: i for i, char in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), "<|endoftext|>"])}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    words = [*TINY, "training.steps=2"]
    own = ["tokenizer=file", f"tokenizer.path='{folder}/tokenizer.json'"]
    assert train(compose_checked([*words, f"run_dir='{folder}/bytes'"])) == 0
    assert train(compose_checked([*words, *own, f"run_dir='{folder}/own'"])) == 0
    return folder


def test_text_is_generated_for_a_batch_of_prompts(folder: Path) -> None:
    (folder / "prompts.txt").write_text("def f(\nimport\n")
    words = ["generate", "run_dir=bytes", "prompts_file=prompts.txt", "num_samples=2", "max_tokens=8", "--json"]
    done = tpu_train(*words, cwd=folder)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["step"] == 2
    assert [sample["prompt"] for sample in found["samples"]] == ["def f(", "def f(", "import", "import"]
    assert found["decode_tokens_per_s"] > 0
    again = tpu_train(*words, cwd=folder)
    assert json.loads(again.stdout)["samples"] == found["samples"]


def test_a_run_goes_out_to_transformers_and_comes_back(folder: Path) -> None:
    done = tpu_train("export", "run_dir=own", "hf_dir=hf", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "step 2 is in hf\n"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "hf")
    assert type(model).__name__ == "Qwen3ForCausalLM"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "hf")
    assert tokenizer.decode(tokenizer("def f():")["input_ids"]) == "def f():"
    done = tpu_train("import", "hf_dir=hf", "run_dir=back", "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    original, back = SavedRun(folder / "own"), SavedRun(folder / "back")
    assert json.loads(done.stdout)["parameters"] == sum(p.numel() for p in model.parameters())
    before, after = original.describe(2)["tensors"], back.describe(0)["tensors"]
    assert {n: t for n, t in before.items() if n.startswith("params")} == {
        n: t for n, t in after.items() if n.startswith("params")
    }
    words = [*TINY, "checkpoint.init_from=hf", "optimizer.lr=0", "training.steps=1", "run_dir=begun"]
    assert tpu_train(*words, cwd=folder).returncode == 0
    begun = SavedRun(folder / "begun").describe(1)["tensors"]
    assert all(begun[name] == tensor for name, tensor in after.items() if name.startswith("params"))
    refused = tpu_train(*words, "model.ffn_dim=32", "run_dir=other", cwd=folder)
    assert refused.returncode == 2
    assert "command line 'model.ffn_dim=32': model.ffn_dim is 32" in refused.stderr
    assert not (folder / "other").exists()
    text = tpu_train("generate", "run_dir=back", "prompt=x", "max_tokens=4", "temperature=0", cwd=folder)
    assert text.returncode == 0, text.stderr
    assert text.stdout.startswith("x")
    assert text.stdout.splitlines()[-1].endswith("new tokens/s)")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["generate"], "command line: run_dir is required and has no value"),
        (["generate", "run_dir=none"], "run_dir: none is not a run folder: none/config.yaml cannot be read"),
        (["generate", "run_dir=bytes", "step=7"], "run_dir: bytes has no checkpoint of step 7; those there are: 2"),
        (["generate", "run_dir=bytes", "prompts_file=nowhere.txt"], "prompts_file: "),
        (["generate", "run_dir=bytes", "prompt=a", "prompts_file=b"], "prompts_file: "),
        (["show", "checkpoint", "run_dir=bytes", "step=1"], "bytes has no checkpoint of step 1"),
        (["export", "run_dir=bytes", "hf_dir=bytes"], "hf_dir: "),
        (["import", "hf_dir=bytes", "run_dir=new"], "hf_dir: "),
        (["import", "hf_dir=bytes", "run_dri=new"], "there is no key 'run_dri'; nearest is 'run_dir'"),
    ],
)
def test_what_cannot_be_done_is_refused(words: list[str], message: str, folder: Path) -> None:
    done = tpu_train(*words, cwd=folder)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (folder / "new").exists()
