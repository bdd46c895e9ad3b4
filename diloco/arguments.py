"""What DiLoCo is given: whether it can be used, and what stands in for what is not given."""

from diloco.errors import ConfigError
from diloco.flat import WHOLE, ShardId
from diloco.reduce import Reduce


def check_kinds(fragments: object, codec: object, outer: object) -> None:
    for name, value, method, examples in (
        ("fragments", fragments, "split", "Strided(layers=3) or Balanced(8)"),
        ("codec", codec, "encode", "E3M0() or BFloat16()"),
        ("outer", outer, "step", "Nesterov(lr=0.4)"),
    ):
        if not hasattr(value, method) or isinstance(value, (str, type)):
            raise ConfigError(f"{name}={value!r}: give an object, as in {examples}")


def default_reduce(shard: ShardId) -> Reduce:
    from diloco.reduce.collective import Collective

    if shard != WHOLE:
        raise ConfigError(
            "the parameters are sharded, so only ranks that hold the same shard may talk: make a mesh with a dimension "
            'for the replicas, mesh = init_device_mesh(device, (replicas, shards), mesh_dim_names=("replica", '
            '"shard")), shard over mesh["shard"], and pass reduce=Collective(mesh.get_group("replica"), '
            'shards=mesh.get_group("shard"))'
        )
    return Collective()
