"""How long this machine takes for a round."""

from diloco.autopilot.speed import Speed
from diloco.codecs.formats import FORMATS, GATHER

SOME = Speed(dict.fromkeys(FORMATS, 1.0), dict.fromkeys(FORMATS, 0.5), 2.0, 3.0)


def test_a_round_encodes_once_and_decodes_what_it_receives():
    assert SOME.codec_ns("e3m0", 2) == 1 + 2 * 0.5 + 2
    assert SOME.codec_ns("e3m0", GATHER) == 1 + GATHER * 0.5 + 2
    # Above that: its own delta and its share of the mean; a share of each delta, and all shares of the mean.
    assert SOME.codec_ns("e3m0", 4) == 1 + 1 / 4 + 4 / 4 * 0.5 + 0.5 + 2
    # The mean of twobit is sent in e3m0.
    mixed = Speed({"e3m0": 1.0, "twobit": 8.0}, {"e3m0": 0.5, "twobit": 3.0}, 2.0, 3.0)
    assert mixed.codec_ns("twobit", 4) == 8 + 1 / 4 + 3 + 0.5 + 2
