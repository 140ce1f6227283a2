"""Text, tokens, batches: what a run sees, whatever the mesh and wherever it starts."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpiparallel.data import ByteTokenizer, CharTokenizer, Corpus, read_text, tokenizer_from
from mpiparallel.errors import UserError
from mpiparallel.layers.loss import IGNORE


@given(st.text(min_size=1))
def test_characters_survive_encoding_and_decoding(text):
    tokenizer = CharTokenizer("".join(sorted(set(text))))
    tokens = tokenizer.encode(text)
    assert tokens.dtype == np.int32
    assert tokenizer.vocabulary == len(set(text))
    assert tokenizer.decode(tokens) == text
    assert tokenizer_from(tokenizer.describe()).decode(tokens) == text


@given(st.text())
def test_bytes_survive_encoding_and_decoding(text):
    tokenizer = tokenizer_from(ByteTokenizer().describe())
    tokens = tokenizer.encode(text)
    assert bytes(tokens.astype(np.uint8)) == text.encode()
    assert tokenizer.decode(tokens) == text


def test_bytes_that_are_no_text_show_as_a_replacement_character():
    assert ByteTokenizer().decode([0x68, 0xC3, 0x68]) == "h\N{REPLACEMENT CHARACTER}h"


@pytest.mark.parametrize("character", ["b", "\0", "\U0010ffff"])
def test_a_character_outside_the_alphabet_is_named(character):
    with pytest.raises(UserError) as caught:
        CharTokenizer("acd").encode("ac" + character)
    assert repr(character) in str(caught.value)
    assert "'acd'" in str(caught.value)


def test_the_default_text_is_pythons_own_documentation():
    text = read_text(None)
    assert len(text) > 300_000
    assert "assignment" in text


def test_a_folder_is_read_in_the_order_of_names(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "1.txt").write_text("second")
    (tmp_path / "a.txt").write_text("first")
    assert read_text(str(tmp_path)) == "first\nsecond"


def test_the_split_is_ninety_to_ten_in_file_order():
    corpus = Corpus(np.arange(1000), 4)
    np.testing.assert_array_equal(corpus.train, np.arange(900))
    np.testing.assert_array_equal(corpus.validation, np.arange(900, 1000))


def test_a_batch_is_a_function_of_seed_and_step_alone():
    corpus = Corpus(np.arange(5000, dtype=np.int32), 8)
    other = Corpus(np.arange(5000, dtype=np.int32), 8)
    for step in (7, 3):  # in any order, on any Corpus of the same text
        first, second = corpus.batch(1, step, 16), other.batch(1, step, 16)
        np.testing.assert_array_equal(first.tokens, second.tokens)
    assert not np.array_equal(corpus.batch(1, 3, 16).tokens, corpus.batch(1, 4, 16).tokens)
    assert not np.array_equal(corpus.batch(1, 3, 16).tokens, corpus.batch(2, 3, 16).tokens)


def test_labels_are_the_next_tokens_and_come_from_the_training_split():
    corpus = Corpus(np.arange(500, dtype=np.int32), 8)
    batch = corpus.batch(0, 0, 64)
    np.testing.assert_array_equal(batch.labels, batch.tokens + 1)
    assert batch.labels.max() < 450
    assert batch.valid == 64 * 8


def test_shards_are_disjoint_and_together_complete():
    batch = Corpus(np.arange(5000, dtype=np.int32), 4).batch(0, 0, 16)
    shards = [batch.shard(part, 2) for part in range(2)]
    np.testing.assert_array_equal(np.concatenate([s.tokens for s in shards]), batch.tokens)
    assert [len(s.tokens) for s in shards] == [8, 8]
    assert [s.valid for s in shards] == [batch.valid] * 2


@given(st.integers(20, 400), st.integers(1, 9), st.integers(1, 7))
def test_validation_predicts_every_token_once(tokens, sequence, size):
    text = np.arange(10 * tokens, dtype=np.int32)
    corpus = Corpus(text, sequence)
    seen = []
    for batch in corpus.validation_batches(size):
        assert batch.tokens.shape == (size, sequence)
        valid = batch.labels != IGNORE
        assert batch.valid == valid.sum()
        np.testing.assert_array_equal(batch.labels[valid], batch.tokens[valid] + 1)
        seen.append(batch.labels[valid])
    np.testing.assert_array_equal(np.concatenate(seen), corpus.validation[1:])


def test_a_text_shorter_than_a_sequence_is_refused_with_the_longest_that_works():
    with pytest.raises(UserError, match="--seq-len up to 9"):
        Corpus(np.arange(100), 10)
    Corpus(np.arange(100), 9)
