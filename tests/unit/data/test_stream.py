"""The packed stream: what is in it, in which order, and that it depends on data, seed and index only."""

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tpu_train.config import schema
from tpu_train.data.sources import Document
from tpu_train.data.stream import PackedStream, SyntheticStream, TokenStream, build_streams, pack
from tpu_train.data.tokenizers import ByteTokenizer, FileTokenizer

BYTES = ByteTokenizer()
SYNTHETIC = schema.SyntheticData(name="synthetic")
FIXED_ORDER = [0, 3, 7, 5, 1, 2, 6, 4, 3, 7, 4, 2, 1, 6, 5, 0]
FIXED_DRAWS = [980, 604, 341, 689, 884]


def text_data(path: Path, held_out: float = 0.0) -> schema.TextData:
    return schema.TextData(name="text", path=str(path), field="text", held_out_fraction=held_out)


def write_texts(folder: Path, sizes: list[int]) -> Path:
    for i, size in enumerate(sizes):
        (folder / f"{i:03}.txt").write_text("".join(chr(97 + (i * 7 + j) % 26) for j in range(size)))
    return folder


def build(
    data: schema.TextData | schema.SyntheticData, seq_len: int = 8, batch: int = 2, seed: int = 0
) -> tuple[TokenStream, PackedStream | None]:
    return build_streams(data, BYTES, seq_len=seq_len, batch_size=batch, seed=seed, vocab_size=300)


def all_blocks(tokens: np.ndarray, seq_len: int) -> list[list[int]]:
    return [tokens[i : i + seq_len + 1].tolist() for i in range(0, len(tokens) - seq_len, seq_len)]


def test_documents_are_ended_packed_and_ordered_by_hash() -> None:
    documents = [Document(f"{i}", f"text {i}") for i in range(20)]
    tokens = pack(documents, BYTES)
    ends = np.flatnonzero(tokens == BYTES.eos_id)
    starts = [0, *(ends[:-1] + 1)]
    texts = [BYTES.decode(tokens[start:end]) for start, end in zip(starts, ends, strict=True)]
    assert sorted(texts) == sorted(document.text for document in documents)
    assert texts != [document.text for document in documents]
    assert tokens[-1] == BYTES.eos_id
    assert tokens.dtype == np.uint16
    np.testing.assert_array_equal(tokens, pack(reversed(documents), BYTES))


def test_order_depends_on_name_and_text() -> None:
    def order(names: list[str], texts: list[str]) -> list[int]:
        tokens = pack([Document(n, f"{i}{t}") for i, (n, t) in enumerate(zip(names, texts, strict=True))], BYTES)
        return tokens[np.append(0, np.flatnonzero(tokens == 257)[:-1] + 1)].tolist()

    names = list("abcdefgh")
    same = order(names, [""] * 8)
    assert order(list("ijklmnop"), [""] * 8) != same
    assert order(names, ["x"] * 8) != same


def test_empty_documents_are_left_out() -> None:
    assert pack([Document("a", ""), Document("b", "b")], BYTES).tolist() == [98, 257]
    assert pack([], BYTES).tolist() == []


def test_each_epoch_has_every_block_once_in_its_own_order() -> None:
    tokens = np.arange(1003)
    stream = PackedStream(tokens, 10, seed=5)
    assert stream.num_blocks == 100
    expected = all_blocks(tokens, 10)
    epochs = [[stream.sequence(epoch * 100 + i).tolist() for i in range(100)] for epoch in range(3)]
    for epoch in epochs:
        assert sorted(epoch) == expected
        assert epoch != expected
    assert epochs[0] != epochs[1] != epochs[2]


def test_a_block_of_the_exact_size_is_one_sequence() -> None:
    stream = PackedStream(np.arange(9, dtype=np.uint16), 8, seed=0)
    assert stream.num_blocks == 1
    assert stream.sequence(3).tolist() == list(range(9))
    assert PackedStream(np.arange(17), 8, seed=0).num_blocks == 2
    assert PackedStream(np.arange(16), 8, seed=0).num_blocks == 1


def test_the_order_of_an_epoch_never_changes() -> None:
    # Raw Philox draws are fixed by NumPy's compatibility policy; a change would break the resumption of old runs.
    stream = PackedStream(np.arange(9), 1, seed=0)
    assert [int(stream.sequence(i)[0]) for i in range(16)] == FIXED_ORDER
    assert SyntheticStream(1000, 4, seed=0).sequence(3).tolist() == FIXED_DRAWS


@pytest.mark.parametrize("stream", [PackedStream(np.arange(1000), 9, seed=3), SyntheticStream(50, 9, seed=3)])
def test_a_sequence_does_not_depend_on_what_was_read_before(stream: TokenStream) -> None:
    forward = [stream.sequence(i).tolist() for i in range(300)]
    for i in np.random.default_rng(0).permutation(300):
        assert stream.sequence(int(i)).tolist() == forward[i]


def test_batches_are_rows_of_the_stream_with_next_tokens_as_labels() -> None:
    stream = PackedStream(np.arange(1000), 9, seed=3)
    for step in (0, 7, 40):  # 111 blocks: the last crosses into the second epoch
        batch = stream.batch(step, 3)
        assert {name: (array.dtype, array.shape) for name, array in batch.items()} == {
            "tokens": (np.int32, (3, 9)),
            "labels": (np.int32, (3, 9)),
        }
        rows = np.stack([stream.sequence(step * 3 + i) for i in range(3)])
        np.testing.assert_array_equal(batch["tokens"], rows[:, :-1])
        np.testing.assert_array_equal(batch["labels"], rows[:, 1:])
        assert batch["tokens"].flags.c_contiguous
        assert batch["labels"].flags.c_contiguous


def test_streams_repeat_for_a_seed_and_differ_between_seeds(tmp_path: Path) -> None:
    for data in (text_data(write_texts(tmp_path, [100] * 20)), SYNTHETIC):
        first, again, other = (build(data, seed=seed)[0].batch(3, 2)["tokens"] for seed in (0, 0, 1))
        np.testing.assert_array_equal(first, again)
        assert not np.array_equal(first, other)


def test_the_held_out_part_is_the_end_and_shares_nothing_with_training(tmp_path: Path) -> None:
    data = text_data(write_texts(tmp_path, [37] * 50), held_out=0.25)
    train, held_out = build(data)
    assert isinstance(train, PackedStream)
    assert held_out is not None
    tokens = pack([Document(p.name, p.read_text()) for p in tmp_path.iterdir()], BYTES)
    split = 1425  # of 50 * 38 = 1900 tokens
    assert sorted(train.sequence(i).tolist() for i in range(train.num_blocks)) == sorted(all_blocks(tokens[:split], 8))
    in_order = all_blocks(tokens[split:], 8)
    assert [held_out.sequence(i).tolist() for i in range(held_out.num_blocks)] == in_order
    assert held_out.sequence(held_out.num_blocks + 1).tolist() == in_order[1]


def test_nothing_held_out_means_no_validation(tmp_path: Path) -> None:
    train, held_out = build(text_data(write_texts(tmp_path, [100])))
    assert isinstance(train, PackedStream)
    assert (train.num_blocks, held_out) == (12, None)
    assert build(SYNTHETIC)[1] is None


def test_synthetic_tokens_are_uniform() -> None:
    stream = SyntheticStream(7, 9_999, seed=0)
    counts = np.bincount(np.concatenate([stream.sequence(i) for i in range(7)]), minlength=7)
    assert len(counts) == 7
    assert np.abs(counts - 10_000).max() < 500


def test_too_little_text_is_an_error_with_the_numbers(tmp_path: Path) -> None:
    data = text_data(write_texts(tmp_path, [15]))  # 16 tokens: 17 make two blocks of 8
    with pytest.raises(ValueError, match=r"training part has 16 of the data set's 16 tokens.*2 sequences of 8.* 17;"):
        build(data)
    with pytest.raises(ValueError, match=r"training part has 16 .*1 sequences of 16 tokens takes 17; use more text"):
        build(data, seq_len=16, batch=1)
    build(data, batch=1)
    with pytest.raises(ValueError, match=r"held-out part has 2 of the data set's 16 tokens.*takes 5; .*held_out_frac"):
        build(text_data(tmp_path, held_out=0.1), seq_len=4, batch=1)


def test_stdlib_loads_fast_and_is_text() -> None:
    start = time.process_time()
    data = schema.StdlibData(name="stdlib", held_out_fraction=0.05)
    train, held_out = build_streams(data, BYTES, seq_len=512, batch_size=8, seed=0, vocab_size=258)
    assert time.process_time() - start < 2
    assert isinstance(train, PackedStream)
    assert held_out is not None
    assert train.num_blocks > 10 * held_out.num_blocks > 1000
    text = "".join(BYTES.decode(row) for row in held_out.batch(0, 100)["tokens"])
    assert text.count("self") > 20


def test_a_file_tokenizer_packs_too(tmp_path: Path) -> None:
    vocabulary = {"<eos>": 0, **{chr(97 + i): i + 1 for i in range(26)}}
    model = {"type": "BPE", "vocab": vocabulary, "merges": []}
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    tokens = pack([Document("a", "abz")], FileTokenizer(path))
    assert tokens.tolist() == [1, 2, 26, 0]
    assert tokens.dtype == np.uint8


def test_data_imports_neither_torch_nor_jax() -> None:
    modules = "prefetch, rules, sources, stream, tokenizers"
    code = (
        f"import sys; from tpu_train.data import {modules}; print({{'torch', 'jax', 'tokenizers'}} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"
