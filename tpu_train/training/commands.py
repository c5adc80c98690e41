"""The commands about a run folder: generate, export, import, show checkpoint."""

import dataclasses
from pathlib import Path
from typing import Any

from tpu_train.config.command_settings import CheckpointSettings, ExportSettings, GenerateSettings, ImportSettings
from tpu_train.config.compose import compose
from tpu_train.config.problems import ConfigError, Problem, refused_at
from tpu_train.config.schema import FileTokenizer, Run
from tpu_train.data.tokenizers import build_tokenizer
from tpu_train.execution.program import LoweringOptions
from tpu_train.execution.runtime import Runtime
from tpu_train.training.build import DTYPES
from tpu_train.training.checkpoints import Checkpoints, checkpoint_meta
from tpu_train.training.console import console_logging
from tpu_train.training.engine import Engine
from tpu_train.training.generation import Generator, read_prompts
from tpu_train.training.huggingface import read_folder, write_folder
from tpu_train.training.run_folder import RunFolder
from tpu_train.training.saved_run import SavedRun
from tpu_train.training.weights import load_as


def describe_checkpoint(settings: CheckpointSettings) -> tuple[dict[str, Any], str]:
    """Step, data position and every tensor of a checkpoint, as data and as text.

    Raises:
        ConfigError: there is no such checkpoint.
    """
    saved, step = _open_run(settings.run_dir, settings.step)
    found = saved.describe(step)
    lines = [f"{name:<18}{value}" for name, value in found.items() if name != "tensors"]
    width = max(map(len, found["tensors"]))
    lines += [
        f"{name:<{width}}  {tensor['dtype']}{tensor['shape']}  sha256 {tensor['sha256']}"
        for name, tensor in found["tensors"].items()
    ]
    return found, "\n".join(lines)


def generate(settings: GenerateSettings) -> tuple[dict[str, Any], str]:
    """Continuations of prompts, as data and as text.

    Raises:
        ConfigError: there is no such checkpoint, or a prompt that cannot be used.
    """
    saved, step = _open_run(settings.run_dir, settings.step)
    run = saved.run
    with refused_at("prompts_file"):
        prompts = read_prompts(settings)
    with console_logging(), refused_at("run_dir"):
        runtime = Runtime(run.runtime.platform)
        source = saved.weights(step)
        params = {name: runtime.put(source.load(name)) for name in source.specs}
        generator = Generator(
            run.model,
            params,
            runtime,
            build_tokenizer(run.tokenizer),
            compute_dtype=DTYPES[run.precision.compute],
            lowering=LoweringOptions(run.precision.matmul, run.mode.check_graph),
        )
        generated = generator.generate(prompts, settings)
    found = {
        "step": step,
        "samples": [dataclasses.asdict(sample) for sample in generated.samples],
        "prefill_tokens_per_s": generated.prefill_tokens_per_s,
        "decode_tokens_per_s": generated.decode_tokens_per_s,
    }
    texts = [f"{sample.prompt}{sample.text}" for sample in generated.samples]
    speed = f"({found['prefill_tokens_per_s']:,.0f} prompt and {found['decode_tokens_per_s']:,.0f} new tokens/s)"
    return found, "\n\n".join([*texts, speed])


def export(settings: ExportSettings) -> dict[str, Any]:
    """A Hugging Face folder of a checkpoint.

    Raises:
        ConfigError: there is no such checkpoint, or the folder cannot be written.
    """
    saved, step = _open_run(settings.run_dir, settings.step)
    run = saved.run
    tokenizer = Path(run.tokenizer.path).expanduser() if isinstance(run.tokenizer, FileTokenizer) else None
    eos_ids = () if tokenizer else (build_tokenizer(run.tokenizer).eos_id,)
    target = Path(settings.hf_dir).expanduser()
    with refused_at("hf_dir"):
        write_folder(target, run.model, saved.weights(step), settings.dtype, tokenizer, eos_ids=eos_ids)
    return {"step": step, "hf_dir": str(target)}


def import_(settings: ImportSettings) -> dict[str, Any]:
    """A run folder, at step 0, of a Hugging Face folder's weights.

    Raises:
        ConfigError: the folder cannot be read, or the run folder holds a run already.
    """
    target = Path(settings.run_dir).expanduser()
    with refused_at("hf_dir"):
        folder = read_folder(Path(settings.hf_dir).expanduser())
    if (target / "config.yaml").exists():
        raise ConfigError([Problem("run_dir", f"{target} holds a run already; choose another folder")])
    base = compose([]).run
    tokenizer = FileTokenizer(name="file", path=str(folder.tokenizer_path)) if folder.tokenizer_path else base.tokenizer
    run: Run = dataclasses.replace(
        base,
        model=folder.model,
        tokenizer=tokenizer,
        precision=dataclasses.replace(base.precision, param=folder.dtype, compute=folder.dtype),
        training=dataclasses.replace(base.training, seq_len=folder.model.seq_len),
        run_dir=str(target),
    )
    runtime = Runtime("cpu")
    engine = Engine(run, runtime)
    params = engine.place(lambda name: load_as(folder.source, name, folder.dtype))
    RunFolder(target, run).close()
    checkpoints = Checkpoints(target)
    checkpoints.save(0, engine.state_from(params), checkpoint_meta(run, 0, 0, None, 0))
    checkpoints.wait()
    return {"run_dir": str(target), "parameters": sum(p.size for p in params.values())}


def _open_run(run_dir: str, step: int | None) -> tuple[SavedRun, int]:
    """A run folder and one of its checkpoints, which is whole.

    Raises:
        ConfigError: either is not there.
    """
    with refused_at("run_dir"):
        saved = SavedRun(Path(run_dir).expanduser())
        return saved, saved.step(step)
