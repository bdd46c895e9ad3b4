"""A fragment's values in this process, where they meet the model's own tensors."""

import sys

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from diloco.core.fragment import Piece
from diloco.core.outer import CHUNK
from diloco.core.tensors import checksum, first_row, forget_not_finite, shard_id
from diloco.core.view import SMALL, FlatView
from diloco.exchange.reducer import Shard as ModelShard


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5,), (CHUNK + 7,), (3, CHUNK // 2 + 1), (2, CHUNK + 3), (0, 4)])
def test_keep_local_weighs_every_value_with_separate_roundings(shape, dtype):
    """In pieces that fit the cache, with the bits of one pass over everything."""
    torch.manual_seed(0)
    tensor, anchor = torch.randn(shape, dtype=dtype), torch.randn(shape)
    expected = (0.3 * tensor.float() + 0.7 * anchor).to(dtype)
    FlatView((Piece("x", 0, shape[0]),), {"x": tensor}).merge(anchor.flatten(), 0.3)
    assert torch.equal(tensor, expected)


def test_small_and_large_tensors_of_any_kind_are_read_subtracted_and_written_alike():
    torch.manual_seed(0)
    tensors = {
        "small": torch.nn.Parameter(torch.randn(3, 5)), "scalar": torch.tensor(2.0), "bf16": torch.randn(7).bfloat16(),
        "large": torch.nn.Parameter(torch.randn(SMALL + 1)), "turned": torch.randn(4, 6).T, "empty": torch.empty(0, 3),
        "part": torch.randn(9, 2), "last": torch.randn(2),
    }  # fmt: skip
    pieces = [Piece(name, 0, len(t) if t.dim() else 1) for name, t in tensors.items()]
    pieces[6] = Piece("part", 2, 5)
    view = FlatView(tuple(pieces), tensors)
    expected = {n: (t[2:5] if n == "part" else t).detach().float().flatten() for n, t in tensors.items()}
    local, values = torch.cat(list(expected.values())), torch.empty(view.size)
    view.read(values)
    assert torch.equal(values, local) and not values.requires_grad
    anchor = torch.randn(view.size)
    view.subtract(anchor, values)
    assert torch.equal(values, anchor - local)
    before = [t._version for t in tensors.values() if t.numel()]
    view.write(anchor)
    assert all(t._version > v for t, v in zip((t for t in tensors.values() if t.numel()), before, strict=True))
    view.read(values)
    bf16 = slice(16, 23)
    assert torch.equal(values[bf16], anchor[bf16].bfloat16().float())
    values[bf16] = anchor[bf16]
    assert torch.equal(values, anchor) and tensors["part"][1].tolist() != anchor[-4:-2].tolist()


def test_thousands_of_small_tensors_cost_no_python_call_each():
    tensors = {str(i): torch.nn.Parameter(torch.zeros(2)) for i in range(1000)}
    view = FlatView(tuple(Piece(name, 0, 2) for name in tensors), tensors)
    values, calls = torch.zeros(view.size), 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event in ("call", "c_call")

    for act in (lambda: view.subtract(values, values.clone()), lambda: view.write(values), lambda: view.read(values)):
        calls = 0
        sys.setprofile(count)
        try:
            act()
        finally:
            sys.setprofile(None)
        assert calls < 1.5 * len(tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.complex128])
def test_a_checksum_changes_with_the_only_value_and_not_with_the_memory_it_lies_in(dtype):
    one, other = torch.tensor(1, dtype=dtype), torch.tensor(2, dtype=dtype)
    assert checksum(one) != checksum(other) and checksum(torch.empty(0, dtype=dtype)) == 0
    table = torch.arange(6).to(dtype).reshape(2, 3)
    assert checksum(table.T) == checksum(table.T.contiguous())


class Quantized(torch.Tensor):
    """Bytes and a scale that pass for floats, as torchao does it. No operation works on it."""

    @staticmethod
    def __new__(cls, data, scale):
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.float32)

    def __init__(self, data, scale):
        self.data_, self.scale = data, scale

    def __tensor_flatten__(self):
        return ["data_", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inside, *_):
        return Quantized(**inside)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].data_, args[0].scale)
        raise NotImplementedError(func)


def test_the_checksum_of_a_wrapped_tensor_is_of_the_tensors_inside():
    data, scale = torch.arange(7, dtype=torch.int8), torch.tensor([0.5])
    same, other = Quantized(data.clone(), scale.clone()), Quantized(data, scale * 2)
    assert checksum(Quantized(data, scale)) == checksum(same) != checksum(other)
    assert checksum(Quantized(data + 1, scale)) != checksum(same)


def test_an_optimizer_forgets_the_state_of_each_parameter_that_is_not_finite_and_of_no_other():
    good, bad = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.AdamW([good, bad])
    for parameter, moment in ((good, 1.0), (bad, float("nan"))):
        optimizer.state[parameter] = {"exp_avg": torch.tensor([1.0, moment]), "steps": torch.tensor(3), "other": None}
    forget_not_finite(optimizer)
    assert optimizer.state[good]["steps"] == 3 and len(optimizer.state[good]) == 3
    assert optimizer.state[bad] == {}


@pytest.fixture
def ranks():
    """A mesh of two rows of three ranks, of which this process is the fifth; no other process is there."""
    dist.init_process_group("fake", rank=4, world_size=6, store=FakeStore())
    yield init_device_mesh("cpu", (2, 3), mesh_dim_names=("tensor", "shard"))
    dist.destroy_process_group()


def test_a_process_knows_its_shard_by_the_widest_mesh_and_where_its_rows_begin(ranks):
    rows = DTensor.from_local(torch.zeros(2, 5), ranks["shard"], [Shard(0)], run_check=False)
    columns = DTensor.from_local(torch.zeros(2, 5), ranks["shard"], [Shard(1)], run_check=False)
    both = DTensor.from_local(torch.zeros(2, 5), ranks, [Shard(0), Shard(0)], run_check=False)
    scalar = DTensor.from_local(torch.tensor(1.0), ranks["shard"], [Replicate()], run_check=False)
    assert shard_id([torch.zeros(1), rows]) == ModelShard(1, 3)
    assert shard_id([rows, both, scalar]) == ModelShard(4, 6)
    assert shard_id([torch.zeros(1)]) == ModelShard()
    assert [first_row(each) for each in (rows, columns, both, scalar, torch.zeros(9))] == [2, 0, 8, 0, 0]
    view = FlatView((Piece("rows", 1, 6), Piece("scalar", 0, 1)), {"rows": rows, "scalar": scalar})
    assert [(span.start, span.stop, span.position) for span in view.spans] == [(0, 2, 0), (0, 1, 10)]
    assert FlatView((Piece("rows", 0, 2),), {"rows": rows}).size == 0  # those of the rank before


def test_a_mesh_of_one_rank_holds_the_model_unsharded():
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    try:
        alone = DTensor.from_local(torch.zeros(2), init_device_mesh("cpu", (1,)), [Shard(0)], run_check=False)
        assert shard_id([alone]) == ModelShard()
    finally:
        dist.destroy_process_group()
