"""Text to token ids and back: bytes as they are, or a BPE of the `tokenizers` library.

transformers' AutoTokenizer reads what `save` writes, and gives the same ids.
"""

import contextlib
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from diloco.errors import ConfigError, install_command

END = "<|endoftext|>"
"""The token between documents. The same characters inside a text do not become this token."""
_KNOWN_ENDS = (END, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")
_TRAINED_ON = 1 << 26
"""Maximum bytes of text that a BPE is trained on: with more, the merges hardly change."""
_FORMS = "bytes, train:SIZE, the path of a tokenizer.json or hf:NAME"

Ids = np.ndarray | Sequence[int]


class Tokenizer(Protocol):
    @property
    def vocabulary(self) -> int: ...
    @property
    def end(self) -> int:
        """The id that closes a document."""
        ...

    def encode(self, text: bytes) -> np.ndarray:
        """Convert to ids of `dtype_of(vocabulary)`, without the end."""
        ...

    def decode(self, ids: Ids) -> str:
        """Convert to text, without the ends."""
        ...

    def nbytes(self, ids: np.ndarray) -> int:
        """Bytes of the decoded text."""
        ...

    def digest(self) -> str:
        """A short text that differs if an id means different text."""
        ...

    def save(self, folder: Path) -> None:
        """Write tokenizer.json and tokenizer_config.json."""
        ...


def dtype_of(vocabulary: int) -> np.dtype:
    """The smallest of uint16 and uint32 that holds every id, little-endian as on disk."""
    return np.dtype("<u2" if vocabulary <= 1 << 16 else "<u4")


def default_tokenizer(model: str) -> str:
    """A pretrained model knows only its own tokens; bytes need no training.

    >>> default_tokenizer("tiny"), default_tokenizer("hf:Qwen/Qwen3-0.6B")
    ('bytes', 'hf:Qwen/Qwen3-0.6B')
    """
    return model if model.startswith("hf:") else "bytes"


def check_tokenizer(spec: str) -> None:
    """Raise if it cannot be loaded, as far as can be checked without the network."""
    if spec.startswith("train:"):
        _trained_size(spec)
    elif spec != "bytes" and not _on_hub(spec):
        _file(spec)
    if spec != "bytes":
        _library(f"tokenizer={spec!r}")


def load_tokenizer(spec: str, texts: Iterable[bytes] = ()) -> Tokenizer:
    """bytes, train:SIZE (a BPE trained on `texts`), the path of a tokenizer.json or of its folder, or hf:PATH_OR_ID."""
    if spec == "bytes":
        return Bytes()
    if spec.startswith("train:"):
        return BPE.train(texts, _trained_size(spec))
    return BPE.read(_file(spec))


def _trained_size(spec: str) -> int:
    size = spec.removeprefix("train:")
    if not size.isdigit() or int(size) < 257:
        raise ConfigError(f"tokenizer={spec!r}: use train:SIZE with at least 257 (256 bytes and the end)")
    return int(size)


def tokenizer_identity(spec: str) -> str:
    """A text that changes if the tokenizer does: for a file, the hash of its content."""
    if spec == "bytes" or spec.startswith("train:"):
        return spec
    return hashlib.sha256(_file(spec).read_bytes()).hexdigest()


class Bytes:
    """Every byte is a token; 256 is the end.

    >>> Bytes().encode("hé".encode()).tolist()
    [104, 195, 169]
    """

    vocabulary = 257
    end = 256

    def encode(self, text: bytes) -> np.ndarray:
        return np.frombuffer(text, np.uint8).astype(dtype_of(self.vocabulary))

    def decode(self, ids: Ids) -> str:
        values = np.asarray(ids, np.int64)
        return values[values < 256].astype(np.uint8).tobytes().decode(errors="replace")

    def nbytes(self, ids: np.ndarray) -> int:
        return int(np.count_nonzero(ids < 256))

    def digest(self) -> str:
        return "bytes"

    def save(self, folder: Path) -> None:
        """Write a byte-level BPE without merges, by hand because `tokenizers` may not be installed."""
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                 "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                 "vocab": {c: i for i, c in enumerate(_byte_characters())}, "merges": []}  # fmt: skip
        end = {"id": self.end, "content": END, "single_word": False, "lstrip": False, "rstrip": False,
               "normalized": False, "special": True}  # fmt: skip
        content = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [end], "normalizer": None,
                 "pre_tokenizer": level, "post_processor": None, "decoder": level, "model": model}  # fmt: skip
        (folder / "tokenizer.json").write_text(json.dumps(content, ensure_ascii=False, indent=1), encoding="utf-8")
        _write_settings(folder, {}, END)


class BPE:
    """A `tokenizers.Tokenizer`. If it has no known end token, one is added."""

    def __init__(self, tokenizer: Any, settings: dict[str, Any]) -> None:
        tokenizer.encode_special_tokens = True  # in a document, the text of a special token is only text
        self._tokenizer, self._settings = tokenizer, settings
        eos = settings.get("eos_token")
        names = [eos["content"] if isinstance(eos, dict) else eos, *_KNOWN_ENDS]
        name = next((n for n in names if n and tokenizer.token_to_id(n) is not None), END)
        if tokenizer.token_to_id(name) is None:
            tokenizer.add_special_tokens([name])
        self._name = name
        self.end: int = tokenizer.token_to_id(name)
        self.vocabulary: int = max(tokenizer.get_vocab().values()) + 1  # ids may have gaps
        self._dtype = dtype_of(self.vocabulary)

    @classmethod
    def read(cls, path: Path) -> "BPE":
        library = _library(f"tokenizer={str(path)!r}")
        try:
            tokenizer = library.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise ConfigError(f"tokenizer={str(path)!r} is not a valid tokenizer.json: {error}") from error
        settings = path.with_name("tokenizer_config.json")
        return cls(tokenizer, json.loads(settings.read_text(encoding="utf-8")) if settings.exists() else {})

    @classmethod
    def train(cls, texts: Iterable[bytes], size: int) -> "BPE":
        """Train a byte-level BPE of `size` tokens, or fewer if the text allows fewer merges. The end is the last id."""
        library = _library(f"tokenizer='train:{size}'")
        tokenizer = library.Tokenizer(library.models.BPE())
        tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = library.decoders.ByteLevel()
        alphabet = library.pre_tokenizers.ByteLevel.alphabet()
        trainer = library.trainers.BpeTrainer(vocab_size=size - 1, show_progress=False, initial_alphabet=alphabet)
        tokenizer.train_from_iterator(_first(texts, _TRAINED_ON), trainer)
        return cls(tokenizer, {})

    def encode(self, text: bytes) -> np.ndarray:
        ids = self._tokenizer.encode(text.decode(), add_special_tokens=False).ids
        return np.array(ids, self._dtype)

    def decode(self, ids: Ids) -> str:
        return self._tokenizer.decode([int(i) for i in ids if i != self.end], skip_special_tokens=False)

    def nbytes(self, ids: np.ndarray) -> int:
        return len(self.decode(ids).encode())

    def digest(self) -> str:
        return hashlib.sha256(self._tokenizer.to_str().encode()).hexdigest()[:16]

    def save(self, folder: Path) -> None:
        self._tokenizer.save(str(folder / "tokenizer.json"))
        _write_settings(folder, self._settings, self._name)


def _write_settings(folder: Path, settings: dict[str, Any], end: str) -> None:
    defaults = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False,
                "split_special_tokens": True, "eos_token": end, "model_max_length": 1_000_000_000}  # fmt: skip
    text = json.dumps({**defaults, **settings, "eos_token": settings.get("eos_token") or end}, indent=1)
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def _first(texts: Iterable[bytes], limit: int) -> Iterator[str]:
    for text in texts:
        yield text.decode()
        limit -= len(text)
        if limit <= 0:
            return


def _byte_characters() -> list[str]:
    """The printable character for each byte, as in GPT-2 and the `tokenizers` library."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _on_hub(spec: str) -> bool:
    """Whether it names a model on the hub, not a local folder."""
    return spec.startswith("hf:") and not Path(spec[3:]).expanduser().is_dir()


def _file(spec: str) -> Path:
    if _on_hub(spec):
        return _downloaded(spec)
    path = Path(spec.removeprefix("hf:")).expanduser()
    if path.is_dir() and not (path / "tokenizer.json").is_file():
        raise ConfigError(f"the folder {path} has no tokenizer.json: pass a tokenizer with --tokenizer: {_FORMS}")
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        raise ConfigError(f"tokenizer={spec!r}: no such file; use {_FORMS}")
    return path


def _downloaded(spec: str) -> Path:
    """Download tokenizer.json of a model on the hub, and tokenizer_config.json if the model has one."""
    try:
        from huggingface_hub import hf_hub_download
    except ImportError as error:
        raise ConfigError(f"tokenizer={spec!r} needs huggingface_hub: {install_command('hf')}") from error
    try:
        with contextlib.suppress(OSError):
            hf_hub_download(spec[3:], "tokenizer_config.json")
        return Path(hf_hub_download(spec[3:], "tokenizer.json"))
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"no tokenizer of {spec}: {reason}; check the name and the network, or set --tokenizer: {_FORMS}"
        ) from error


def _library(needed_by: str) -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise ConfigError(f"{needed_by} needs the tokenizers library: {install_command('bpe')}") from error
    return tokenizers
