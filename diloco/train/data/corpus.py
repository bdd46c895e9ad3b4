"""The corpus: documents, tokenized once into memory-mapped files, split into train and held-out.

The hash of a document decides whether it is held out (one in twenty is), so all machines agree on the split. Documents
are read one by one: the corpus need not fit into memory.
"""

import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from diloco.errors import ConfigError
from diloco.runs.writer import Phase
from diloco.train.data import documents
from diloco.train.data.batches import Batches
from diloco.train.data.documents import Sources
from diloco.train.data.tokenizer import Tokenizer, dtype_of, load_tokenizer, tokenizer_identity

HELD_OUT = 0.05
_FORMAT = 2
"""Part of the cache's key: raise it when the files or the split change."""
_CHUNK = 1 << 22
_EVALUATED_AT_ONCE = 16


def default_cache() -> Path:
    """The folder `diloco` in the user's cache directory."""
    base = os.environ.get("XDG_CACHE_HOME") or ("~/Library/Caches" if sys.platform == "darwin" else "~/.cache")
    return Path(base).expanduser() / "diloco"


@dataclass(frozen=True)
class Corpus:
    name: str
    sha256: str
    """Hash of the hashes of all documents in order: the same on every machine for the same text."""
    nbytes: int
    """Bytes of the train text."""
    train: Path
    held_out: Path
    tokenizer: Tokenizer
    bytes_per_token: float
    """In the held-out text: bits per byte = nats per token / ln 2 / bytes_per_token."""

    def batches(self, replica: int, replicas: int, sequences: int, context: int, seed: int) -> Batches:
        """The train windows of one replica, `sequences` at a time (see `diloco.train.data.batches`)."""
        tokens = self._tokens(self.train)
        return Batches(tokens, replica=replica, replicas=replicas, sequences=sequences, context=context, seed=seed)

    def evaluation(self, context: int, limit: int) -> list[tuple[Tensor, Tensor]]:
        """Held-out windows of at most `limit` tokens in total: evenly spread, always the same, in equal batches."""
        ids = self._tokens(self.held_out)
        windows = max(len(ids) - 1, 0) // context
        if windows == 0:
            raise ConfigError(
                f"{self.name}: {len(ids)} tokens are held out, fewer than one window of context {context}: "
                "add more --data, or lower --context"
            )
        count = min(windows, max(limit // context, 1))
        size = min(count, _EVALUATED_AT_ONCE)
        count -= count % size
        starts = np.arange(count) * windows // count * context
        both = torch.from_numpy(ids[starts[:, None] + np.arange(context + 1)].astype(np.int64))
        return [(part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in both.split(size)]

    @property
    def train_tokens(self) -> int:
        return self.train.stat().st_size // dtype_of(self.tokenizer.vocabulary).itemsize

    def unigram_loss(self) -> float:
        """Nats per held-out token of a model that knows only the frequency of each token in the train part."""
        size = self.tokenizer.vocabulary
        train = self._counts(self.train, size) + 1  # so that no token is impossible
        held_out = self._counts(self.held_out, size)
        return float(-(held_out * np.log(train / train.sum())).sum() / held_out.sum())

    def _tokens(self, path: Path) -> np.ndarray:
        kind = dtype_of(self.tokenizer.vocabulary)
        return np.asarray(np.memmap(path, kind, "r")) if path.stat().st_size else np.empty(0, kind)

    def _counts(self, path: Path, size: int) -> np.ndarray:
        ids, counts = self._tokens(path), np.zeros(size, np.int64)
        for start in range(0, len(ids), _CHUNK):
            counts += np.bincount(ids[start : start + _CHUNK], minlength=size)
        return counts


def prepare(
    data: Sequence[str],
    tokenizer: str,
    cache: Path | None = None,
    *,
    text_key: str = "text",
    phase: Phase | None = None,
) -> Corpus:
    """Tokenize a corpus, unless the cache has it.

    Args:
        data: files, folders or hf:NAME; if empty, the sources of Python's standard library.
        tokenizer: bytes, train:SIZE, the path of a tokenizer.json, or hf:PATH_OR_ID for that of a model.
        cache: folder of prepared corpora. Default: `diloco` in the user's cache folder.
        text_key: the field of .jsonl, .parquet and hf:NAME that holds the text.
        phase: reports progress.
    """
    phase = phase or Phase(None)
    phase.say("reading the data")
    sources = documents.find(data, text_key)
    key = hashlib.sha256(json.dumps([_FORMAT, sources.identity(), tokenizer_identity(tokenizer)]).encode()).hexdigest()
    cache = cache or default_cache()
    folder = cache / key[:16]
    if not _is_complete(folder):
        try:
            cache.mkdir(parents=True, exist_ok=True)
            # Written under a temporary name, then renamed: a folder with the final name is complete.
            with tempfile.TemporaryDirectory(prefix=f"{key[:16]}-", suffix=".tmp", dir=cache) as temporary:
                _write(Path(temporary), sources, tokenizer, phase)
                _publish(Path(temporary), folder)
        except OSError as error:
            raise ConfigError(
                f"cannot prepare the corpus: {error.filename or cache}: {error.strerror}; free space there, or set "
                "XDG_CACHE_HOME to another folder"
            ) from error
    return _open(folder, sources, tokenizer)


def _open(folder: Path, sources: Sources, tokenizer: str) -> Corpus:
    facts = _facts(folder)
    return Corpus(
        name=sources.name,
        sha256=facts["sha256"],
        nbytes=facts["train"]["bytes"],
        train=folder / "train.bin",
        held_out=folder / "held_out.bin",
        tokenizer=load_tokenizer(str(folder) if tokenizer.startswith("train:") else tokenizer),
        bytes_per_token=facts["held_out"]["bytes"] / max(facts["held_out"]["tokens"], 1),
    )


def _facts(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "corpus.json").read_text(encoding="utf-8"))


def _is_complete(folder: Path) -> bool:
    """Compare sizes too, because a cleaner may have deleted some of the files."""
    try:
        facts = _facts(folder)
        width = dtype_of(facts["vocabulary"]).itemsize
        return all((folder / f"{p}.bin").stat().st_size == width * facts[p]["tokens"] for p in ("train", "held_out"))
    except (OSError, ValueError, KeyError):
        return False


def _publish(temporary: Path, folder: Path) -> None:
    """Rename to the final name, unless another process was faster: its folder has the same content."""
    if folder.exists() and not _is_complete(folder):
        with suppress(FileNotFoundError):  # another process was faster
            folder.rename(temporary / "damaged")  # in one step: two processes must not delete each other's repair
    try:
        (temporary / "corpus").rename(folder)  # TemporaryDirectory still owns the outer folder
    except OSError:
        if not _is_complete(folder):
            raise


def _write(temporary: Path, sources: Sources, tokenizer: str, phase: Phase) -> None:
    folder = temporary / "corpus"
    folder.mkdir()
    if tokenizer.startswith("train:"):
        phase.say("training the tokenizer")
    utf8 = tokenizer != "bytes"
    train_texts = (text for text in documents.texts(sources, utf8=utf8) if not _is_held_out(_digest(text)))
    encoder = load_tokenizer(tokenizer, train_texts)
    if tokenizer.startswith("train:"):
        encoder.save(folder)
    digest = hashlib.sha256()
    total = sum(item.stat().st_size for item in sources.items if isinstance(item, Path))
    with (folder / "train.bin").open("wb") as train, (folder / "held_out.bin").open("wb") as held_out:
        counts = {"train": [0, 0], "held_out": [0, 0]}
        for text, ids in _encoded(sources, encoder, utf8):
            document = _digest(text)
            digest.update(document)
            part, file = ("held_out", held_out) if _is_held_out(document) else ("train", train)
            file.write(np.append(ids, encoder.end).astype(dtype_of(encoder.vocabulary)).tobytes())
            counts[part][0] += len(ids) + 1
            counts[part][1] += len(text)
            phase.progress("tokenizing", counts["train"][1] + counts["held_out"][1], total)
    if not any(n for n, _ in counts.values()):
        raise documents.no_text(sources)
    _even_out(folder, counts, encoder)
    facts = {part: {"tokens": n, "bytes": size} for part, (n, size) in counts.items()}
    content = {"name": sources.name, "sha256": digest.hexdigest(), "vocabulary": encoder.vocabulary, **facts}
    (folder / "corpus.json").write_text(json.dumps(content, indent=1), encoding="utf-8")


def _encoded(sources: Sources, encoder: Tokenizer, utf8: bool) -> Iterator[tuple[bytes, np.ndarray]]:
    """(text, ids) of every document."""
    texts = documents.texts(sources, utf8=utf8)
    with ThreadPoolExecutor() as pool:  # the tokenizers library releases the interpreter's lock
        while group := list(islice(texts, 256)):
            yield from zip(group, pool.map(encoder.encode, group), strict=True)


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


def _is_held_out(digest: bytes) -> bool:
    return int.from_bytes(digest[:8], "big") < HELD_OUT * 2**64


def _even_out(folder: Path, counts: dict[str, list[int]], encoder: Tokenizer) -> None:
    """With few documents, the hash may hold out none or most: then hold out the last twentieth of the tokens."""
    total, nbytes = (sum(column) for column in zip(*counts.values(), strict=True))
    if 0.01 <= counts["held_out"][0] / total <= 0.2:
        return
    kind = dtype_of(encoder.vocabulary)
    tail = round(total * HELD_OUT)
    with (folder / "train.bin").open("r+b") as train, (folder / "held_out.bin").open("r+b") as held_out:
        train.seek(0, os.SEEK_END)
        shutil.copyfileobj(held_out, train)
        train.seek((total - tail) * kind.itemsize)
        held_out.seek(0)
        held_out.truncate()
        size = 0
        while chunk := train.read(_CHUNK * kind.itemsize):
            held_out.write(chunk)
            size += encoder.nbytes(np.frombuffer(chunk, kind))
        train.truncate((total - tail) * kind.itemsize)
    counts["train"][:] = total - tail, nbytes - size
    counts["held_out"][:] = tail, size
