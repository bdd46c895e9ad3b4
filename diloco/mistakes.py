"""Mistakes around a training loop that would pass in silence, or fail far from where they were made."""

import atexit
import gc
import sys
import warnings
from collections.abc import Collection, Iterator, Sequence
from operator import index
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from diloco.codec import Codec, is_sparse
from diloco.errors import ConfigError, DiLoCoError, Mismatch
from diloco.flat import WHOLE, ShardId, checksum_all
from diloco.fragment import Fragment, Sequential, Strided
from diloco.module import Parts, trainable

_attached: "WeakKeyDictionary[Any, ref[Any]]" = WeakKeyDictionary()
"""By model and by reducer: the DiLoCo that has them."""
_apart: WeakSet[Any] = WeakSet()
"""Those that train with others and have not left them."""


def check_arguments(
    model: object, sync_every: Any, overlap: Any, fragments: object, codec: object, outer: object, reduce: object
) -> None:
    parts = model if isinstance(model, (list, tuple)) else [model]
    for part in parts:
        if not isinstance(part, nn.Module):
            raise ConfigError(f"model is a {type(part).__name__}: give the module itself, as in DiLoCo(model, "
                              "optimizer), or a list of the modules that make up the model")  # fmt: skip
    if not parts:
        raise ConfigError("model is an empty list: give the modules that make up the model")
    for name, value, least in (("sync_every", sync_every, 1), ("overlap", overlap, 0)):
        if (not _is_whole(value) or value < least) and (name, value) != ("overlap", "auto"):
            auto = ', or "auto"' if name == "overlap" else ""
            raise ConfigError(f"{name}={value!r}: give a whole number of steps, at least {least}{auto}")
    if isinstance(overlap, str) and max(getattr(reduce, "ddp_size", 1), len(getattr(reduce, "ddp_ranks", ()))) > 1:
        raise ConfigError('overlap="auto" with DDP inside a replica: its ranks would take rounds at different steps, '
                          "and DDP needs equal weights: give a number of steps")  # fmt: skip
    if isinstance(outer, torch.optim.Optimizer):
        raise ConfigError(f"outer is torch.optim.{type(outer).__name__}, which steps on gradients: give "
                          "diloco.Nesterov(lr=0.4) or diloco.SGD(lr=1.0), which step on the mean delta")  # fmt: skip
    for name, value, method, examples in (
        ("fragments", fragments, "split", "Strided(layers=3) or Balanced(8)"),
        ("codec", codec, "encode", "E3M0() or BFloat16()"),
        ("outer", outer, "step", "Nesterov(lr=0.4)"),
    ):
        if not hasattr(value, method) or isinstance(value, (str, type)):
            raise ConfigError(f"{name}={value!r}: give an object, as in {examples}")
    if reduce is not None and not hasattr(reduce, "take"):
        raise ConfigError(f"reduce is a {type(reduce).__name__}: give a reducer, as in Collective(group) for a "
                          "process group, or Bucket(url, name)")  # fmt: skip


def _is_whole(value: Any) -> bool:
    try:
        return index(value) == value and not isinstance(value, bool)
    except TypeError:
        return False


def check_trained(model: nn.Module, known: Sequence[Tensor], optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raise unless what is trained now is what is synced (`known`) and what the optimizers hold."""
    parameters = list(model.parameters())
    trained, synced = {id(p) for p in parameters if p.requires_grad}, set(map(id, known))
    if trained - synced:
        new = [name for name, p in trainable(model).items() if id(p) not in synced]
        raise ConfigError(f"{_listed(new)} trained, but not there when DiLoCo was made, so never synced: make DiLoCo "
                          "after the last change to the model, such as adapters and new layers, unfreezing, "
                          "conversion, load_state_dict(assign=True). In the middle of a run call finish() first, then "
                          "make a new optimizer and a new DiLoCo")  # fmt: skip
    held = {id(p): p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    missing = trained - held.keys() if optimizers else set()
    if missing and len(missing) == len(trained):
        raise ConfigError("the optimizer holds no parameter of this model: make it from model.parameters(), after the "
                          "last change to the model")  # fmt: skip
    if missing:
        names = [name for name, p in trainable(model).items() if id(p) in missing]
        raise ConfigError(f"{_listed(names)} trained (requires_grad), but in no optimizer that DiLoCo was given: "
                          "give it all of them as a list, or freeze with requires_grad_(False)")  # fmt: skip
    own = {id(p) for p in parameters} | synced  # what was tied or removed since is trained no more
    if strange := [tuple(p.shape) for key, p in held.items() if p.requires_grad and key not in own]:
        raise ConfigError(f"the optimizer trains a parameter of shape {strange[0]} that the model does not have, so it "
                          "is never synced: give DiLoCo a module that holds all of them, and make the optimizer from "
                          "its parameters, not from copies")  # fmt: skip


def check_whole(shard: ShardId) -> None:
    if shard != WHOLE:
        raise ConfigError(
            "the parameters are sharded, so only ranks that hold the same shard may talk: make a mesh with a dimension "
            'for the replicas, mesh = init_device_mesh(device, (replicas, shards), mesh_dim_names=("replica", '
            '"shard")), shard over mesh["shard"], and pass reduce=Collective(mesh.get_group("replica"), '
            'shards=mesh.get_group("shard"))'
        )


def check_ranks(parameters: Sequence[Tensor], reduce: object) -> None:
    """Refuse ranks that exchange gradients and are replicas to DiLoCo at the same time."""
    joined: Collection[int] = getattr(reduce, "ranks", ())
    for ranks in _ddp_ranks(parameters):
        served: Collection[int] | None = getattr(reduce, "ddp_ranks", None)
        if len(ranks) > 1 and served is not None and set(ranks) != set(served):
            raise ConfigError(
                f"DistributedDataParallel over the ranks {ranks} with a {type(reduce).__name__} that is told of "
                f"{list(served) or 'none'}: each rank would take rounds at its own time, and they would drift apart. "
                "Give it the group that DDP has: ddp_ranks=torch.distributed.group.WORLD if that is all ranks"
            )
        if len(common := sorted(set(ranks) & set(joined))) > 1:
            raise ConfigError(
                f"DistributedDataParallel averages gradients over the ranks {common} at every step, and DiLoCo joins "
                "the same ranks: that is all the traffic of DDP and more. Leave DDP out, each process is a replica; or "
                "give DDP the ranks of one replica (process_group=) and DiLoCo those that hold the same place in each "
                "replica, reduce=Collective(across, ddp_ranks=within)"
            )
    for ranks in {tuple(p.device_mesh.mesh.flatten().tolist()) for p in parameters if isinstance(p, DTensor)}:
        if len(common := sorted(set(ranks) & set(joined))) > 1:
            raise ConfigError(
                f"the model is sharded or copied over the ranks {sorted(ranks)}, and DiLoCo joins {common} of them as "
                "replicas: FSDP would exchange gradients between them at every step. Shard over the ranks of one "
                'replica, without the replica dimension: fully_shard(model, mesh=mesh["shard"])'
            )


def _ddp_ranks(parameters: Sequence[Tensor]) -> Iterator[list[int]]:
    """The ranks of each DDP that holds one of the parameters. Frameworks wrap a model and hand out the one inside, from
    which nothing leads to its wrapper. But every object refers to its class: so ask who refers to DDP (30 ms with
    300,000 objects; 180 ms to look at each of them)."""
    if not (dist.is_available() and dist.is_initialized()):
        return  # DDP needs a process group
    known = set(map(id, parameters))
    for each in gc.get_referrers(*_with_derived(DistributedDataParallel)):
        if issubclass(type(each), DistributedDataParallel) and any(id(p) in known for p in each.parameters()):
            yield dist.get_process_group_ranks(each.process_group)


def _with_derived(kind: type) -> list[type]:
    return [kind, *(each for derived in kind.__subclasses__() for each in _with_derived(derived))]


def _listed(names: Sequence[str]) -> str:
    return f"parameter {names[0]}" + (f" and {len(names) - 1} more are" if len(names) > 1 else " is")


def hint_one_fragment(fragments: object, pieces: Sequence[Fragment]) -> None:
    """Say that nothing is streamed, unless that was asked for."""
    if isinstance(fragments, (Strided, Sequential)) and len(pieces) == 1:
        warnings.warn(f"{fragments} makes one fragment of this model, so all of it is sent at once: "
                      "fragments=Balanced(4) streams it in four parts", stacklevel=3)  # fmt: skip


def hint_momentum(codec: Codec, outer: object) -> None:
    """Say that a sparse codec and outer momentum do the same twice."""
    if is_sparse(codec) and getattr(outer, "momentum", 0.0) != 0.0:
        warnings.warn(f"{codec} with {outer}: what a sparse codec sends late acts like momentum already, and outer "
                      "momentum on top of it was found to cost loss (SparseLoCo, arXiv 2508.15706): take plain SGD, "
                      "outer=SGD(lr=1.0), in the trainer --outer sgd", stacklevel=3)  # fmt: skip


def claim(model: nn.Module, reduce: object, diloco: object) -> None:
    """Only one DiLoCo may hold a model or a reducer at a time: two would count each step twice, and take each other's
    rounds."""
    for mine in (held := [*_parts(model), reduce]):
        if mine in _attached and _attached[mine]() not in (None, diloco):
            raise ConfigError("this reduce= serves another DiLoCo: make one for each" if mine is reduce else "this "
                              "model has a DiLoCo already: finish() that one first, or make a new model and a "
                              "new optimizer")  # fmt: skip
    for mine in held:
        _attached[mine] = ref(diloco)


def _parts(model: nn.Module) -> list[nn.Module]:
    """What the user gave: a list of modules is put into a new one each time."""
    return list(model.children()) if isinstance(model, Parts) else [model]


def check_state(saved: Collection[str], shard: str) -> None:
    if not saved:
        raise Mismatch("the saved state is empty: give what state_dict() returned, or load nothing at the start")
    if shard not in saved:
        raise Mismatch(f"the saved state is of {', '.join(saved)}, this process is {shard}")


def expect_end(diloco: object) -> None:
    """From now on, warn at the end of the process if `release` was not called."""
    _apart.add(diloco)


def release(model: nn.Module, reduce: object, diloco: object) -> None:
    """It has left the other replicas."""
    _apart.discard(diloco)
    for mine in (*_parts(model), reduce):
        if mine in _attached and _attached[mine]() is diloco:
            del _attached[mine]


def known_as(reduce: object) -> int | str | None:
    """The number of a replica, or the name of a member."""
    return getattr(reduce, "replica", getattr(reduce, "name", None))


def check_replica(saved: int | str | None, own: int | str | None) -> None:
    """Say so if a state is another replica's, as with one file or folder for all."""
    if saved != own and type(saved) is type(own):  # a member's name says nothing of a replica's number
        warnings.warn(f"replica {own} loads a state that replica {saved} saved: it loses its own work since the last "
                      "sync, and goes on with the moments of another. Save and load a file for each replica (with "
                      "torch.distributed.checkpoint: a folder, and no_dist=True)", stacklevel=3)  # fmt: skip


def check_weights(saved: int | None, trained: Sequence[Tensor]) -> None:
    """Raise unless the model holds the weights that were saved together with the state (`saved`: their checksum)."""
    if saved not in (None, checksum_all(trained)):
        raise Mismatch("the model does not hold the weights that it had when the loaded DiLoCo state was saved: before "
                       "join(), load the model that this replica saved at the same step. Another replica's weights, or "
                       "fresh ones, would be averaged as if they had been trained here")  # fmt: skip


def check_no_step(moved: bool) -> None:
    if moved:
        raise DiLoCoError("the model has changed and no step was counted: the optimizers that DiLoCo was given have "
                          "not (all) stepped. Give it those that train the model, or None and call step() after each "
                          "step")  # fmt: skip


def warn_no_step() -> None:
    warnings.warn("finish() after no step at all: this replica trained nothing that DiLoCo saw. Step the optimizer "
                  "that it was given or, without one, call step() after each step", stacklevel=3)  # fmt: skip


def warn_no_tokens() -> None:
    warnings.warn("count() has had 0 tokens on all replicas so far, so rounds change nothing. Give it the tokens of "
                  "each step, or never call it.", stacklevel=3)  # fmt: skip


def _warn_apart() -> None:
    if _apart and not hasattr(sys, "last_value"):  # after an error it is clear that nothing was finished
        warnings.warn("training ended without finish(), so the replicas end with different weights: use `with "
                      "DiLoCo(…):`, call finish() after the last step, or leave() if a later process resumes the "
                      "run", stacklevel=1)  # fmt: skip


atexit.register(_warn_apart)
