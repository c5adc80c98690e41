"""Text to token ids and back: UTF-8 bytes, or a `tokenizer.json` of the tokenizers library.

Key idea: a tokenizer turns the text of one document into its ids and nothing else, and says which tokens begin and end
a document; whoever packs documents puts them there.
"""

import hashlib
import json
from collections.abc import Sequence
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
    def bos_id(self) -> int | None:
        """Id of the token that begins a document; None: none does."""
        ...

    @property
    def eos_id(self) -> int:
        """Id of the token that ends a document."""
        ...

    @property
    def identity(self) -> str:
        """Differs between tokenizers that give different ids."""
        ...

    def encode(self, text: str) -> np.ndarray:
        """Ids of `text`, [n] int32, with no token added before or after."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode` of each text."""
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
    """UTF-8 bytes as ids 0 to 255, an id that is not used, and `eos_id`."""

    bos_id = None
    eos_id = 257
    vocab_size = 258
    identity = "bytes"

    def encode(self, text: str) -> np.ndarray:
        """Ids of `text`, [n] int32."""
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode` of each text."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: np.ndarray) -> str:
        """Text of `ids` [n]; bytes that are not UTF-8 become U+FFFD."""
        ids = np.asarray(ids)
        return ids[ids < 256].astype(np.uint8).tobytes().decode(errors="replace")


class FileTokenizer:
    """A `tokenizer.json`.

    The end of a document is what `tokenizer_config.json` beside it names, else of `EOS_NAMES`. A document has a
    beginning if the post-processor of the tokenizer puts a token before a text; `add_bos_token` of
    `tokenizer_config.json`, where it is there, decides instead. Special tokens spelled out in the text become the
    special tokens, as in `transformers`.
    """

    def __init__(self, path: Path) -> None:
        """Reads the file.

        Raises:
            ValueError: it is missing, not a tokenizer, or says not which token ends a document.
        """
        self._tokenizer, content = _load(path)
        self.vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        config = _Config(path.with_name("tokenizer_config.json"), self._tokenizer, path)
        self.eos_id = config.eos_id()
        self.bos_id = config.bos_id()
        digest = hashlib.blake2b(content, digest_size=16)
        digest.update(repr((self.bos_id, self.eos_id)).encode())
        self.identity = digest.hexdigest()

    def encode(self, text: str) -> np.ndarray:
        """Ids of `text`, [n] int32."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode` of each text."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in encodings]

    def decode(self, ids: np.ndarray) -> str:
        """Text of `ids` [n]."""
        return self._tokenizer.decode(np.asarray(ids).tolist(), skip_special_tokens=True)


def _load(path: Path) -> tuple[Any, bytes]:
    import tokenizers

    if not path.is_file():
        what = "is a folder; name the tokenizer.json in it" if path.is_dir() else "no such file"
        raise ValueError(f"{path}: {what}")
    content = path.read_bytes()
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"{path}: not a tokenizer.json of the tokenizers library: {error}") from error
    tokenizer.no_truncation()  # some files carry the settings of one model's inputs
    tokenizer.no_padding()
    return tokenizer, content


class _Config:
    """A tokenizer_config.json, which may be missing, beside a tokenizer."""

    def __init__(self, path: Path, tokenizer: Any, tokenizer_path: Path) -> None:
        self._path, self._tokenizer, self._tokenizer_path = path, tokenizer, tokenizer_path
        try:
            self._content: Any = json.loads(path.read_bytes()) if path.is_file() else {}
        except ValueError as error:
            raise ValueError(f"{path}: not JSON: {error}") from error
        if not isinstance(self._content, dict):
            raise ValueError(f"{path}: a {type(self._content).__name__}, not an object")

    def eos_id(self) -> int:
        named = self._token("eos_token")
        if named is not None:
            return named
        known = (self._tokenizer.token_to_id(name) for name in EOS_NAMES)
        eos_id = next((i for i in known if i is not None), None)
        if eos_id is None:
            raise ValueError(
                f"{self._tokenizer_path}: no token that ends a document, none of {', '.join(EOS_NAMES)}; "
                f'name it in {self._path}: {{"eos_token": "..."}}'
            )
        return eos_id

    def bos_id(self) -> int | None:
        wanted = self._content.get("add_bos_token")
        if wanted is False:
            return None
        if wanted:
            named = self._token("bos_token")
            if named is None:
                raise ValueError(f"{self._path}: add_bos_token is {wanted!r}, and no bos_token is named")
            return named
        plain = self._tokenizer.encode("a", add_special_tokens=False).ids
        ids = self._tokenizer.encode("a", add_special_tokens=True).ids
        return ids[0] if len(ids) > len(plain) and ids[: len(plain)] != plain else None

    def _token(self, name: str) -> int | None:
        """Id of a token that is named: by a string, an object with `content`, or not at all."""
        token = self._content.get(name)
        if isinstance(token, dict) and "content" in token:
            token = token["content"]
        if token is None:
            return None
        if not isinstance(token, str):
            raise ValueError(f"{self._path}: {name} is {token!r}, not a string")
        token_id = self._tokenizer.token_to_id(token)
        if token_id is None:
            raise ValueError(f"{self._path}: {name} {token!r} is not in the vocabulary of {self._tokenizer_path}")
        return token_id
