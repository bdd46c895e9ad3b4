"""The part that all frameworks share. test_transformers.py and `make test-frameworks` run it in the real ones."""

import pytest

from diloco import Collective, ConfigError
from diloco.integrations.attached import Attached
from tests.support.fake_reducer import Script
from tests.support.models import Tiny, adamw


def test_an_error_leaves_the_others_at_once():
    script, model = Script(), Tiny()
    attached = Attached(reducer=lambda: script)
    attached.begin(model, adamw(model), None)
    attached.fail()
    assert script.left == 1


def test_a_reducer_without_numbers_says_so():
    attached = Attached(reducer=lambda: Collective())
    assert attached.folder == ""
    with pytest.raises(ConfigError, match="function does not number its replicas"):
        attached.replica  # noqa: B018
