"""What a round costs this machine: measured once, remembered for this version and processor."""

import json

import pytest

from diloco import speed
from diloco.formats import FORMATS, GATHER
from diloco.speed import Speed

SOME = Speed({"e3m0": 1.0}, {"e3m0": 0.5}, 2.0, 3.0)


def test_it_is_measured_for_every_codec_and_remembered(tmp_path):
    measured = speed.known(tmp_path)
    assert set(measured.encode) == set(measured.decode) == set(FORMATS)
    assert all(ns > 0 for ns in (*measured.encode.values(), *measured.decode.values(), measured.hook))
    assert measured.outer >= 0  # done while decoding: it may cost nothing more
    assert speed.known(tmp_path) == measured  # two measurements are never equal


@pytest.mark.parametrize("text", ["", "[]", '{"another version": {}}', "key without figures"])
def test_what_cannot_be_used_is_measured_again(text, tmp_path, monkeypatch):
    monkeypatch.setattr(speed, "_measure", lambda: SOME)
    text = json.dumps({speed._key(): {"hook": 1.0}}) if text == "key without figures" else text
    (tmp_path / "speed.json").write_text(text)
    assert speed.known(tmp_path) == SOME
    assert json.loads((tmp_path / "speed.json").read_text())[speed._key()]["hook"] == 3.0


def test_a_cache_that_cannot_be_written_does_not_matter(tmp_path, monkeypatch):
    monkeypatch.setattr(speed, "_measure", lambda: SOME)
    (tmp_path / "file").touch()
    assert speed.known(tmp_path / "file") == SOME


def test_other_code_has_other_figures(monkeypatch):
    monkeypatch.delenv("DILOCO_KERNELS", raising=False)
    usual = speed._key()
    monkeypatch.setenv("DILOCO_KERNELS", "reference")
    assert speed._key() != usual


def test_a_round_encodes_once_and_decodes_what_it_receives():
    assert SOME.codec_ns("e3m0", 2) == 1 + 2 * 0.5 + 2
    assert SOME.codec_ns("e3m0", GATHER) == 1 + GATHER * 0.5 + 2
    # Above that: its own delta and its share of the mean; a share of each delta, and all shares of the mean.
    assert SOME.codec_ns("e3m0", 4) == 1 + 1 / 4 + 4 / 4 * 0.5 + 0.5 + 2


def test_the_mean_has_its_own_codec_and_sparse_deltas_are_all_decoded():
    both = Speed({"e3m0": 1.0, "twobit": 8.0, "topk": 6.0}, {"e3m0": 0.5, "twobit": 3.0, "topk": 0.25}, 2.0, 3.0)
    assert both.codec_ns("twobit", 4) == 8 + 1 / 4 + 3 + 0.5 + 2
    assert both.codec_ns("topk", 8) == 6 + 8 * 0.25 + 2


MORE = Speed(dict.fromkeys([*FORMATS, "cut"], 1.0), dict.fromkeys([*FORMATS, "cut"], 1.0), 2.0, 3.0)


@pytest.mark.parametrize("remembered", [SOME, MORE], ids=["fewer", "more"])
def test_figures_of_other_codecs_are_measured_again(remembered, tmp_path, monkeypatch):
    whole = Speed(dict.fromkeys(FORMATS, 1.0), dict.fromkeys(FORMATS, 1.0), 2.0, 3.0)
    monkeypatch.setattr(speed, "_measure", lambda: remembered)
    speed.remeasured(tmp_path)
    monkeypatch.setattr(speed, "_measure", lambda: whole)
    assert speed.known(tmp_path) == whole
