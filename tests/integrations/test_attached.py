"""What the callbacks share. test_transformers.py and `make test-frameworks` run them in the real frameworks."""

import pytest

from diloco import Collective, ConfigError, DiLoCo, run_replicas
from diloco.integrations.attached import Attached
from tests.support.models import Tiny, adamw


def test_a_state_of_another_replica_is_named_when_it_is_loaded():
    def loop(reduce):
        saved = DiLoCo(Tiny(), reduce=reduce).state_dict()
        if reduce.replica == 1:
            saved["shard 0 of 1"]["replica"] = 0
            with pytest.warns(UserWarning, match="replica 1 loads a state that replica 0 saved"):
                DiLoCo(Tiny(), reduce=reduce).load_state_dict(saved)
        saved["shard 0 of 1"]["replica"] = "member"  # of a bucket: that says nothing of a replica's number
        DiLoCo(Tiny(), reduce=reduce).load_state_dict(saved)

    run_replicas(2, loop)


def test_an_error_leaves_the_others_at_once():
    def loop(reduce):
        model = Tiny()
        attached = Attached(lambda: reduce, {})
        attached.begin(model, adamw(model), None)
        attached.fail()
        with pytest.warns(RuntimeWarning, match="steps after DiLoCo has left"):
            attached.diloco._optimizers[0].step()

    run_replicas(1, loop)


def test_a_reducer_without_numbers_says_so():
    attached = Attached(lambda: Collective(), {})
    assert attached.folder == ""
    with pytest.raises(ConfigError, match="function has no replica number"):
        attached.replica  # noqa: B018
