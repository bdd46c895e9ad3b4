"""Text to ids and back."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.errors import ConfigError
from diloco.train.data.tokenizer import BPE, Bytes, dtype_of, load_tokenizer

LINES = [f"line {i}: {'abcdefghij'[i % 10] * (i % 37)} end" for i in range(2000)]


@given(st.binary(max_size=300))
def test_bytes_come_back(data):
    ids = Bytes().encode(data)
    assert ids.dtype == np.uint16 and ids.tolist() == list(data)
    assert Bytes().nbytes(ids) == len(data)
    assert Bytes().decode(ids) == data.decode(errors="replace")


@given(st.text(max_size=100))
def test_text_comes_back(text):
    assert Bytes().decode([*Bytes().encode(text.encode()), 256]) == text


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


def test_large_vocabularies_have_wide_ids():
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


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path):
    pytest.importorskip("tokenizers")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"is not a valid tokenizer\.json"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("spec", ["train:256", "train:", "train:many", "nowhere/tokenizer.json"])
def test_a_bad_tokenizer_is_refused(spec):
    with pytest.raises(ConfigError, match=r"give .*train:SIZE"):
        load_tokenizer(spec)
