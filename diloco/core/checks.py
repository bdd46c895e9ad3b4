"""Checks for mistakes in a training loop that would go unnoticed, or fail far from their cause."""

import atexit
import gc
import sys
import warnings
from collections.abc import Collection, Iterator, Sequence
from math import prod
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from diloco.codecs.codec import Codec, check_sizes
from diloco.core.fragment import Fragment, Sequential, Strided
from diloco.core.tensors import Parts, checksum_all, trainable
from diloco.errors import ConfigError, Mismatch
from diloco.exchange.reducer import Identity, Shard

_owners: "WeakKeyDictionary[Any, ref[Any]]" = WeakKeyDictionary()
"""By model and by reducer: the DiLoCo that uses it."""
_unfinished: WeakSet[Any] = WeakSet()
"""Those that have joined the other replicas and not left them."""


def check_model(model: object) -> None:
    parts = model if isinstance(model, (list, tuple)) else [model]
    for part in parts:
        if not isinstance(part, nn.Module):
            raise ConfigError(f"model is a {type(part).__name__}: pass the module itself, as in DiLoCo(model, "
                              "optimizer), or a list of the modules that make up the model")  # fmt: skip
    if not parts:
        raise ConfigError("model is an empty list: pass the modules that make up the model")


def check_settings(*, fragments: object, codec: Codec, outer: object, keep_local: float) -> None:
    if isinstance(outer, torch.optim.Optimizer):
        raise ConfigError(f"outer is torch.optim.{type(outer).__name__}, which steps on gradients: pass "
                          "diloco.Nesterov(lr=0.4) or diloco.SGD(lr=1.0), which step on the mean delta")  # fmt: skip
    for name, value, method, examples in (
        ("fragments", fragments, "split", "Strided(layers=3) or Balanced(8)"),
        ("codec", codec, "encode", "E3M0() or BFloat16()"),
        ("outer", outer, "step", "Nesterov(lr=0.4)"),
    ):
        if not hasattr(value, method) or isinstance(value, (str, type)):
            raise ConfigError(f"{name}={value!r}: pass an object such as {examples}")
    if not 0 <= keep_local <= 1:
        raise ConfigError(f"keep_local={keep_local}: pass a number from 0 (take the anchor) to 1 (never take it)")
    check_sizes(codec)


def check_reducer(reducer: Any, *, auto: bool) -> None:
    if not hasattr(reducer, "identity") or isinstance(reducer, type):
        raise ConfigError(f"reducer is a {type(reducer).__name__}: pass a reducer, such as Collective(group) for a "
                          "process group, or Bucket(url, name)")  # fmt: skip
    if auto and len(reducer.identity.ddp_ranks) > 1:
        raise ConfigError('overlap="auto" with DDP inside a replica: its ranks would apply rounds at different steps, '
                          "and DDP needs equal weights: pass a number of steps")  # fmt: skip


def check_overlap_of_copies(parameters: Sequence[Tensor], shards: int) -> None:
    """With an automatic overlap each rank chooses its own, so no two ranks may hold the same values."""
    if any(_cut(parameter) < shards for parameter in parameters):
        raise ConfigError('overlap="auto" with parameters that several ranks of a replica hold, as with HSDP or tensor '
                          "parallelism: they would apply rounds at different steps and drift apart. Pass a number of "
                          "steps")  # fmt: skip


def _cut(parameter: Tensor) -> int:
    """Into how many parts it is sharded."""
    if not isinstance(parameter, DTensor):
        return 1
    sizes = zip(parameter.placements, parameter.device_mesh.shape, strict=True)
    return prod(size for placement, size in sizes if not placement.is_replicate())


def check_trained(model: nn.Module, synced: Sequence[Tensor], optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raise unless the trained parameters are those that are synced and those that the optimizers hold."""
    parameters = list(model.parameters())
    trained_ids, synced_ids = {id(p) for p in parameters if p.requires_grad}, set(map(id, synced))
    if trained_ids - synced_ids:
        added = [name for name, p in trainable(model).items() if id(p) not in synced_ids]
        raise ConfigError(f"{_listed(added)} trained but did not exist when DiLoCo was created, so it would never be "
                          "synced: create DiLoCo after the last change to the model, such as adapters, new layers, "
                          "unfreezing, conversion or load_state_dict(assign=True). In the middle of a run call finish()"
                          " first, then create a new optimizer and a new DiLoCo")  # fmt: skip
    stepped = {id(p): p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    missing = trained_ids - stepped.keys() if optimizers else set()
    if missing and len(missing) == len(trained_ids):
        raise ConfigError("the optimizer holds no parameter of this model: create it from model.parameters(), after "
                          "the last change to the model")  # fmt: skip
    if missing:
        names = [name for name, p in trainable(model).items() if id(p) in missing]
        raise ConfigError(f"{_listed(names)} trained (requires_grad) but in no optimizer that DiLoCo has: pass all "
                          "optimizers as a list, or freeze with requires_grad_(False)")  # fmt: skip
    of_model = {id(p) for p in parameters} | synced_ids  # parameters tied or removed since are not trained any more
    if unknown := [tuple(p.shape) for key, p in stepped.items() if p.requires_grad and key not in of_model]:
        raise ConfigError(f"the optimizer trains a parameter of shape {unknown[0]} that the model does not have, so it "
                          "is never synced: pass DiLoCo a module that holds all parameters, and create the optimizer "
                          "from its parameters, not from copies")  # fmt: skip


def check_unsharded(shard: Shard) -> None:
    if shard != Shard():
        raise ConfigError(
            "the parameters are sharded, so only ranks that hold the same shard may talk: create a mesh with a "
            'dimension for the replicas, mesh = init_device_mesh(device, (replicas, shards), mesh_dim_names=("replica",'
            ' "shard")), shard over mesh["shard"], and pass reducer=Collective(mesh.get_group("replica"), '
            'shards=mesh.get_group("shard"))'
        )


def check_ranks(parameters: Sequence[Tensor], reducer: object, identity: Identity) -> None:
    """Refuse ranks that exchange gradients and are also replicas of each other, and ranks with equal weights that do
    not merge them together."""
    for ranks in _ddp_ranks(parameters):
        if len(common := sorted(set(ranks) & set(identity.ranks))) > 1:
            raise ConfigError(
                f"DistributedDataParallel averages gradients over the ranks {common} at every step, and DiLoCo joins "
                "the same ranks: that is all the traffic of DDP and more. Leave DDP out, each process is a replica; or "
                "give DDP the ranks of one replica (process_group=) and DiLoCo the ranks with the same place in each "
                "replica, reducer=Collective(across, ddp_ranks=within)"
            )
        if len(ranks) > 1 and set(ranks) != set(identity.ddp_ranks):
            remedy = ("Wrap it in diloco.FirstRank(reducer, group) with DDP's group" if identity.replicas is None else
                      "Pass DDP's group as ddp_ranks=")  # fmt: skip
            raise ConfigError(
                f"DistributedDataParallel over the ranks {ranks} with a {type(reducer).__name__} for "
                f"{list(identity.ddp_ranks) or 'one process'}: each rank would weigh and apply rounds by itself, and "
                f"they would drift apart. {remedy}"
            )
    for ranks in {tuple(p.device_mesh.mesh.flatten().tolist()) for p in parameters if isinstance(p, DTensor)}:
        if len(common := sorted(set(ranks) & set(identity.ranks))) > 1:
            raise ConfigError(
                f"the model is sharded or copied over the ranks {sorted(ranks)}, and DiLoCo joins {common} of them as "
                "replicas: FSDP would exchange gradients between them at every step. Shard over the ranks of one "
                'replica, without the replica dimension: fully_shard(model, mesh=mesh["shard"])'
            )


def _ddp_ranks(parameters: Sequence[Tensor]) -> Iterator[list[int]]:
    """The ranks of each DDP that holds one of the parameters. Frameworks wrap a model and hand out the inner one, from
    which nothing leads to the wrapper. But every object refers to its class: so ask what refers to DDP (30 ms with
    300,000 objects; 180 ms to look at each of them)."""
    if not (dist.is_available() and dist.is_initialized()):
        return  # DDP needs a process group
    parameter_ids = set(map(id, parameters))
    for wrapper in gc.get_referrers(*_with_subclasses(DistributedDataParallel)):
        if isinstance(wrapper, DistributedDataParallel) and any(id(p) in parameter_ids for p in wrapper.parameters()):
            yield dist.get_process_group_ranks(wrapper.process_group)


def _with_subclasses(kind: type) -> list[type]:
    return [kind, *(derived for subclass in kind.__subclasses__() for derived in _with_subclasses(subclass))]


def _listed(names: Sequence[str]) -> str:
    return f"parameter {names[0]}" + (f" and {len(names) - 1} more are" if len(names) > 1 else " is")


def hint_one_fragment(fragments: object, pieces: Sequence[Fragment]) -> None:
    """Warn that nothing is streamed, unless the user asked for that."""
    if isinstance(fragments, (Strided, Sequential)) and len(pieces) == 1:
        warnings.warn(f"{fragments} makes one fragment of this model, so all of it is sent at once: "
                      "fragments=Balanced(4) streams it in four parts", stacklevel=3)  # fmt: skip


def claim(model: nn.Module, reducer: object, diloco: object) -> None:
    """Only one DiLoCo may use a model or a reducer at a time: two would count each step twice, and take each other's
    rounds. From now on, warn at exit if `release` was not called."""
    for thing in (claimed := [*_parts(model), reducer]):
        if thing in _owners and _owners[thing]() not in (None, diloco):
            raise ConfigError("this reducer already belongs to another DiLoCo; create one per instance"
                              if thing is reducer else "this model already has a DiLoCo: finish() that one first, or "
                              "create a new model and a new optimizer")  # fmt: skip
    for thing in claimed:
        _owners[thing] = ref(diloco)
    _unfinished.add(diloco)


def release(model: nn.Module, reducer: object, diloco: object) -> None:
    _unfinished.discard(diloco)
    for thing in (*_parts(model), reducer):
        if thing in _owners and _owners[thing]() is diloco:
            del _owners[thing]


def _parts(model: nn.Module) -> list[nn.Module]:
    """The modules that the user passed: a list of them is wrapped anew each time."""
    return list(model.children()) if isinstance(model, Parts) else [model]


def check_saved(saved: Collection[str], shard: str) -> None:
    if not saved:
        raise Mismatch("the saved state is empty: pass what state_dict() returned, or load nothing at the start")
    if shard not in saved:
        raise Mismatch(f"the saved state is of {', '.join(saved)}, this process is {shard}")


def check_saved_replica(saved: int | str, name: int | str) -> None:
    """Warn about a state of another replica, as with one file or folder for all."""
    if saved != name and type(saved) is type(name):  # a member's name says nothing about a replica's number
        warnings.warn(f"replica {name} loads a state that replica {saved} saved: it loses its own work since the last "
                      "sync, and continues with the moments of another. Save and load a file for each replica (with "
                      "torch.distributed.checkpoint: a folder, and no_dist=True)", stacklevel=3)  # fmt: skip


def check_weights(saved: int | None, trained: Sequence[Tensor]) -> None:
    """Raise unless the model holds the weights that were saved together with the state (`saved`: their checksum)."""
    if saved not in (None, checksum_all(trained)):
        raise Mismatch("the model does not hold the weights that it had when the loaded DiLoCo state was saved: before "
                       "join(), load the model that this replica saved at the same step. Another replica's weights, or "
                       "fresh ones, would be averaged as if they had been trained here")  # fmt: skip


def warn_no_step() -> None:
    warnings.warn("finish() without a single step: DiLoCo saw no training on this replica. Step the optimizer that you "
                  "passed or, without one, call step() after each", stacklevel=3)  # fmt: skip


def warn_no_tokens() -> None:
    warnings.warn("count() got 0 tokens on all replicas so far, so rounds change nothing. Pass the tokens of each "
                  "step, or never call it", stacklevel=3)  # fmt: skip


def _warn_unfinished() -> None:
    if _unfinished and not hasattr(sys, "last_value"):  # after an error the user knows that nothing was finished
        warnings.warn("training ended without finish(), so the replicas end with different weights: use `with "
                      "DiLoCo(…):`, call finish() after the last step, or leave() if a later process resumes the "
                      "run", stacklevel=1)  # fmt: skip


atexit.register(_warn_unfinished)
