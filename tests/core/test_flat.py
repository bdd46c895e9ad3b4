"""A fragment's values in this process, where they meet the model's own tensors."""

import pytest
import torch

from diloco.flat import FlatView, checksum, pinned
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


def test_a_parameter_without_dimensions_is_one_row():
    scalar, values = torch.tensor(3.0), torch.empty(1)
    view = FlatView((Piece("x", 0, 1),), {"x": scalar})
    view.read(values)
    view.write(values + 1)
    assert view.size == 1 and values.tolist() == [3.0] and scalar.item() == 4.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8])
def test_a_checksum_changes_with_the_only_value_and_not_with_the_memory_it_lies_in(dtype):
    one, other = torch.tensor(1, dtype=dtype), torch.tensor(2, dtype=dtype)
    assert checksum(one) != checksum(other) and checksum(torch.empty(0, dtype=dtype)) == 0
    table = torch.arange(6, dtype=dtype).reshape(2, 3)
    assert checksum(table.T) == checksum(table.T.contiguous())
