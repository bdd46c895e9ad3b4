"""The order of training: every window of the corpus once per epoch, in an order that is computed, not stored.

Window w starts at token w·context. A permutation by (seed, epoch) orders all windows; replicas take `sequences` of them
in turn. So with the same global batch (replicas · sequences), step t covers the same windows for any number of replicas
and any method, which makes runs comparable. Within an epoch no two replicas see the same window. For sharded replicas,
count ranks instead of replicas; for gradient accumulation, take several batches per step.
"""

import hashlib
import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from diloco.bucket.leases import Leases
from diloco.errors import ConfigError

_ROUNDS = 6
_MULTIPLY = np.uint64(0xBF58476D1CE4E5B9)  # of splitmix64
_MULTIPLY_AGAIN = np.uint64(0x94D049BB133111EB)
_SHIFT, _SHIFT_AGAIN = np.uint64(31), np.uint64(27)


class Batches:
    """The training data of one replica. The position is its only state."""

    def __init__(
        self, tokens: np.ndarray, *, replica: int, replicas: int, sequences: int, context: int, seed: int
    ) -> None:
        self.windows = max(len(tokens) - 1, 0) // context
        if self.windows < replicas * sequences:
            raise ConfigError(
                f"the corpus has {len(tokens)} train tokens, {self.windows} windows of context {context}, fewer than "
                f"one batch of {replicas * sequences}: add more --data, or lower --batch or --context"
            )
        self._tokens, self._seed = tokens, seed
        self._first, self._sequences, self._stride = replica * sequences, sequences, replicas * sequences
        self._window = np.arange(context + 1)
        self._context = context
        self._position = 0

    def next(self) -> tuple[Tensor, Tensor]:
        """Inputs and, one token later, targets: int64 of (sequences, context)."""
        starts = self.take() * self._context
        both = torch.from_numpy(self._tokens[starts[:, None] + self._window].astype(np.int64))
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()

    def take(self) -> np.ndarray:
        """The numbers of the next batch's windows."""
        places = np.arange(self._sequences) + (self._position + self._first)
        self._position += self._stride
        epochs, places = np.divmod(places, self.windows)
        if epochs[0] == epochs[-1]:
            return permuted(places, self.windows, self._seed, int(epochs[0]))
        later = epochs > epochs[0]  # a batch is at most one epoch long, so it touches at most two
        return np.concatenate(
            [
                permuted(places[~later], self.windows, self._seed, int(epochs[0])),
                permuted(places[later], self.windows, self._seed, int(epochs[-1])),
            ]
        )

    def state_dict(self) -> dict[str, int]:
        """The number of windows that all replicas together have taken: valid for any number of replicas."""
        return {"position": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._position = int(state["position"])


class LeasedBatches(Batches):
    """The windows that a member of a bucket has leased, in the order that all members share: `seed` is the run's. Each
    rank of a sharded member leases from its own share of the windows. Without a lease it falls back to `own`."""

    def __init__(self, own: Batches, leases: Leases, step: Callable[[], int], *, shard: int, shards: int, seed: int):
        """`step`: the number of the step that the next batch is for."""
        vars(self).update(vars(own))
        self._leases, self._step, self._shard, self._shards, self._run_seed = leases, step, shard, shards, seed

    def take(self) -> np.ndarray:
        spans = self._leases.take(self._sequences, self._step())
        parts = [
            permuted(np.arange(first, end) * self._shards + self._shard, self.windows, self._run_seed, epoch)
            for epoch, first, end in spans
        ]
        missing = self._sequences - sum(len(part) for part in parts)
        return np.concatenate([*parts, super().take()[:missing]]) if missing else np.concatenate(parts)


def permuted(places: np.ndarray, size: int, seed: int, epoch: int) -> np.ndarray:
    """Map each place by a pseudo-random permutation of range(size).

    A Feistel network on a nearly square grid of at least `size` cells: each round shifts one coordinate by a hash of
    the other, which is invertible. A place that lands beyond `size` is mapped again until it lands inside; that is
    rare, because the grid has fewer than √size + 1 extra cells.

    >>> permuted(np.arange(6), 6, seed=0, epoch=0).tolist()
    [1, 5, 0, 2, 3, 4]
    """
    rows = math.isqrt(size - 1) + 1
    columns = -(-size // rows)
    keys = _keys(seed, epoch)
    out = _through(places.astype(np.uint64), np.uint64(rows), np.uint64(columns), keys)
    while (beyond := out >= size).any():
        out[beyond] = _through(out[beyond], np.uint64(rows), np.uint64(columns), keys)
    return out.astype(np.int64)


def _through(x: np.ndarray, rows: np.uint64, columns: np.uint64, keys: np.ndarray) -> np.ndarray:
    row, column = np.divmod(x, columns)
    for key in range(0, _ROUNDS, 2):
        row = (row + _hash(column, keys[key])) % rows
        column = (column + _hash(row, keys[key + 1])) % columns
    return row * columns + column


def _hash(x: np.ndarray, key: np.uint64) -> np.ndarray:
    x = (x + key) * _MULTIPLY
    x = (x ^ (x >> _SHIFT)) * _MULTIPLY_AGAIN
    return (x ^ (x >> _SHIFT_AGAIN)) >> np.uint64(8)  # leaves room for the sum


@lru_cache(maxsize=4)
def _keys(seed: int, epoch: int) -> np.ndarray:
    digest = hashlib.blake2b(f"{seed} {epoch}".encode(), digest_size=8 * _ROUNDS).digest()
    return np.frombuffer(digest, "<u8").astype(np.uint64)
