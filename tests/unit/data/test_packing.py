"""Packing by hand-computed cases, and that an epoch has every token once."""

import itertools
import pickle
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tests.unit.data.helpers import make_cache
from tpu_train.data.cache import TokenCache
from tpu_train.data.packing import PackedStream, Packing, Part, permutation

ALL = Part(held_out=False, fraction=0.0)
IGNORED = -100
DOCUMENTS = [[1, 2, 3, 4, 9], [5, 9], [6, 7, 8, 9]]
FIXED_HASH_ORDER = [3, 6, 7, 5, 4, 2, 1, 0]
FIXED_ORDER = [[0, 3, 7, 5, 1, 2, 6, 4], [3, 7, 4, 2, 1, 6, 5, 0]]


def packing(
    seq_len: int = 4, shuffle: str = "none", mask: bool = True, epochs: int | None = None, seed: int = 0
) -> Packing:
    return Packing(seq_len, shuffle, seed, mask, epochs)  # pyright: ignore[reportArgumentType]


def rows(stream: PackedStream, name: str) -> list[list[int]]:
    """An array of each sequence of the first epoch."""
    return [stream.sequence(i)[name].tolist() for i in range(stream.num_blocks)]


def random_documents(count: int, longest: int) -> list[list[int]]:
    """Documents whose tokens tell document and place: at most 100 of up to 600 tokens."""
    lengths = np.random.default_rng(3).integers(1, longest, count)
    return [[600 * d + i for i in range(length)] for d, length in enumerate(lengths)]


def test_rows_with_a_document_mask(tmp_path: Path) -> None:
    stream = PackedStream(make_cache(tmp_path / "c", DOCUMENTS), ALL, packing(4))
    assert rows(stream, "tokens") == [[1, 2, 3, 4], [9, 5, 9, 6], [7, 8, 9, 0]]
    assert rows(stream, "labels") == [[2, 3, 4, 9], [IGNORED, 9, IGNORED, 7], [8, 9, IGNORED, IGNORED]]
    assert rows(stream, "positions") == [[0, 1, 2, 3], [4, 0, 1, 0], [1, 2, 3, 0]]
    assert rows(stream, "segment_ids") == [[0, 0, 0, 0], [0, 1, 1, 2], [0, 0, 0, 1]]
    assert (stream.num_blocks, stream.num_tokens, stream.num_documents) == (3, 11, 3)
    assert {array.dtype for array in stream.sequence(0).values()} == {np.dtype(np.int32)}


def test_rows_without_a_document_mask(tmp_path: Path) -> None:
    stream = PackedStream(make_cache(tmp_path / "c", DOCUMENTS), ALL, packing(4, mask=False))
    assert set(stream.sequence(0)) == {"tokens", "labels"}
    assert rows(stream, "tokens") == [[1, 2, 3, 4], [9, 5, 9, 6], [7, 8, 9, 0]]
    assert rows(stream, "labels") == [[2, 3, 4, 9], [5, 9, 6, 7], [8, 9, IGNORED, IGNORED]]


def test_a_document_that_ends_with_a_block(tmp_path: Path) -> None:
    cache = make_cache(tmp_path / "c", [[1, 2, 3, 9], [4, 5, 6, 9]])
    for mask, after in ((True, IGNORED), (False, 4)):
        stream = PackedStream(cache, ALL, packing(4, mask=mask))
        assert rows(stream, "tokens") == [[1, 2, 3, 9], [4, 5, 6, 9]]
        assert rows(stream, "labels") == [[2, 3, 9, after], [5, 6, 9, IGNORED]]
    masked = PackedStream(cache, ALL, packing(4))
    assert rows(masked, "segment_ids") == [[0] * 4, [0] * 4]
    assert rows(masked, "positions") == [[0, 1, 2, 3]] * 2


def test_one_token_is_a_block_without_labels(tmp_path: Path) -> None:
    stream = PackedStream(make_cache(tmp_path / "c", [[7]]), ALL, packing(2))
    assert rows(stream, "tokens") == [[7, 0]]
    assert rows(stream, "labels") == [[IGNORED, IGNORED]]
    assert rows(stream, "segment_ids") == [[0, 1]]
    assert rows(stream, "positions") == [[0, 0]]


def test_a_document_longer_than_many_blocks_keeps_its_positions(tmp_path: Path) -> None:
    stream = PackedStream(make_cache(tmp_path / "c", [[1, 2], list(range(10, 30)), [3]]), ALL, packing(5))
    assert np.concatenate(rows(stream, "positions"))[:23].tolist() == [0, 1, *range(20), 0]
    assert rows(stream, "segment_ids")[2] == [0] * 5


@pytest.mark.parametrize("mask", [True, False])
@pytest.mark.parametrize("shuffle", ["documents", "blocks", "none", "hash"])
@pytest.mark.parametrize("seq_len", [1, 7, 64, 5000])
def test_every_token_is_an_input_once_in_each_epoch_and_has_its_label(
    tmp_path: Path, shuffle: str, mask: bool, seq_len: int
) -> None:
    documents = random_documents(60, 90)
    follows = {a: b for document in documents for a, b in itertools.pairwise(document)}
    stream = PackedStream(make_cache(tmp_path / "c", documents), ALL, packing(seq_len, shuffle, mask))
    orders = []
    for epoch in range(2):
        first = epoch * stream.num_blocks
        sequences = [stream.sequence(first + i) for i in range(stream.num_blocks)]
        tokens = np.concatenate([sequence["tokens"] for sequence in sequences])
        labels = np.concatenate([sequence["labels"] for sequence in sequences])
        filled = stream.num_blocks * seq_len - stream.num_tokens
        expected = Counter(token for document in documents for token in document)
        assert Counter(tokens.tolist()) == expected + Counter({0: filled})
        inside = [(int(t), int(x)) for t, x in zip(tokens, labels, strict=True) if int(t) in follows and x != IGNORED]
        wrong = [(t, x) for t, x in inside if follows[t] != x]
        assert not wrong
        assert len(inside) == len(follows)  # each token but the last of a document has its label
        others = np.count_nonzero(labels != IGNORED) - len(inside)
        assert others == (0 if mask else len(documents) - 1)
        if mask:
            positions = np.concatenate([sequence["positions"] for sequence in sequences])
            real = np.ones(len(tokens), bool) if not filled else (labels != IGNORED)
            np.testing.assert_array_equal(positions[real], tokens[real] % 600)
        orders.append(tokens.tolist())
    assert (orders[0] != orders[1]) == (
        shuffle in ("documents", "blocks") and (stream.num_blocks > 1 or shuffle == "documents")
    )


def test_documents_of_one_row_have_ids_of_their_own(tmp_path: Path) -> None:
    stream = PackedStream(make_cache(tmp_path / "c", random_documents(60, 30)), ALL, packing(100, "documents"))
    for i in range(stream.num_blocks - 1):
        row = stream.sequence(i)
        documents = row["tokens"] // 600
        np.testing.assert_array_equal(np.diff(row["segment_ids"]), np.diff(documents) != 0)
        assert row["segment_ids"][0] == 0


@pytest.mark.parametrize("shuffle", ["documents", "blocks"])
def test_a_sequence_does_not_depend_on_what_was_read_before(tmp_path: Path, shuffle: str) -> None:
    stream = PackedStream(make_cache(tmp_path / "c", random_documents(50, 50)), ALL, packing(9, shuffle, seed=3))
    forward = [stream.sequence(i)["tokens"].tolist() for i in range(300)]
    for i in np.random.default_rng(0).permutation(300):
        assert stream.sequence(int(i))["tokens"].tolist() == forward[i]
    copy = pickle.loads(pickle.dumps(stream))
    assert [copy.sequence(i)["tokens"].tolist() for i in range(300)] == forward
    assert len(pickle.dumps(stream)) < 1000  # the folder's name, not its content


def test_the_order_of_an_epoch_never_changes(tmp_path: Path) -> None:
    # Raw Philox draws are fixed by NumPy's compatibility policy; a change would break the resumption of old runs.
    assert [permutation(8, 0, epoch).tolist() for epoch in range(2)] == FIXED_ORDER
    cache = make_cache(tmp_path / "c", [[i] for i in range(8)])
    documents = PackedStream(cache, ALL, packing(1, "documents"))
    assert [int(documents.sequence(i)["tokens"][0]) for i in range(16)] == [*FIXED_ORDER[0], *FIXED_ORDER[1]]
    by_hash = PackedStream(cache, ALL, packing(1, "hash"))
    order = [int(by_hash.sequence(i)["tokens"][0]) for i in range(8)]
    assert order == FIXED_HASH_ORDER
    blocks = PackedStream(cache, ALL, packing(1, "blocks"))
    assert [int(blocks.sequence(i)["tokens"][0]) for i in range(8)] == [order[k] for k in FIXED_ORDER[0]]


def test_epochs_end_with_rows_that_teach_nothing(tmp_path: Path) -> None:
    cache = make_cache(tmp_path / "c", [[i] * 5 for i in range(1, 8)])  # 35 tokens: 9 blocks
    stream = PackedStream(cache, ALL, packing(4, epochs=2))
    assert [stream.max_steps(batch) for batch in (1, 4, 5, 18, 100)] == [18, 5, 4, 1, 1]
    assert PackedStream(cache, ALL, packing(4)).max_steps(4) is None
    last = stream.batch(4, 4)
    assert last["labels"][:2].max() > 0
    assert (last["labels"][2:] == IGNORED).all()
    assert {array.shape for array in last.values()} == {(4, 4)}
    assert stream.num_batches(4) == 3


@pytest.mark.parametrize(("shuffle", "seed", "seq_len"), [("blocks", 1, 4), ("blocks", 0, 5), ("documents", 0, 4)])
def test_the_fingerprint_is_that_of_the_order(tmp_path: Path, shuffle: str, seed: int, seq_len: int) -> None:
    def fingerprint(documents: list[list[int]], folder: str, **changes: object) -> str:
        options = {"seq_len": 4, "shuffle": "blocks"} | changes
        return PackedStream(make_cache(tmp_path / folder, documents), ALL, packing(**options)).fingerprint  # pyright: ignore

    same = fingerprint(DOCUMENTS, "a")
    assert fingerprint(DOCUMENTS, "b", mask=False, epochs=3) == same
    assert fingerprint(DOCUMENTS, "c", shuffle=shuffle, seed=seed, seq_len=seq_len) != same
    assert fingerprint(DOCUMENTS[:2], "d") != same


def held_out(cache: TokenCache, fraction: float) -> tuple[list[int], list[int]]:
    """Tokens of both parts."""
    parts = (Part(held_out=True, fraction=fraction), Part(held_out=False, fraction=fraction))
    one, other = (PackedStream(cache, part, packing(1, "hash", mask=False)) for part in parts)
    return sorted(np.ravel(rows(one, "tokens")).tolist()), sorted(np.ravel(rows(other, "tokens")).tolist())


def test_documents_are_held_out_by_hash_and_equal_texts_stay_together(tmp_path: Path) -> None:
    cache = make_cache(tmp_path / "c", [[i, i] for i in range(10)], [50, 10, 90, 20, 20, 20, 60, 70, 80, 30])
    assert held_out(cache, 0.1)[0] == [1, 1]
    assert held_out(cache, 0.2) == ([1, 1, 3, 3, 4, 4, 5, 5], [0, 0, 2, 2, 6, 6, 7, 7, 8, 8, 9, 9])


def test_a_share_of_less_than_a_document_is_the_end_of_the_longest(tmp_path: Path) -> None:
    cache = make_cache(tmp_path / "c", [[1, 2], [3, 4, 5, 6, 7, 8, 9, 10], [11, 12]])
    assert held_out(cache, 0.16) == ([9, 10], [1, 2, 3, 4, 5, 6, 7, 8, 11, 12])
