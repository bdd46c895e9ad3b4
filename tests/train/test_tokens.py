"""Text to ids and back."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.errors import ConfigError
from diloco.runs.config import TrainConfig
from diloco.train.data import documents
from diloco.train.data.tokenizer import (
    BPE,
    Bytes,
    check_tokenizer,
    default_tokenizer,
    dtype_of,
    load_tokenizer,
    tokenizer_identity,
)
from diloco.train.settings import describe, notes, resolve

LINES = [f"line {i}: {'abcdefghij'[i % 10] * (i % 37)} end" for i in range(2000)]


@given(st.binary(max_size=300))
def test_bytes_come_back(data):
    ids = Bytes().encode(data)
    assert ids.dtype == np.uint16 and ids.tolist() == list(data)
    assert Bytes().nbytes(ids) == len(data)
    assert Bytes().decode([*ids, 256]) == data.decode(errors="replace")


@pytest.fixture(scope="module")
def bpe():
    pytest.importorskip("tokenizers")
    return BPE.train([line.encode() for line in LINES], 300)


@settings(deadline=None)
@given(text=st.text(max_size=60))
def test_a_bpe_gives_text_back(bpe, text):
    ids = bpe.encode(text.encode())
    assert bpe.decode([*ids, bpe.end]) == text
    assert bpe.nbytes(ids) == len(text.encode())
    assert bpe.end not in ids


def test_a_trained_bpe_has_the_size_asked_for_and_shortens_text(bpe):
    text = "\n".join(LINES).encode()
    assert bpe.vocabulary == 300 and bpe.end == 299
    assert len(bpe.encode(text)) < 0.6 * len(text)
    assert dtype_of(65536) == np.uint16 and dtype_of(65537) == np.uint32


def test_a_tokenizer_is_read_from_its_file_or_its_folder(tmp_path, bpe):
    bpe.save(tmp_path)
    for spec in (tmp_path, tmp_path / "tokenizer.json"):
        assert load_tokenizer(str(spec)).encode(b"line 7").tolist() == bpe.encode(b"line 7").tolist()


def test_an_end_is_added_to_a_tokenizer_that_has_none(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    plain.save(str(tmp_path / "tokenizer.json"))
    assert (load_tokenizer(str(tmp_path)).vocabulary, load_tokenizer(str(tmp_path)).end) == (3, 2)


def test_a_bad_tokenizer_is_refused(tmp_path):
    pytest.importorskip("tokenizers")
    for spec in ("train:256", "train:", "train:many", "nowhere/tokenizer.json", "gpt2"):
        with pytest.raises(ConfigError, match=r"use .*train:SIZE"):
            check_tokenizer(spec)
    with pytest.raises(ConfigError, match=r"the folder .* has no tokenizer\.json"):
        check_tokenizer(default_tokenizer(f"hf:{tmp_path}"))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"is not a valid tokenizer\.json"):
        load_tokenizer(str(tmp_path))


def test_a_pretrained_model_takes_its_own_tokenizer_and_fine_tuning_values(tmp_path):
    pytest.importorskip("tokenizers")
    trained = BPE.train([b"a small text about small things, again and again"] * 9, 280)
    trained.save(tmp_path)
    spec = default_tokenizer(f"hf:{tmp_path}")
    assert spec == f"hf:{tmp_path}" and default_tokenizer("35m") == "bytes"
    check_tokenizer(spec)
    assert load_tokenizer(spec).vocabulary == trained.vocabulary != 257
    assert tokenizer_identity(spec) == tokenizer_identity(str(tmp_path))
    defaults = TrainConfig(model=spec, tokenizer=spec, context=100)
    config, values = resolve(defaults, 600_000_000, 2, corpus_tokens=3_200_000)
    assert (config.lr, config.batch, config.steps) == (2e-5, 32, 1000)
    reasons = {value.name: value.reason for value in values}
    assert reasons["tokenizer"].startswith("the model's own") and "one pass" in reasons["tokens"]
    text = describe(values, 600_000_000, config, "corpus", 0)
    assert f"tokenizer = {spec}: the model's own" in text and "lr = 2e-05: usual for a pretrained model" in text
    explicit = replace(defaults, tokenizer="bytes", lr=0.1, steps=7)
    assert resolve(explicit, 600_000_000, 2, 3_200_000)[0].lr == 0.1
    assert any("will be lost" in text for text in notes(explicit, 1))


def test_a_field_of_another_name_holds_the_text(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"content": "one"}\n{"content": "two"}\n')
    sources = documents.find([str(file)], "content")
    assert list(documents.texts(sources)) == [b"one", b"two"]
    assert sources.identity() != documents.find([str(file)]).identity()
    with pytest.raises(ConfigError, match=r'line 1: not of the form {"text": .*--text-key'):
        list(documents.texts(documents.find([str(file)])))
