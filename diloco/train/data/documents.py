"""The sources of documents: Python's standard library, files, or a streamed Hugging Face dataset.

A document is a Python file, a line of .jsonl, a row of .parquet, or a piece of about 16 KiB of any other text file;
these are often few and large, and a part of each should be held out.
"""

import hashlib
import json
import os
import platform
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

from diloco.errors import ConfigError, install_command

PIECE = 1 << 14
"""Bytes of a piece of a text file, up to the end of a line."""
_RECORDS = (".jsonl", ".parquet")
"""Files with a known structure. Every other file is text, unless its first bytes contain a zero."""
_CHECKED = 100
"""Documents of each file that `check` reads."""
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclass(frozen=True)
class Sources:
    name: str
    items: tuple[Path | str, ...]
    """Files in order, and hf:NAME as text."""
    standard_library: bool = False
    text_key: str = "text"
    """The field of a line or row that holds its text."""
    skipped: tuple[str, ...] = ()
    """Messages about files in folders that were skipped."""

    def identity(self) -> str:
        """A text that changes if a source does: paths, sizes and times of change."""
        facts = [] if self.text_key == "text" else [f"text {self.text_key}"]
        for item in self.items:
            if isinstance(item, str):
                facts.append(item)
                continue
            status = item.stat()
            facts.append(f"{item.absolute()} {status.st_size, status.st_mtime_ns}")
        return "\n".join(facts)


def find(data: Sequence[str], text_key: str = "text") -> Sources:
    """All files that `--data` names, each once; those of a folder in the order of their paths."""
    if not data:
        return _standard_library()
    items: dict[Path | str, None] = {}
    skipped: list[str] = []
    for spec in data:
        if spec.startswith("hf:"):
            items[spec] = None
            continue
        path = Path(spec).expanduser()
        if path.is_dir():
            files, messages = _in_folder(path)
            items.update(dict.fromkeys(files))
            skipped += messages
        elif not path.exists():
            raise ConfigError(f"data={spec!r}: no such file or folder; check the path, or use hf:NAME for a dataset")
        elif _is_binary(path):
            raise ConfigError(f"data={spec!r}: a binary file; use text (convert UTF-16 to UTF-8 with iconv), .jsonl "
                              "or .parquet")  # fmt: skip
        else:
            items[path] = None
    name = data[0] if len(data) == 1 else f"{data[0]} and {len(data) - 1} more"
    return Sources(name, tuple(items), text_key=text_key, skipped=tuple(skipped))


def _in_folder(folder: Path) -> tuple[list[Path], list[str]]:
    """The files to read, and messages about skipped ones. Next to records, text other than .txt only describes them."""
    files = sorted((file for file in folder.rglob("*") if file.is_file()), key=lambda file: file.parts)
    records = any(file.suffix in _RECORDS for file in files)

    def reason(file: Path) -> str:
        if any(part.startswith(".") for part in file.relative_to(folder).parts):
            return "hidden"
        if records and file.suffix not in (*_RECORDS, ".txt"):
            return "not .txt, next to .jsonl or .parquet"
        return "binary" if _is_binary(file) else ""

    reasons = {file: reason(file) for file in files}
    counts = Counter(reasons.values())
    if not counts[""]:
        raise ConfigError(f"data={str(folder)!r}: the folder holds no text, .jsonl or .parquet; use one that does")
    skipped = [f"{folder}: skipped {n} of {len(files)} files ({why})" for why, n in counts.items() if why]
    return [file for file in files if not reasons[file]], skipped


def _is_binary(path: Path) -> bool:
    if path.suffix in _RECORDS:
        return False
    try:
        with path.open("rb") as file:
            return b"\0" in file.read(8192)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; check its permissions") from error


def check(sources: Sources, *, utf8: bool) -> None:
    """Read the first documents of every source, to raise early what reading all of them would raise."""
    counts = [len(list(islice(texts(replace(sources, items=(item,)), utf8=utf8), _CHECKED))) for item in sources.items]
    if not any(counts):
        raise no_text(sources)


def no_text(sources: Sources) -> ConfigError:
    return ConfigError(f"{sources.name}: the corpus is empty; set --data to files that hold text")


def texts(sources: Sources, *, utf8: bool = False) -> Iterator[bytes]:
    """The documents as they are on disk. Identical files of the standard library are read once.

    `utf8`: raise if a document is not UTF-8, which only the tokenizer bytes can read.
    """
    seen: set[bytes] = set()
    for item in sources.items:
        position = 0
        for document in _read(item, sources.text_key):
            if utf8:
                _check_utf8(document, item, position)
            position += len(document)
            if sources.standard_library:
                digest = hashlib.sha256(document).digest()
                if digest in seen:
                    continue
                seen.add(digest)
            if document:
                yield document


def _check_utf8(document: bytes, item: Path | str, position: int) -> None:
    try:
        document.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{item}: byte {position + error.start} ({document[error.start]:#04x}) is not UTF-8; convert the file, "
            "for example with iconv -f LATIN1 -t UTF-8, or train on the raw bytes with --tokenizer bytes"
        ) from None


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
    return _BY_ROW[item.suffix](item, key) if item.suffix in _BY_ROW else _text(item)


def _text(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(PIECE):
            piece += file.readline(PIECE)
            for _ in range(3):  # do not cut a character
                if b"\x80" <= file.peek(1)[:1] < b"\xc0":
                    piece += file.read(1)
            yield piece


def _jsonl(path: Path, key: str) -> Iterator[bytes]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                yield json.loads(line)[key].encode()
            except UnicodeError:
                raise ConfigError(
                    f"{path}, line {number}: not UTF-8; convert the file, for example with "
                    "iconv -f LATIN1 -t UTF-8, or remove the line"
                ) from None
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise ConfigError(
                    f'{path}, line {number}: not of the form {{"{key}": "…"}}; if the text has another name, pass it '
                    "with --text-key; otherwise fix or remove the line"
                ) from error


def _parquet(path: Path, key: str) -> Iterator[bytes]:
    try:
        parquet: Any = import_module("pyarrow.parquet")
    except ImportError as error:
        raise ConfigError(f"{path} needs pyarrow: {install_command('parquet')}") from error
    try:
        for rows in parquet.ParquetFile(path).iter_batches(batch_size=1024, columns=[key]):
            for text in rows.column(key).to_pylist():
                yield (text or "").encode()
    except (ValueError, KeyError, AttributeError) as error:  # ArrowInvalid is a ValueError
        raise ConfigError(
            f'{path}: not a parquet file with a column "{key}" of text; pass the column of the text with --text-key'
        ) from error


_BY_ROW = {".jsonl": _jsonl, ".parquet": _parquet}


def _stream(spec: str, key: str) -> Iterator[bytes]:
    """Stream hf:NAME or hf:NAME:CONFIG; with :COUNT at the end, only that many documents."""
    try:
        load_dataset: Any = import_module("datasets").load_dataset
    except ImportError as error:
        raise ConfigError(f"data={spec!r} needs datasets: {install_command('hf')}") from error
    name, *rest = spec.removeprefix("hf:").split(":")
    count = int(rest.pop()) if rest and rest[-1].isdigit() else None
    try:
        rows = load_dataset(name, *rest, split="train", streaming=True)
        for row in rows if count is None else rows.take(count):
            yield (row[key] or "").encode()
    except KeyError as error:
        raise ConfigError(
            f'data={spec!r}: the rows have no field "{key}"; pass the field of the text with --text-key'
        ) from error
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"data={spec!r}: {reason}; check the name and the network, or use files") from error
