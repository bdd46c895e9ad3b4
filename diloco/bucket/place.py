"""Where the members of a run meet, and those ranks of them that hold the same shard."""

import contextlib

from diloco.bucket.run import NAME, Run, read_run
from diloco.bucket.store.operations import Size
from diloco.bucket.store.store import Backend, Failure, Store, open_store
from diloco.errors import ConfigError, DiLoCoError, Mismatch

WHOLE = "shard 0 of 1"
SHARD = "shard-{}"
"""Where the ranks of replicas that are sharded meet: each with those that hold the same shard. Its rounds are its own,
as those of a fragment are, so ranks of one replica need not agree on anything."""


def find_run(url: str, key: bytes | None = None, *, create: bool = False) -> Run | None:
    """The run in a bucket, if there is one. `create`: a folder that is not there is made."""
    backend = open_store(url, create=create)
    try:
        backend.attempt(Size(NAME))
    except Failure as failure:  # before training there is nothing to go on with meanwhile
        raise DiLoCoError(f"{url}: the store does not answer: {failure}; check the address, AWS_ENDPOINT_URL or its "
                          "like, and the network") from None  # fmt: skip
    return Store(backend).run(read_run(key), contextlib.nullcontext())


def below(url: str, shard: int) -> str:
    """The bucket of one shard of a run."""
    return f"{url.rstrip('/')}/{SHARD.format(shard)}"


def place_of(shard: str, root: Backend, url: str, strict: bool) -> Backend:
    """The run's place, or that of this rank's shard. All members must have as many shards: the contract says how many,
    and here is found who has none."""
    other = f"{SHARD.format(0)}/{NAME}" if shard == WHOLE else NAME
    if Store(root).perform(Size(other)) is not None:
        has = "are sharded" if shard == WHOLE else "have one rank"
        raise Mismatch(f"{url} holds a run whose members {has}, this one is {shard}: give all as many ranks")
    if shard == WHOLE:
        return root
    if strict:
        raise ConfigError("pace='strict' with several ranks: two members would wait for each other crosswise, one rank "
                          "for a round, the other for its neighbour; give 'decoupled'")  # fmt: skip
    return open_store(below(url, int(shard.split()[1])))
