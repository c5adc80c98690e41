"""Text from a model's weights: prompts padded to few lengths, prefilled at once, continued token by token.

Key idea: every shape is fixed before the first token, so a batch runs two programs, each compiled once, and the host
reads a step's tokens while the device is at the next.
"""

import dataclasses
import time
import zlib
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from tpu_train.config import schema
from tpu_train.config.command_settings import GenerateSettings
from tpu_train.data.tokenizers import Tokenizer
from tpu_train.execution.program import LoweringOptions, Program
from tpu_train.execution.runtime import Runtime
from tpu_train.graph.capture import Tree, capture
from tpu_train.graph.sampling import Method, make_decode, make_prefill
from tpu_train.lowering.dtypes import torch_dtype
from tpu_train.models.decoder import Decoder
from tpu_train.training.build import build_model

# Prompts are padded to a power of two of at least this many tokens: below it, compiling costs more than padding.
_SHORTEST_BUCKET_TOKENS = 16
# Random numbers drawn per step, of which each row uses one: two prompts share theirs once in so many pairs.
_STREAMS = 4096


@dataclasses.dataclass(frozen=True)
class Sample:
    """One continuation of a prompt.

    Attributes:
        prompt: as given.
        text: of the continuation alone.
        tokens: ids of the continuation, without the EOS that ended it.
        finished: "eos" when the document ended, "length" when `max_tokens` did.
    """

    prompt: str
    text: str
    tokens: tuple[int, ...]
    finished: Literal["eos", "length"]


@dataclasses.dataclass(frozen=True)
class Generated:
    """What a batch of prompts gave; compile times are in no number.

    Attributes:
        samples: `num_samples` per prompt, in the order of the prompts.
        prefill_tokens: tokens put into the cache before the first step: of each row all but its prompt's last.
        decode_tokens: tokens generated, EOS included, what comes after it not.
    """

    samples: tuple[Sample, ...]
    prefill_tokens: int
    prefill_seconds: float
    decode_tokens: int
    decode_seconds: float

    @property
    def prefill_tokens_per_s(self) -> float:
        """Over the whole batch, padding not counted."""
        return self.prefill_tokens / self.prefill_seconds

    @property
    def decode_tokens_per_s(self) -> float:
        """Over the whole batch."""
        return self.decode_tokens / self.decode_seconds


@dataclasses.dataclass(frozen=True)
class _Shape:
    """Sizes of a batch: rows, slots of the prompts and slots of the cache."""

    num_rows: int
    prompt_slots: int
    num_slots: int


class Generator:
    """Continues prompts with a model.

    A sample depends on the weights, the seed, its prompt and its number among the prompt's samples; a prompt given
    twice is continued twice the same. The other prompts of a batch change its shapes only, so the logits by rounding,
    and the text only where two tokens are that close.

    Args:
        config: the model.
        params: all its tensors, device arrays by full name; they are left as they are.
        runtime: the devices.
        tokenizer: of the prompts and the text.
        compute_dtype: floating-point weights are cast to it once, and the cache has it.
        lowering: as for training.
        eos_ids: tokens that end a text, besides the tokenizer's EOS.
    """

    def __init__(
        self,
        config: schema.DecoderModel,
        params: Tree,
        runtime: Runtime,
        tokenizer: Tokenizer,
        *,
        compute_dtype: torch.dtype,
        lowering: LoweringOptions,
        eos_ids: Sequence[int] = (),
    ) -> None:
        model = build_model(config)
        assert isinstance(model, Decoder)
        self._model = model
        self._runtime = runtime
        self._tokenizer = tokenizer
        self._dtype = compute_dtype
        self._lowering = lowering
        self._eos_ids = np.array([tokenizer.eos_id, *eos_ids], np.int32)
        if tokenizer.vocab_size > config.vocab_size:
            raise ValueError(
                f"the tokenizer has {tokenizer.vocab_size} tokens and the model {config.vocab_size}; "
                "use the tokenizer that the model was trained with"
            )
        self._params = self._cast(params)
        self._programs: dict[tuple[str, Hashable], Program] = {}

    @property
    def compile_counts(self) -> Mapping[str, int]:
        """How many times `prefill` and `decode` were compiled: once per shape of a batch."""
        counts = Counter[str]()
        for (name, _), program in self._programs.items():
            counts[name] += program.compile_count
        return counts

    def generate(self, prompts: Sequence[str], settings: GenerateSettings) -> Generated:
        """Continues all prompts as one batch, `settings.num_samples` times each; those of one shape compile once."""
        count = settings.num_samples
        encoded = [self._encode(prompt) for prompt in prompts]
        rows = [ids for ids in encoded for _ in range(count)]
        prompt_slots = max(_SHORTEST_BUCKET_TOKENS, _power_of_two(max(len(ids) - 1 for ids in rows)))
        # Besides the prefilled tokens: the prompt's last one and all generated ones but the last, which is never fed.
        shape = _Shape(len(rows), prompt_slots, prompt_slots + settings.max_tokens)
        cache, prefill_seconds = self._prefill(shape, rows)
        steps, decode_seconds = self._decode(shape, cache, rows, settings)
        samples = [
            self._sample(prompts[i // count], ids, new) for i, (ids, new) in enumerate(zip(rows, steps.T, strict=True))
        ]
        return Generated(
            samples=tuple(samples),
            prefill_tokens=sum(len(ids) - 1 for ids in rows),
            prefill_seconds=prefill_seconds,
            decode_tokens=sum(len(sample.tokens) + (sample.finished == "eos") for sample in samples),
            decode_seconds=decode_seconds,
        )

    def _encode(self, prompt: str) -> np.ndarray:
        """Ids of a prompt as the beginning of a document; an empty one follows the EOS of the document before."""
        ids = self._tokenizer.encode(prompt)
        bos_id = self._tokenizer.bos_id
        if bos_id is None:
            return ids if len(ids) else np.array([self._tokenizer.eos_id], np.int32)
        return ids if len(ids) and ids[0] == bos_id else np.append(np.int32(bos_id), ids)

    def _prefill(self, shape: _Shape, rows: Sequence[np.ndarray]) -> tuple[Tree, float]:
        """The cache of all tokens but each row's last, and the seconds that took."""
        tokens = np.zeros((shape.num_rows, shape.prompt_slots), np.int32)
        for row, ids in zip(tokens, rows, strict=True):
            row[shape.prompt_slots - len(ids) + 1 :] = ids[:-1]
        lengths = np.array([len(ids) - 1 for ids in rows], np.int32)
        inputs = {"params": self._params, **self._runtime.put({"tokens": tokens, "lengths": lengths})}
        program = self._program("prefill", shape, make_prefill(self._model, shape.num_slots, self._dtype))
        program.compiled(**inputs)
        start = time.perf_counter()
        cache = program(**inputs)
        self._runtime.fetch(cache["segment_ids"])  # the smallest result to wait for
        return cache, time.perf_counter() - start

    def _decode(
        self, shape: _Shape, cache: Tree, rows: Sequence[np.ndarray], settings: GenerateSettings
    ) -> tuple[np.ndarray, float]:
        """Tokens [steps, B] until every row has an EOS or `max_tokens`, and the seconds they took."""
        method = _method(settings)
        num_streams = max(_STREAMS, _power_of_two(settings.num_samples))
        carry = {
            "token": np.array([ids[-1] for ids in rows], np.int32),
            "position": np.array([len(ids) - 1 for ids in rows], np.int32),
            "step": np.int32(0),
        }
        streams = [(_first_stream(ids) + i % settings.num_samples) % num_streams for i, ids in enumerate(rows)]
        controls = {
            "seed": np.int32(settings.seed),
            "temperature": np.float32(settings.temperature),
            "top_p": np.float32(settings.top_p),
            "streams": np.array(streams, np.int32),
        }
        carry, controls = self._runtime.put((carry, controls))
        kept = {"params": self._params, "controls": controls}
        program = self._program(
            "decode",
            (shape, method, num_streams),
            make_decode(self._model, method, num_streams),
            donated=("cache",),
            key_inputs=("controls.seed", "carry.step"),
        )
        # Called without its program, which would compare the shapes of all weights at every token.
        step = program.compiled(cache=cache, carry=carry, **kept)
        tokens: list[np.ndarray] = []
        ended = np.zeros(shape.num_rows, bool)
        start = time.perf_counter()
        for i in range(settings.max_tokens):
            before = carry["token"]
            result = step({"cache": cache}, {**kept, "carry": carry})
            cache, carry = result["cache"], result["carry"]
            if i > 0:  # the token of the step before, while the device is at this one
                tokens.append(self._runtime.fetch(before))
                ended |= np.isin(tokens[-1], self._eos_ids)
                if ended.all():
                    break
        else:
            tokens.append(self._runtime.fetch(carry["token"]))
        return np.stack(tokens), time.perf_counter() - start

    def _sample(self, prompt: str, ids: np.ndarray, new: np.ndarray) -> Sample:
        ends = np.flatnonzero(np.isin(new, self._eos_ids))
        new = new[: ends[0]] if len(ends) else new
        # Some tokenizers decode a word at the start of a text without the space before it.
        head, whole = (self._tokenizer.decode(part) for part in (ids, np.concatenate([ids, new])))
        text = whole[len(head) :] if whole.startswith(head) else self._tokenizer.decode(new)
        return Sample(prompt, text, tuple(new.tolist()), "eos" if len(ends) else "length")

    def _program(self, name: str, key: Hashable, function: Callable[..., Tree], **options: Any) -> Program:
        """The program of a shape; one each, since a program takes a change of shape for a mistake and warns."""
        if (name, key) not in self._programs:
            self._programs[name, key] = Program(
                name, lambda inputs: capture(name, function, inputs), self._lowering, **options
            )
        return self._programs[name, key]

    def _cast(self, params: Tree) -> Tree:
        """The weights in the compute dtype; those that have it are not copied, and buffers stay as they are."""
        specs = dict(self._model.named_parameters())
        buffers = {name for name, _ in self._model.named_buffers()}
        assert set(params) == specs.keys() | buffers, sorted(set(params) ^ (specs.keys() | buffers))
        wrong = {
            name: params[name]
            for name, spec in specs.items()
            if spec.is_floating_point() and torch_dtype(params[name].dtype) != self._dtype
        }

        def cast(params: Tree) -> Tree:
            return {name: weight.to(self._dtype) for name, weight in params.items()}

        program = Program("cast_weights", lambda inputs: capture("cast_weights", cast, inputs), self._lowering)
        return {**params, **program(params=wrong)} if wrong else params


def read_prompts(settings: GenerateSettings) -> list[str]:
    """The prompts: the one given, each line of the file, or an empty one.

    Raises:
        ValueError: both are given, or the file is not UTF-8 or has no line.
        OSError: the file cannot be read.
    """
    if settings.prompts_file is None:
        return ["" if settings.prompt is None else settings.prompt]
    if settings.prompt is not None:
        raise ValueError("prompt and prompts_file are both given; give one of them")
    try:
        text = Path(settings.prompts_file).expanduser().read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{settings.prompts_file}: not UTF-8 text: {error}") from error
    if not text:
        raise ValueError(f"{settings.prompts_file} is empty; write a prompt on each line")
    return text.removesuffix("\n").split("\n")


def _method(settings: GenerateSettings) -> Method:
    if np.float32(settings.temperature) < np.finfo(np.float32).tiny:  # 0 on the device
        return "greedy"
    return "all" if settings.top_p == 1 else "nucleus"


def _first_stream(ids: np.ndarray) -> int:
    """The random numbers that a prompt's first sample uses; the next ones use the next."""
    return zlib.crc32(ids.astype("<i4").tobytes())


def _power_of_two(number: int) -> int:
    """The smallest power of two that is not below `number`."""
    return 1 << max(0, number - 1).bit_length()
