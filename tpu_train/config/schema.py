"""The configuration's schema: every key that exists, its type, its rule and its meaning.

Key idea: a choice of a group (`optimizer=sgd`) is a dataclass of its own, told apart by a `Literal` field; a group's
field is the union of its choices. A key without a default must be set by a YAML, which is where defaults live.
"""

import dataclasses
from typing import Literal

from tpu_train.config.fields import (
    FloatName,
    above,
    at_least,
    between,
    duration,
    key,
    not_empty,
    step_or_mode,
    steps_or_duration,
)
from tpu_train.config.kernel_schema import Kernels
from tpu_train.config.parallelism_schema import (
    DdpParallelism,
    EpParallelism,
    Fsdp2dParallelism,
    FsdpEpParallelism,
    FsdpParallelism,
    FsdpTpParallelism,
    SingleParallelism,
    TpParallelism,
)

Scalar = bool | int | float | str


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama 3.1's frequency scaling of rotary embeddings."""

    factor: float = key("Divides the low frequencies.", rule=at_least(1))
    low_freq_factor: float = key("Wavelengths above original_max_positions / this are divided.", rule=above(0))
    high_freq_factor: float = key("Wavelengths below original_max_positions / this are kept.", rule=above(0))
    original_max_positions: int = key("Context length before scaling.", rule=at_least(1), unit="tokens")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderModel:
    """Sizes of a decoder-only language model."""

    dim: int = key("Width of the residual stream.", rule=at_least(1))
    num_layers: int = key("Number of decoder layers.", rule=at_least(1))
    num_heads: int = key("Number of query heads.", rule=at_least(1))
    num_kv_heads: int = key("Number of key/value heads; divides num_heads.", rule=at_least(1))
    head_dim: int = key("Width of one head; even. Need not be dim / num_heads.", rule=at_least(2))
    ffn_dim: int = key("Width of the gated feed-forward layer.", rule=at_least(1))
    vocab_size: int = key("Rows of the embedding; at least the tokenizer's vocabulary.", rule=at_least(1))
    rope_theta: float = key("Base of the rotary frequencies.", rule=above(1))
    norm_eps: float = key("Epsilon of the RMS norms.", rule=above(0))
    tie_embeddings: bool = key("Whether the output projection is the embedding.")
    init_std: float = key("Standard deviation of initial weights.", rule=above(0), default=0.02)
    dropout: float = key("Probability of dropping an element of each residual branch.", rule=between(0, 1), default=0.0)
    seq_len: int = key("Default of training.seq_len.", rule=at_least(1), unit="tokens")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama3Model(DecoderModel):
    """Llama 3."""

    family: Literal["llama3"] = key("Model family.")
    rope_scaling: RopeScaling | None = key("Llama 3.1's frequency scaling; null for none.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3Model(DecoderModel):
    """Qwen3 dense: RMS norms on queries and keys."""

    family: Literal["qwen3"] = key("Model family.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3MoeModel(DecoderModel):
    """Qwen3 with a mixture of experts in every layer."""

    family: Literal["qwen3_moe"] = key("Model family.")
    ffn_dim: int = key("Width of one expert's gated feed-forward layer.", rule=at_least(1))
    num_experts: int = key("Number of experts per layer.", rule=at_least(1))
    top_k: int = key("Experts that each token is sent to; at most num_experts.", rule=at_least(1), unit="experts")
    norm_topk_prob: bool = key("Whether the weights of a token's experts are divided by their sum.")
    router_aux_loss_coef: float = key(
        "Coefficient of the load-balancing loss, of each microbatch by itself; 0: off.", rule=at_least(0), default=0.0
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CausalLmObjective:
    """Next-token cross-entropy."""

    name: Literal["causal_lm"] = key("Objective.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GraphMode:
    """The whole step captured by make_fx as one graph and run as one XLA program."""

    name: Literal["graph"] = key("Execution mode.")
    passes: tuple[str, ...] = key("Graph passes to run; the order is the program's own.")
    check_graph: bool = key("Compare each node's shape and dtype with PyTorch's while lowering; for finding faults.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Precision:
    """Number formats."""

    param: FloatName = key("Dtype of the weights and of the optimizer's moments.")
    compute: FloatName = key("Dtype that weights are cast to for forward and backward.")
    matmul: Literal["default", "high", "highest"] = key(
        "Passes of a float32 product on TPU: one, three or six bfloat16 products; ignored elsewhere."
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamW:
    """AdamW as in torch.optim."""

    name: Literal["adamw"] = key("Optimizer.")
    lr: float = key("Peak learning rate.", rule=at_least(0))
    beta1: float = key("Decay of the first moment.", rule=between(0, 1))
    beta2: float = key("Decay of the second moment.", rule=between(0, 1))
    eps: float = key("Added to the root of the second moment.", rule=above(0))
    weight_decay: float = key("Decoupled weight decay.", rule=at_least(0))
    no_decay: tuple[str, ...] = key("Kinds of parameters without decay: any of norm, bias, embedding.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sgd:
    """SGD with momentum as in torch.optim."""

    name: Literal["sgd"] = key("Optimizer.")
    lr: float = key("Peak learning rate.", rule=at_least(0))
    momentum: float = key("Momentum; 0 for none.", rule=between(0, 1))
    weight_decay: float = key("L2 penalty added to the gradient.", rule=at_least(0))
    no_decay: tuple[str, ...] = key("Kinds of parameters without decay: any of norm, bias, embedding.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConstantSchedule:
    """Linear warm-up, then the peak rate."""

    name: Literal["constant"] = key("Schedule.")
    warmup_steps: int = key(
        "Length of the linear warm-up; the first step has a positive rate.", rule=at_least(0), unit="steps"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CosineSchedule:
    """Linear warm-up, then half a cosine down to a fraction of the peak."""

    name: Literal["cosine"] = key("Schedule.")
    warmup_steps: int = key(
        "Length of the linear warm-up; the first step has a positive rate.", rule=at_least(0), unit="steps"
    )
    min_ratio: float = key("Last rate as a fraction of the peak.", rule=at_least(0))


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearSchedule:
    """Linear warm-up, then a line down to a fraction of the peak."""

    name: Literal["linear"] = key("Schedule.")
    warmup_steps: int = key(
        "Length of the linear warm-up; the first step has a positive rate.", rule=at_least(0), unit="steps"
    )
    min_ratio: float = key("Last rate as a fraction of the peak.", rule=at_least(0))


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarmupStableDecaySchedule:
    """Linear warm-up, the peak rate, then a line down to a fraction of the peak (WSD)."""

    name: Literal["warmup_stable_decay"] = key("Schedule.")
    warmup_steps: int = key(
        "Length of the linear warm-up; the first step has a positive rate.", rule=at_least(0), unit="steps"
    )
    decay_steps: int = key("Length of the final decay.", rule=at_least(0), unit="steps")
    min_ratio: float = key("Last rate as a fraction of the peak.", rule=at_least(0))


@dataclasses.dataclass(frozen=True, kw_only=True)
class DocumentData:
    """What all data sets of documents have."""

    held_out_fraction: float = key("Share of the documents kept for validation.", rule=between(0, 1))
    document_mask: bool = key(
        "Whether documents packed into one sequence do not see each other, and positions begin anew in each."
    )
    shuffle: Literal["documents", "blocks", "none"] = key(
        "What is put into another order in each epoch: documents before they are packed, or packed sequences."
    )
    epochs: int | None = key(
        "Passes over the data that the run may take; null: as many as training.steps needs.", rule=at_least(1)
    )
    num_workers: int = key("Processes that tokenize and that load; 0: none.", rule=at_least(0), unit="processes")
    cache_dir: str | None = key(
        "Folder that tokenized data is kept in for later runs; null: tpu-train/tokens in the user's cache folder.",
        rule=not_empty,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class StdlibData(DocumentData):
    """Source files of the running Python's standard library."""

    name: Literal["stdlib"] = key("Data set.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextData(DocumentData):
    """Text files: a `.txt` is one document, `.jsonl` (also `.gz`, `.zst`) and `.parquet` have one a record."""

    name: Literal["text"] = key("Data set.")
    path: str = key("File, folder or glob, local or of any fsspec URL (gs://...).", rule=not_empty)
    held_out_path: str | None = key(
        "Validation data, as path; null: held_out_fraction of the documents of path.", rule=not_empty
    )
    field: str = key("Name of the text field of records.", rule=not_empty)
    on_bad_record: Literal["stop", "skip"] = key(
        "A record that cannot be read ends the run, or is left out and counted."
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class HuggingFaceData(DocumentData):
    """A data set of the Hugging Face `datasets` library; needs the extra `hf`."""

    name: Literal["hf"] = key("Data set.")
    dataset: str = key("Name on the hub, or a local data set folder.", rule=not_empty)
    subset: str | None = key("Configuration of the data set; null: its default.", rule=not_empty)
    split: str = key("Split to train on.", rule=not_empty)
    held_out_split: str | None = key(
        "Split to validate on; null: held_out_fraction of the documents of split.", rule=not_empty
    )
    field: str = key("Name of the text field.", rule=not_empty)
    streaming: bool = key("Read records as they arrive instead of downloading the data set first.")
    on_bad_record: Literal["stop", "skip"] = key(
        "A record that cannot be read ends the run, or is left out and counted."
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SyntheticData:
    """Uniform random tokens, for measuring speed."""

    name: Literal["synthetic"] = key("Data set.")
    num_workers: int = key("Processes that load; 0: none.", rule=at_least(0), unit="processes")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BytesTokenizer:
    """UTF-8 bytes, and two special tokens."""

    name: Literal["bytes"] = key("Tokenizer.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileTokenizer:
    """A `tokenizer.json` of the tokenizers library."""

    name: Literal["file"] = key("Tokenizer.")
    path: str = key("Path of the tokenizer.json.", rule=not_empty)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """The loop."""

    steps: int = key("Length of the run.", rule=at_least(1), unit="optimizer steps")
    seq_len: int = key("Length of a sequence.", rule=at_least(1), unit="tokens")
    batch_per_device: int | None = key(
        "Batch of one device and step; null where global_batch_size is set.", rule=at_least(1), unit="sequences"
    )
    global_batch_size: int | None = key(
        "Batch of a step over all devices; setting it puts batch_per_device's default aside.",
        rule=at_least(1),
        unit="sequences",
    )
    grad_accumulation: int = key("Microbatches per step; divides the batch.", rule=at_least(1), unit="microbatches")
    max_grad_norm: float | None = key(
        "Global gradient norm above which gradients are scaled down; null: off.", rule=above(0)
    )
    seed: int = key("Seed of initial weights, data order and dropout.", rule=between(0, 2**31))
    log_every: int = key(
        "Interval of console lines and loggers; metrics.jsonl has every step.", rule=at_least(1), unit="steps"
    )
    on_nan: Literal["stop", "skip"] = key(
        "A step of non-finite loss or gradient ends the run, or is left out and counted."
    )
    max_time: str | None = key(
        "Wall time after which the run saves and exits with 75, for instance 2h30min; null: none.", rule=duration
    )
    inject_inf_at_step: int | None = key(
        "Rehearsal of on_nan: this step's loss is made infinite; null: off.", rule=at_least(1)
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Validation:
    """Loss on the held-out part."""

    every: int | None = key("Interval of validation; null: at the end of the run only.", rule=at_least(1), unit="steps")
    steps: int = key("Held-out text each time; 0: none.", rule=at_least(0), unit="batches")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """What is kept of a run, and what it starts from."""

    every: int | str | None = key(
        "Interval of checkpoints, in steps or as a duration (10min); null: at the end of the run only.",
        rule=steps_or_duration,
    )
    keep_last: int = key("Newest checkpoints that are kept.", rule=at_least(1), unit="checkpoints")
    keep_every: int | None = key(
        "Checkpoints of steps that this divides are kept besides; null: none.", rule=at_least(1), unit="steps"
    )
    resume: int | str = key(
        "What a run folder that exists goes on from: auto: its newest checkpoint, a step, or never: refused.",
        rule=step_or_mode,
    )
    init_from: str | None = key(
        "Weights that a new run starts from: a Hugging Face folder or a run folder; null: random ones.", rule=not_empty
    )
    on_error: Literal["continue", "stop"] = key(
        "A checkpoint that cannot be written is reported and training goes on, or ends the run."
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Runtime:
    """Devices."""

    platform: Literal["auto", "cpu", "tpu", "gpu"] = key("Platform of the devices; auto is JAX's own choice.")
    devices: int = key(
        "Virtual devices of one process on the CPU; ignored on other platforms.", rule=at_least(1), unit="devices"
    )
    coordinator: str | None = key(
        "host:port of process 0 where several processes train together; null: from the environment (SLURM, GKE, Cloud "
        "TPU), which on a single host says none.",
        rule=not_empty,
        default=None,
    )
    num_processes: int | None = key(
        "Processes that train together; null: as coordinator.", rule=at_least(1), unit="processes", default=None
    )
    process_id: int | None = key(
        "Number of this process, from 0 on; null: as coordinator.", rule=at_least(0), default=None
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wandb:
    """Weights & Biases."""

    mode: Literal["auto", "online", "offline", "disabled"] = key(
        "auto: WANDB_MODE where it is set, else online with an API key and a network, else offline."
    )
    project: str = key("Project that runs appear under.", rule=not_empty)
    name: str | None = key("Name of the run; null: that of the run folder.", rule=not_empty)
    tags: tuple[str, ...] = key("Tags of the run.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorBoard:
    """TensorBoard."""

    enabled: bool = key("Whether event files are written to tensorboard/ in the run folder; needs the extra.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Logging:
    """Where metrics go besides metrics.jsonl."""

    wandb: Wandb = key("Weights & Biases.")
    tensorboard: TensorBoard = key("TensorBoard.")
    metadata: dict[str, Scalar] = key("Entries of your own (cluster, ticket, ...) that loggers show with the config.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A whole run."""

    model: Llama3Model | Qwen3Model | Qwen3MoeModel = key("The model.")
    objective: CausalLmObjective = key("What is minimized.")
    parallelism: (
        SingleParallelism
        | DdpParallelism
        | FsdpParallelism
        | Fsdp2dParallelism
        | TpParallelism
        | FsdpTpParallelism
        | EpParallelism
        | FsdpEpParallelism
    ) = key("How the model is laid over devices.")
    kernels: Kernels = key("Which implementation computes an op of the model.")
    mode: GraphMode = key("How PyTorch code becomes XLA programs.")
    precision: Precision = key("Number formats.")
    optimizer: AdamW | Sgd = key("The update rule.")
    schedule: ConstantSchedule | CosineSchedule | LinearSchedule | WarmupStableDecaySchedule = key(
        "Learning rate over steps."
    )
    data: StdlibData | TextData | HuggingFaceData | SyntheticData = key("The data set.")
    tokenizer: BytesTokenizer | FileTokenizer = key("How text becomes tokens.")
    training: Training = key("The loop.")
    validation: Validation = key("Loss on held-out data.")
    checkpoint: Checkpoint = key("What is kept of a run, and what it starts from.")
    runtime: Runtime = key("Devices.")
    logging: Logging = key("Loggers.")
    run_dir: str | None = key("Folder of the run; null: runs/<date-time>-<model>.", rule=not_empty)
