"""A fragment's values in this process, where they meet the model's own tensors."""

import pytest
import torch

from diloco.flat import FlatView, pinned
from diloco.fragment import Piece
from diloco.outer import CHUNK


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5,), (CHUNK + 7,), (3, CHUNK // 2 + 1), (2, CHUNK + 3), (0, 4)])
def test_keep_local_weighs_every_value_with_separate_roundings(shape, dtype):
    """In pieces that fit the cache, with the bits of one pass over everything."""
    torch.manual_seed(0)
    tensor, anchor = torch.randn(shape, dtype=dtype), torch.randn(shape)
    expected = (0.3 * tensor.float() + 0.7 * anchor).to(dtype)
    FlatView((Piece("x", 0, shape[0]),), {"x": tensor}).merge(anchor.flatten(), 0.3)
    assert torch.equal(tensor, expected)


def test_memory_is_pinned_for_accelerators_that_copy_from_it_and_never_for_a_model_on_the_cpu():
    assert not pinned({"cpu"})
    assert pinned({"cpu", "cuda"}) and pinned({"xpu"})
    assert not FlatView((Piece("x", 0, 2),), {"x": torch.zeros(2)}).pinned
