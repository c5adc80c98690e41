"""Text to token ids and back: UTF-8 bytes, or a `tokenizer.json` of the tokenizers library.

Key idea: a tokenizer turns the text of one document into its ids and nothing else; the stream ends each document with
`eos_id`.
"""

import json
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from tpu_train.config import schema

# Names of the token that ends a document, most specific first: GPT-2/Qwen, Llama 3, Llama 2/T5, Gemma, plain ones.
EOS_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<EOS>")


class Tokenizer(Protocol):
    """Text to token ids and back."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        ...

    @property
    def eos_id(self) -> int:
        """Id of the token that ends a document."""
        ...

    def encode(self, text: str) -> np.ndarray:
        """Ids of `text`, [n] int32, with no token added before or after."""
        ...

    def decode(self, ids: np.ndarray) -> str:
        """Text of `ids` [n]; special tokens have none."""
        ...


def build_tokenizer(config: schema.BytesTokenizer | schema.FileTokenizer) -> Tokenizer:
    """The tokenizer of a configuration.

    Raises:
        ValueError: the file cannot be used; the message names it and says why.
    """
    match config:
        case schema.BytesTokenizer():
            return ByteTokenizer()
        case schema.FileTokenizer():
            return FileTokenizer(Path(config.path).expanduser())


class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255, then `bos_id` and `eos_id`."""

    bos_id = 256
    eos_id = 257
    vocab_size = 258

    def encode(self, text: str) -> np.ndarray:
        """Ids of `text`, [n] int32."""
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def decode(self, ids: np.ndarray) -> str:
        """Text of `ids` [n]; bytes that are not UTF-8 become U+FFFD."""
        ids = np.asarray(ids)
        return ids[ids < self.bos_id].astype(np.uint8).tobytes().decode(errors="replace")


class FileTokenizer:
    """A `tokenizer.json`. The end of a document is what `tokenizer_config.json` beside it names, else of `EOS_NAMES`.

    Special tokens spelled out in the text become the special tokens, as in `transformers`.
    """

    def __init__(self, path: Path) -> None:
        """Reads the file.

        Raises:
            ValueError: it is missing, not a tokenizer, or says not which token ends a document.
        """
        self._tokenizer = _load(path)
        self.vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        self.eos_id = _find_eos(self._tokenizer, path)

    def encode(self, text: str) -> np.ndarray:
        """Ids of `text`, [n] int32."""
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

    def decode(self, ids: np.ndarray) -> str:
        """Text of `ids` [n]."""
        return self._tokenizer.decode(np.asarray(ids).tolist(), skip_special_tokens=True)


def _load(path: Path) -> Any:
    import tokenizers

    if not path.is_file():
        what = "is a folder; name the tokenizer.json in it" if path.is_dir() else "no such file"
        raise ValueError(f"{path}: {what}")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"{path}: not a tokenizer.json of the tokenizers library: {error}") from error
    tokenizer.no_truncation()  # some files carry the settings of one model's inputs
    tokenizer.no_padding()
    return tokenizer


def _find_eos(tokenizer: Any, path: Path) -> int:
    config = path.with_name("tokenizer_config.json")
    named = _configured_eos(config) if config.is_file() else None
    if named is not None:
        eos_id = tokenizer.token_to_id(named)
        if eos_id is None:
            raise ValueError(f"{config}: eos_token {named!r} is not in the vocabulary of {path}")
        return eos_id
    known = (tokenizer.token_to_id(name) for name in EOS_NAMES)
    eos_id = next((i for i in known if i is not None), None)
    if eos_id is None:
        raise ValueError(
            f"{path}: no token that ends a document, none of {', '.join(EOS_NAMES)}; "
            f'name it in {config}: {{"eos_token": "..."}}'
        )
    return eos_id


def _configured_eos(config: Path) -> str | None:
    """`eos_token` of a tokenizer_config.json: a string, an object with `content`, or nothing."""
    try:
        content = json.loads(config.read_bytes())
        token = content.get("eos_token")
        token = token["content"] if isinstance(token, dict) else token
    except (ValueError, AttributeError, KeyError) as error:
        raise ValueError(f"{config}: cannot read eos_token: {error!r}") from error
    if token is not None and not isinstance(token, str):
        raise ValueError(f"{config}: eos_token is {token!r}, not a string")
    return token
