"""Where documents come from: Python's own standard library, files, or a streamed Hugging Face dataset.

A document is a file of sources, a line of .jsonl, a row of .parquet, the tokens up to an end token, or a
piece of about 16 KiB of a .txt file: such files are often few and large, and a part of each should be held out.
"""

import hashlib
import json
import os
import platform
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from diloco.errors import ConfigError, install_command

PIECE = 1 << 14
"""Bytes of a piece of a .txt file, up to the end of a line; tokens of a shard without ends."""
_BLOCK = 1 << 20
"""Tokens of a shard that are read at once; a longer document is cut."""
ENDINGS = (".txt", ".jsonl", ".parquet", ".bin")
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclass(frozen=True)
class Sources:
    name: str
    items: tuple[Path | str, ...]
    """Files in order, and hf:NAME as text."""
    standard_library: bool = False
    text_key: str = "text"
    """The field of a line or row that holds its text."""

    @property
    def tokenized(self) -> bool:
        return any(isinstance(item, Path) and item.suffix == ".bin" for item in self.items)

    def identity(self) -> str:
        """A text that differs if a source does: paths, sizes and times of change."""
        facts = [] if self.text_key == "text" else [f"text {self.text_key}"]
        for item in self.items:
            if isinstance(item, str):
                facts.append(item)
                continue
            for file in (item, item.with_suffix(".json")) if item.suffix == ".bin" else (item,):
                status = file.stat() if file.exists() else None
                facts.append(f"{file.absolute()} {status and (status.st_size, status.st_mtime_ns)}")
        return "\n".join(facts)


def find(data: Sequence[str], text_key: str = "text") -> Sources:
    """All files that `--data` names, each once; those of a folder in the order of their paths."""
    if not data:
        return _standard_library()
    items: dict[Path | str, None] = {}
    for spec in data:
        if spec.startswith("hf:"):
            items[spec] = None
            continue
        path = Path(spec).expanduser()
        if not path.exists():
            raise ConfigError(f"data={spec!r}: no such file or folder; check the path (or give hf:NAME for a dataset)")
        if path.is_dir():
            below = sorted(path.rglob("*"), key=lambda file: file.relative_to(path).parts)
            files = [file for file in below if file.is_file() and file.suffix in ENDINGS]
            if not files:
                raise ConfigError(f"data={spec!r}: the folder holds no {', '.join(ENDINGS)}; give one that does")
            items.update(dict.fromkeys(files))
        elif path.suffix in ENDINGS:
            items[path] = None
        else:
            raise ConfigError(f"data={spec!r}: unknown ending {path.suffix!r}; give {', '.join(ENDINGS)} or a folder")
    sources = Sources(
        data[0] if len(data) == 1 else f"{data[0]} and {len(data) - 1} more", tuple(items), text_key=text_key
    )
    if sources.tokenized and not all(isinstance(item, Path) and item.suffix == ".bin" for item in items):
        raise ConfigError(f"data={list(data)}: token shards (.bin) and text in one corpus; give one kind")
    return sources


def texts(sources: Sources) -> Iterator[bytes]:
    """The documents as they are on disk. Equal files of the standard library are given once."""
    seen: set[bytes] = set()
    for item in sources.items:
        for document in _read(item, sources.text_key):
            if sources.standard_library:
                digest = hashlib.sha256(document).digest()
                if digest in seen:
                    continue
                seen.add(digest)
            if document:
                yield document


def shards(sources: Sources, vocabulary: int, end: int) -> Iterator[np.ndarray]:
    """The documents of token shards, without their ends."""
    for item in sources.items:
        assert isinstance(item, Path)
        tokens = open_shard(item, vocabulary)
        start = 0
        while start < len(tokens):
            block = np.array(tokens[start : start + _BLOCK])
            cuts = np.flatnonzero(block == end) + 1
            if len(cuts):
                block = block[: cuts[-1]]
                yield from (piece[:-1] for piece in np.split(block, cuts[:-1]) if len(piece) > 1)
            else:
                yield from np.split(block, range(PIECE, len(block), PIECE))
            start += len(block)


def open_shard(path: Path, vocabulary: int) -> np.ndarray:
    """Map raw little-endian ids; a .json beside them says {"dtype": "uint16" or "uint32", "vocabulary": N}."""
    beside = path.with_suffix(".json")
    try:
        facts = json.loads(beside.read_text(encoding="utf-8"))
        kind, given = {"uint16": "<u2", "uint32": "<u4"}[facts["dtype"]], int(facts["vocabulary"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        form = '{"dtype": "uint16" or "uint32", "vocabulary": N}'
        raise ConfigError(f"{path}: a token shard needs {beside.name} beside it of the form {form}") from error
    if given != vocabulary:
        raise ConfigError(
            f"{path} has a vocabulary of {given}, the tokenizer one of {vocabulary}: give the shard's with --tokenizer"
        )
    size = path.stat().st_size
    if size % np.dtype(kind).itemsize:
        raise ConfigError(
            f"{path}: {size} bytes are not a multiple of the size of {facts['dtype']}; write the shard again"
        )
    return np.asarray(np.memmap(path, kind, "r")) if size else np.empty(0, kind)


def _standard_library() -> Sources:
    """Every .py file, except tests, installed packages and files generated at installation, which differ by machine."""
    root = Path(sysconfig.get_path("stdlib"))
    files: list[Path] = []
    for folder, below, names in os.walk(root):
        below[:] = [name for name in below if name not in _LEFT_OUT and not name.startswith("config-")]
        files += [Path(folder, n) for n in names if n.endswith(".py") and not n.startswith("_sysconfigdata")]
    files.sort(key=lambda file: file.parts)
    return Sources(f"Python {platform.python_version()} standard library", tuple(files), standard_library=True)


def _read(item: Path | str, key: str) -> Iterator[bytes]:
    if isinstance(item, str):
        return _stream(item, key)
    if item.suffix == ".py":
        return iter((item.read_bytes(),))
    return _text(item) if item.suffix == ".txt" else _BY_ROW[item.suffix](item, key)


def _text(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(PIECE):
            yield piece + file.readline(PIECE)


def _jsonl(path: Path, key: str) -> Iterator[bytes]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                yield json.loads(line)[key].encode(errors="replace")
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ConfigError(
                    f'{path}, line {number}: not of the form {{"{key}": "…"}}; if the text has another name, give it '
                    "with --text-key; otherwise correct or remove the line"
                ) from error


def _parquet(path: Path, key: str) -> Iterator[bytes]:
    try:
        parquet: Any = import_module("pyarrow.parquet")
        invalid = import_module("pyarrow").ArrowInvalid
    except ImportError as error:
        raise ConfigError(f"{path} needs pyarrow: {install_command('parquet')}") from error
    try:
        for rows in parquet.ParquetFile(path).iter_batches(batch_size=1024, columns=[key]):
            for text in rows.column(key).to_pylist():
                yield (text or "").encode(errors="replace")
    except (invalid, KeyError, AttributeError) as error:
        raise ConfigError(
            f'{path}: not a parquet file with a column "{key}"; give the column of the text with --text-key'
        ) from error


_BY_ROW = {".jsonl": _jsonl, ".parquet": _parquet}


def _stream(spec: str, key: str) -> Iterator[bytes]:
    """hf:NAME, hf:NAME:CONFIG, and with :COUNT at the end only that many documents."""
    try:
        load_dataset: Any = import_module("datasets").load_dataset
    except ImportError as error:
        raise ConfigError(f"data={spec!r} needs datasets: {install_command('hf')}") from error
    name, *rest = spec.removeprefix("hf:").split(":")
    count = int(rest.pop()) if rest and rest[-1].isdigit() else None
    try:
        rows = load_dataset(name, *rest, split="train", streaming=True)
        for row in rows if count is None else rows.take(count):
            yield (row[key] or "").encode(errors="replace")
    except KeyError as error:
        raise ConfigError(
            f'data={spec!r}: the rows have no field "{key}"; give the field of the text with --text-key'
        ) from error
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"data={spec!r}: {reason}; check the name and the network, or give files") from error
