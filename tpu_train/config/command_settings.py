"""Settings of the commands that are about a run folder, given as words like those of a run.

Key idea: they are sections like the run's, so the same code reads, judges and documents them.
"""

import dataclasses

from tpu_train.config.fields import Rule, at_least, between, key, not_empty
from tpu_train.config.schema import FloatName


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateSettings:
    """Of `tpu-train generate`."""

    run_dir: str = key("Run folder whose weights are sampled from.", rule=not_empty)
    step: int | None = key("Checkpoint; null: the newest.", rule=at_least(0), default=None)
    prompt: str | None = key("Text to continue; null with prompts_file, else an empty document.", default=None)
    prompts_file: str | None = key("Text file of prompts, one a line, run as one batch.", rule=not_empty, default=None)
    num_samples: int = key("Continuations of each prompt.", rule=at_least(1), unit="samples", default=1)
    max_tokens: int = key(
        "Length of a continuation; it ends earlier with its document.", rule=at_least(1), unit="tokens", default=256
    )
    temperature: float = key("Divides the logits; 0: always the likeliest token.", rule=at_least(0), default=0.7)
    top_p: float = key(
        "Sample from the fewest tokens that together have this probability; 1: from all.",
        rule=Rule("a number above 0 and up to 1", lambda value: 0 < value <= 1),
        default=0.9,
    )
    seed: int = key("Seed of the sampling.", rule=between(0, 2**31), default=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """Of `tpu-train show checkpoint`."""

    run_dir: str = key("Run folder.", rule=not_empty)
    step: int | None = key("Checkpoint; null: the newest.", rule=at_least(0), default=None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportSettings:
    """Of `tpu-train export`: from a run folder to a Hugging Face folder."""

    run_dir: str = key("Run folder whose weights are written.", rule=not_empty)
    hf_dir: str = key("Folder to make, with config.json, safetensors and the tokenizer.", rule=not_empty)
    step: int | None = key("Checkpoint; null: the newest.", rule=at_least(0), default=None)
    dtype: FloatName | None = key("Dtype to write; null: that of the checkpoint.", default=None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImportSettings:
    """Of `tpu-train import`: from a Hugging Face folder to a run folder that generates and trains."""

    hf_dir: str = key("Folder with config.json and safetensors.", rule=not_empty)
    run_dir: str = key("Run folder to make.", rule=not_empty)
