"""Text, tokens and batches.

A corpus is one text file, a folder of them in the order of their names, or, by default, the
documentation that every Python carries (`pydoc_data.topics`). Its first 90 % train, its last 10 %
validate. The batch of step k is a function of (seed, k) alone: every rank draws the whole batch
and keeps its share, so no rank ever sends text and every mesh sees the same data.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mpiparallel.errors import UserError
from mpiparallel.layers.loss import IGNORE


class CharTokenizer:
    """One token per character of an alphabet, in code point order."""

    def __init__(self, alphabet: str):
        self.alphabet = alphabet
        self._code_points = np.array([ord(character) for character in alphabet], np.uint32)

    @property
    def vocabulary(self) -> int:
        """Number of tokens."""
        return len(self.alphabet)

    @property
    def start(self) -> str:
        """What a sample without a prompt starts from: a line break, where there is one."""
        return "\n" if "\n" in self.alphabet else self.alphabet[0]

    def encode(self, text: str) -> np.ndarray:
        """Text -> (n,) int32. Raises UserError for a character outside the alphabet."""
        points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
        tokens = np.searchsorted(self._code_points, points)
        tokens[tokens == self.vocabulary] = 0
        unknown = self._code_points[tokens] != points
        if unknown.any():
            raise UserError(
                f"the character {chr(points[unknown.argmax()])!r} is not among the "
                f"{self.vocabulary} of the alphabet: {''.join(self.alphabet)!r}"
            )
        return tokens.astype(np.int32)

    def decode(self, tokens: Iterable[int]) -> str:
        """(n,) integers -> text."""
        return "".join(self.stream(tokens))

    def stream(self, tokens: Iterable[int]) -> Iterator[str]:
        """The text of tokens as they come."""
        return (self.alphabet[token] for token in tokens)

    def describe(self) -> dict[str, str]:
        """What `tokenizer_from` makes it again from."""
        return {"kind": "char", "alphabet": self.alphabet}


class ByteTokenizer:
    """One token per byte of the UTF-8 text: 256 tokens, any text."""

    vocabulary = 256
    start = "\n"

    def encode(self, text: str) -> np.ndarray:
        """Text -> (n,) int32."""
        return np.frombuffer(text.encode(errors="surrogateescape"), np.uint8).astype(np.int32)

    def decode(self, tokens: Iterable[int]) -> str:
        """(n,) integers -> text; bytes that are not UTF-8 show as U+FFFD."""
        return "".join(self.stream(tokens))

    def stream(self, tokens: Iterable[int]) -> Iterator[str]:
        """The text of tokens as they come; a character appears with its last byte."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for token in tokens:
            yield decoder.decode(bytes([token]))
        yield decoder.decode(b"", final=True)

    def describe(self) -> dict[str, str]:
        """What `tokenizer_from` makes it again from."""
        return {"kind": "bytes"}


class IdTokenizer:
    """Token numbers as text, "464 318 257": for models whose own tokenizer is not at hand."""

    start = "0"

    def __init__(self, vocabulary: int):
        self.vocabulary = vocabulary

    def encode(self, text: str) -> np.ndarray:
        """Numbers, separated by spaces -> (n,) int32. Raises UserError for anything else."""
        words = text.split()
        for word in words:
            if not word.isdecimal() or int(word) >= self.vocabulary:
                raise UserError(
                    f"{word!r} is not a token of this model, which knows no letters; legal: "
                    f"numbers from 0 to {self.vocabulary - 1}, separated by spaces"
                )
        return np.array([int(word) for word in words], np.int32)

    def decode(self, tokens: Iterable[int]) -> str:
        """(n,) integers -> text."""
        return "".join(self.stream(tokens))

    def stream(self, tokens: Iterable[int]) -> Iterator[str]:
        """The text of tokens as they come."""
        return (f" {token}" for token in tokens)

    def describe(self) -> dict[str, str]:
        """What `tokenizer_from` makes it again from."""
        return {"kind": "ids", "vocabulary": str(self.vocabulary)}


Tokenizer = CharTokenizer | ByteTokenizer | IdTokenizer


def tokenizer_from(description: dict[str, str]) -> Tokenizer:
    """The tokenizer of a `describe()`. Raises KeyError or ValueError for anything else."""
    match description["kind"]:
        case "char":
            return CharTokenizer(description["alphabet"])
        case "bytes":
            return ByteTokenizer()
        case "ids":
            return IdTokenizer(int(description["vocabulary"]))
    raise ValueError(description["kind"])


def read_text(path: str | None) -> str:
    """The text of a file, of all files in a folder, or of Python's documentation for None.

    Raises UserError where there is no such file, or no text in it.
    """
    if path is None:
        from pydoc_data.topics import topics

        return "\n".join(topics[name] for name in sorted(topics))
    source = Path(path)
    if source.is_dir():
        files = sorted(file for file in source.rglob("*") if file.is_file())
    elif source.exists():
        files = [source]
    else:
        raise UserError(f"--data {path}: there is no such file or folder")
    try:
        text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    except UnicodeDecodeError as error:
        raise UserError(f"--data {path}: not a UTF-8 text ({error.reason})") from None
    except OSError as error:
        raise UserError(f"--data {path}: cannot be read ({error.strerror})") from None
    if not text:
        raise UserError(f"--data {path}: there is no text in it")
    return text


@dataclass
class Batch:
    """tokens and labels (B, S) int32, and the number of labels in the whole global batch that
    count towards its loss, on whichever rank they are."""

    tokens: np.ndarray
    labels: np.ndarray
    valid: int

    def shard(self, part: int, parts: int) -> Batch:
        """The rows of replica `part` of `parts`; `valid` stays that of the global batch."""
        rows = slice(part * len(self.tokens) // parts, (part + 1) * len(self.tokens) // parts)
        return Batch(self.tokens[rows], self.labels[rows], self.valid)


class Corpus:
    """A tokenized text, cut into training and validation split.

    sequence : tokens per sequence. Raises UserError where a split is shorter than a sequence.
    """

    def __init__(self, tokens: np.ndarray, sequence: int):
        cut = len(tokens) * 9 // 10
        self.train, self.validation = tokens[:cut], tokens[cut:]
        self.sequence = sequence
        shortest = min(len(self.train), len(self.validation))
        if shortest < sequence + 1:
            raise UserError(
                f"the text is too short: its splits have {len(self.train)} and "
                f"{len(self.validation)} tokens, and --seq-len {sequence} wants {sequence + 1}; "
                f"legal here: --seq-len up to {max(0, shortest - 1)}"
            )

    def batch(self, seed: int, step: int, size: int) -> Batch:
        """The global batch of a step: `size` random windows of the training split."""
        generator = np.random.default_rng([seed, step])
        starts = generator.integers(0, len(self.train) - self.sequence, size)
        windows = self.train[starts[:, None] + np.arange(self.sequence + 1)]
        return Batch(windows[:, :-1], windows[:, 1:], size * self.sequence)

    def validation_batches(self, size: int) -> Iterator[Batch]:
        """Every token of the validation split but the first is predicted once, in batches of
        `size` windows; what the last ones have too many is ignored by the loss."""
        inputs, targets = self.validation[:-1], self.validation[1:]
        windows = -(-len(inputs) // self.sequence)
        batches = -(-windows // size)
        full = batches * size * self.sequence
        tokens = np.zeros(full, np.int32)
        labels = np.full(full, IGNORE, np.int32)
        tokens[: len(inputs)], labels[: len(inputs)] = inputs, targets
        shape = (batches, size, self.sequence)
        for batch_tokens, batch_labels in zip(
            tokens.reshape(shape), labels.reshape(shape), strict=True
        ):
            yield Batch(batch_tokens, batch_labels, int((batch_labels != IGNORE).sum()))
