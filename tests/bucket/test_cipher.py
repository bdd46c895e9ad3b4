"""Encryption: the store holds names and sizes, and what is not sealed with the key of the run is not used."""

import os

import pytest

from diloco.bucket import find_run
from diloco.bucket.store import UNDECIPHERED, List, Read, Size, Write
from diloco.bucket.store.backend import open_store
from diloco.bucket.store.envelope import CHUNK, ENCRYPTED, SEALED, Cipher, Encrypted, sealed_size, span
from diloco.errors import ConfigError
from tests.support.members import Member, agree, until

SECRET = b"s" * 32


def test_a_range_is_opened_without_the_rest():
    cipher, data = Cipher(SECRET), os.urandom(3 * CHUNK + 77)
    sealed = cipher.seal("x", data)
    assert len(sealed) == sealed_size(len(data))
    for start, stop in ((0, 10), (CHUNK - 1, CHUNK + 1), (2 * CHUNK, 3 * CHUNK + 77), (3 * CHUNK + 5, 3 * CHUNK + 6)):
        low, high, first = span(start, stop)
        opened = cipher.open("x", sealed[low:high], first)
        assert opened is not None and opened[start - first * CHUNK : stop - first * CHUNK] == data[start:stop]


def test_what_was_changed_moved_or_sealed_with_another_key_is_not_opened():
    cipher, data = Cipher(SECRET), bytes(2 * CHUNK)
    sealed = cipher.seal("x", data)[len(ENCRYPTED) :]
    assert cipher.open("x", sealed) == data
    assert cipher.open("y", sealed) is None and Cipher(b"t" * 32).open("x", sealed) is None
    assert cipher.open("x", sealed[SEALED:] + sealed[:SEALED]) is None  # chunks in another order
    for at in (0, 20, SEALED + 5, len(sealed) - 1):
        assert cipher.open("x", sealed[:at] + bytes([sealed[at] ^ 1]) + sealed[at + 1 :]) is None
    assert cipher.open("x", b"") is None and cipher.open("x", sealed[:-1]) is None
    assert cipher.seal("x", data) != cipher.seal("x", data)


def test_an_encrypted_store_reads_ranges_and_sizes_across_chunks_and_rejects_clear_text(tmp_path):
    inner = open_store(str(tmp_path))
    attempt = Encrypted(inner, SECRET).attempt
    large = os.urandom(3 * CHUNK)
    attempt(Write("a/b", large))
    assert attempt(Read("a/b", len(large))) == large and attempt(Read("a/b", 0, first=CHUNK + 1)) == large[: CHUNK + 1]
    assert attempt(Size("a/b")) == len(large) and attempt(List("a/")) == {"a/b": len(large)}
    inner.attempt(Write("a/b", b"in clear"))
    assert attempt(Read("a/b", 100)) == UNDECIPHERED


@pytest.mark.slow
def test_members_of_an_encrypted_run_train_together_and_nothing_is_in_clear(tmp_path):
    a, b = (Member(tmp_path, name, encrypt=SECRET) for name in "ab")
    until(lambda: min(*a.held, *b.held) > 2, a, b)
    clear = Member(tmp_path / "clear", "a")
    until(lambda: min(clear.held) > 0, clear)
    for member in (a, b, clear):
        member.stop().end()
    agree(a, b)
    assert a.reduce.session.rejected == b.reduce.session.rejected == 0
    bodies = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and "clear" not in path.parts]
    assert bodies and all(body.startswith(ENCRYPTED) for body in bodies)
    words = (b"DLCO", b"protocol", b"fingerprint", a.reduce.run.id.encode())
    assert not [word for word in words for body in bodies if word in body]
    clear_body = (tmp_path / "clear/run.json").read_bytes()
    assert b"protocol" in clear_body  # as the others would be
    with pytest.raises(ConfigError, match="it is encrypted: pass the key"):
        find_run(str(tmp_path))
    with pytest.raises(ConfigError, match="it is not encrypted with the key of this run"):
        find_run(str(tmp_path), encrypt=b"t" * 32)
    with pytest.raises(ConfigError, match="it is not encrypted with the key of this run"):
        find_run(str(tmp_path / "clear"), encrypt=SECRET)
