"""Tokenizers give text back, and say what is wrong with a file."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from tests.unit.data.helpers import write_tokenizer
from tpu_train.config import schema
from tpu_train.data.tokenizers import ByteTokenizer, FileTokenizer, build_tokenizer

TEXTS = ["", "a", "def f(x):\n\treturn x\r\n", "naïve Größe 東京 🎉 e\u0301\u2028\x00\ufeff"]


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_round_trip(text: str) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32
    assert ids.tolist() == list(text.encode())
    assert tokenizer.decode(ids) == text


def test_bytes_have_two_special_tokens_without_text() -> None:
    tokenizer = build_tokenizer(schema.BytesTokenizer(name="bytes"))
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (258, 257)
    assert tokenizer.decode(np.array([256, 104, 105, 257, 300])) == "hi"
    assert tokenizer.decode(np.array([0xE6, 104])) == "\ufffdh"


@pytest.mark.parametrize("text", [*TEXTS, "the cat sat on the mat"])
def test_file_round_trip(tmp_path: Path, text: str) -> None:
    tokenizer = build_tokenizer(schema.FileTokenizer(name="file", path=str(write_tokenizer(tmp_path))))
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32
    assert tokenizer.decode(np.append(ids, tokenizer.eos_id)) == text


def test_file_merges_words_and_counts_its_vocabulary(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path)
    tokenizer = FileTokenizer(path)
    vocabulary = json.loads(path.read_text())["model"]["vocab"]
    assert tokenizer.vocab_size == len(vocabulary) > 257
    assert tokenizer.eos_id == vocabulary["<|endoftext|>"]
    assert 2 < len(tokenizer.encode("the cat sat on the mat")) < len("the cat sat on the mat")


@pytest.mark.parametrize("value", ["<stop>", {"content": "<stop>", "lstrip": False}])
def test_tokenizer_config_names_the_end(tmp_path: Path, value: object) -> None:
    path = write_tokenizer(tmp_path, "<stop>")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": value}))
    assert FileTokenizer(path).eos_id == json.loads(path.read_text())["model"]["vocab"]["<stop>"]


def test_tokenizer_config_without_an_end_leaves_the_known_names(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": null}')
    assert FileTokenizer(path).eos_id == 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"eos_token": "<nope>"}', r"tokenizer_config.json: eos_token '<nope>' is not in the vocabulary of .*r.json"),
        ('{"eos_token": 7}', r"tokenizer_config.json: eos_token is 7, not a string"),
        ('{"eos_token": {}}', r"tokenizer_config.json: eos_token is {}, not a string"),
        ("[]", r"tokenizer_config.json: a list, not an object"),
        ("{", r"tokenizer_config.json: not JSON: Expecting property name"),
        ('{"add_bos_token": true}', r"tokenizer_config.json: add_bos_token is True, and no bos_token is named"),
        ('{"add_bos_token": true, "bos_token": "<x>"}', r"bos_token '<x>' is not in the vocabulary of .*r.json"),
    ],
)
def test_bad_tokenizer_config_is_named(tmp_path: Path, content: str, message: str) -> None:
    path = write_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        FileTokenizer(path)


def test_unusable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"missing.json: no such file"):
        FileTokenizer(tmp_path / "missing.json")
    with pytest.raises(ValueError, match=r"is a folder; name the tokenizer.json in it"):
        FileTokenizer(tmp_path)
    broken = tmp_path / "broken.json"
    broken.write_text('{"a": 1')
    with pytest.raises(ValueError, match=r"broken.json: not a tokenizer.json of the tokenizers library: .*line 1"):
        FileTokenizer(broken)
    with pytest.raises(ValueError, match=r"tokenizer.json: no token that ends a document, none of <\|endoftext\|>"):
        FileTokenizer(write_tokenizer(tmp_path, "<stop>"))


def write_with_post_processor(folder: Path, single: str) -> Path:
    """A tokenizer.json that puts special tokens around a text."""
    path = write_tokenizer(folder, more=["<s>"])
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    special = [("<s>", 1), ("<|endoftext|>", 0)]
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single=single, special_tokens=special)  # pyright: ignore
    tokenizer.save(str(path))
    return path


@pytest.mark.parametrize(
    ("single", "config", "bos_id"),
    [
        ("$A", "{}", None),
        ("<s> $A", "{}", 1),
        ("<s> $A <|endoftext|>", "{}", 1),
        ("$A <|endoftext|>", "{}", None),
        ("<s> $A", '{"add_bos_token": false, "bos_token": "<s>"}', None),
        ("<s> $A", '{"add_bos_token": null, "bos_token": "<s>"}', 1),
        ("$A", '{"add_bos_token": true, "bos_token": "<s>"}', 1),
        ("$A", '{"add_bos_token": true, "bos_token": {"content": "<s>"}}', 1),
        ("$A", '{"bos_token": "<s>"}', None),
    ],
)
def test_documents_begin_as_the_files_say(tmp_path: Path, single: str, config: str, bos_id: int | None) -> None:
    path = write_with_post_processor(tmp_path, single)
    (tmp_path / "tokenizer_config.json").write_text(config)
    tokenizer = FileTokenizer(path)
    assert tokenizer.bos_id == bos_id
    assert not {0, 1} & set(tokenizer.encode("the cat").tolist())  # whoever packs documents adds them


def test_identities_differ_where_ids_do(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path, more=["<s>"])
    plain = FileTokenizer(path).identity
    assert FileTokenizer(path).identity == plain != ByteTokenizer().identity
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<s>"}')
    assert FileTokenizer(path).identity != plain


def test_a_batch_is_encoded_as_its_texts_are_also_in_another_process(tmp_path: Path) -> None:
    for tokenizer in (ByteTokenizer(), FileTokenizer(write_tokenizer(tmp_path))):
        copy = pickle.loads(pickle.dumps(tokenizer))
        for text, ids in zip(TEXTS, copy.encode_batch(TEXTS), strict=True):
            np.testing.assert_array_equal(ids, tokenizer.encode(text))
