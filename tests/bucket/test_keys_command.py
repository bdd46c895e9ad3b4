"""`diloco keys`, over a real folder, with members on real threads."""

import re

import pytest

from diloco.bucket import KeyPair
from diloco.bucket.members import StruckOff
from diloco.bucket.store.keys import read_key, shown
from diloco.errors import ConfigError
from tests.support.commands import run_here
from tests.support.members import Member, agree, until


def keys(place, *words):
    code, out, err = run_here(place, "keys", *words)
    return code, out.strip(), err.strip()


@pytest.mark.slow
def test_a_key_is_made_listed_and_struck_off_while_the_run_goes_on(tmp_path):
    public = {}
    for name in ("founder", "lab"):
        code, public[name], _ = keys(tmp_path, "new", f"{name}.key")
        assert code == 0 and re.fullmatch("ed25519:[0-9a-f]{64}", public[name])
    secret = b"e" * 32
    (tmp_path / "run.secret").write_bytes(secret)
    pair = {name: read_key(tmp_path / f"{name}.key", public["founder"]) for name in public}
    a = Member(tmp_path / "bucket", "founder", key=pair["founder"], encrypt=secret)
    until(lambda: min(a.held) > 1, a)
    with pytest.raises(ConfigError, match="the run does not list 'lab'"):
        Member(tmp_path / "bucket", "lab", key=pair["lab"], encrypt=secret).end()
    own = ["--key-file", "founder.key", "--encrypt", "run.secret"]
    code, out, err = keys(tmp_path, "add", "bucket", "lab", public["lab"], *own)
    assert code == 0 and re.search("bucket: lists lab, from round [0-9]+ on", out), err
    code, out, _ = keys(tmp_path, "list", "bucket", "--encrypt", "run.secret")
    assert code == 0 and out.splitlines() == [
        f"founder {public['founder']}, version 1", f"founder {public['founder']}", f"lab {public['lab']}"
    ]  # fmt: skip
    b = Member(tmp_path / "bucket", "lab", key=pair["lab"], encrypt=secret)
    until(lambda: any(round.members == 2 for round in a.rounds), a, b)
    code, out, err = keys(tmp_path, "strike", "bucket", "lab", *own)
    assert code == 0 and "has struck off lab" in out, err
    until(lambda: b.error is not None)
    assert isinstance(b.error, StruckOff)
    held = max(a.held)
    until(lambda: min(a.held) > held + 4, a)
    a.stop().end()
    agree(a, b)
    assert a.rounds[-1].members == 1
    code, out, _ = run_here(tmp_path, "watch", "bucket", "--once", "--encrypt", "run.secret")
    assert code == 0 and "founder" in out and "cannot be used" in out  # the entry of the one that was struck off


@pytest.mark.slow
def test_wrong_words_are_answered_with_what_is_wanted(tmp_path):
    assert "3 are wanted" in keys(tmp_path, "add", "bucket", "lab")[2]
    (tmp_path / "bucket").mkdir()
    assert "there is no folder" in keys(tmp_path, "list", "bucket")[2]
    unsigned = Member(tmp_path / "plain", "a", 3).end()
    assert "have no keys of their own" in keys(tmp_path, "list", "plain")[2]
    with pytest.raises(ConfigError, match="the run is not signed"):
        Member(tmp_path / "plain", "b", key=KeyPair(bytes(32))).end()
    assert unsigned.held
    public = shown(KeyPair(bytes(32)).public)
    code, _, err = keys(tmp_path, "add", "plain", "A b", public)
    assert code == 2 and "member name" in err
    code, _, err = keys(tmp_path, "add", "plain", "b", "ssh-rsa x")
    assert code == 2 and "is not a public key" in err
