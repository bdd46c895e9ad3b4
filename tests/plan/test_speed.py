"""How long this machine takes for a round: measured once, then cached for this version and processor."""

import json
from dataclasses import asdict

import pytest

from diloco.autopilot import speed
from diloco.autopilot.speed import Speed
from diloco.codecs.formats import FORMATS, GATHER

SOME = Speed(dict.fromkeys(FORMATS, 1.0), dict.fromkeys(FORMATS, 0.5), 2.0, 3.0)
FEWER = Speed({"e3m0": 1.0}, {"e3m0": 1.0}, 2.0, 3.0)
MORE = Speed(dict.fromkeys([*FORMATS, "cut"], 1.0), dict.fromkeys([*FORMATS, "cut"], 1.0), 2.0, 3.0)


def test_it_is_measured_for_every_codec_and_cached(tmp_path):
    measured = speed.measured(tmp_path)
    assert set(measured.encode) == set(measured.decode) == set(FORMATS)
    assert all(ns > 0 for ns in (*measured.encode.values(), *measured.decode.values(), measured.hook))
    assert measured.outer >= 0  # done while decoding: it may cost nothing more
    assert speed.measured(tmp_path) == measured != speed.measured(tmp_path, again=True)


ENTRIES = {"no figures": {"hook": 1.0}, "fewer codecs": asdict(FEWER), "more codecs": asdict(MORE)}
CACHES = {"empty": "", "a list": "[]", "another version": '{"another version": {}}'}
CACHES |= {name: json.dumps({speed._key(): entry}) for name, entry in ENTRIES.items()}


@pytest.mark.parametrize("text", CACHES.values(), ids=CACHES.keys())
def test_an_unusable_cache_is_measured_again(text, tmp_path, monkeypatch):
    monkeypatch.setattr(speed, "_measure", lambda: SOME)
    (tmp_path / "speed.json").write_text(text)
    assert speed.measured(tmp_path) == SOME
    assert json.loads((tmp_path / "speed.json").read_text())[speed._key()] == asdict(SOME)


def test_a_cache_that_cannot_be_written_does_not_matter(tmp_path, monkeypatch):
    monkeypatch.setattr(speed, "_measure", lambda: SOME)
    (tmp_path / "file").touch()
    assert speed.measured(tmp_path / "file") == SOME


def test_reference_kernels_have_their_own_entry(monkeypatch):
    monkeypatch.delenv("DILOCO_KERNELS", raising=False)
    usual = speed._key()
    monkeypatch.setenv("DILOCO_KERNELS", "reference")
    assert speed._key() != usual


def test_a_round_encodes_once_and_decodes_what_it_receives():
    assert SOME.codec_ns("e3m0", 2) == 1 + 2 * 0.5 + 2
    assert SOME.codec_ns("e3m0", GATHER) == 1 + GATHER * 0.5 + 2
    # Above that: its own delta and its share of the mean; a share of each delta, and all shares of the mean.
    assert SOME.codec_ns("e3m0", 4) == 1 + 1 / 4 + 4 / 4 * 0.5 + 0.5 + 2
    # The mean of twobit is sent in e3m0.
    mixed = Speed({"e3m0": 1.0, "twobit": 8.0}, {"e3m0": 0.5, "twobit": 3.0}, 2.0, 3.0)
    assert mixed.codec_ns("twobit", 4) == 8 + 1 / 4 + 3 + 0.5 + 2
