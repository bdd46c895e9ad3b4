"""What a bucket needs of its store, as checks that anyone can run against one: `diloco doctor --bucket URL`."""

import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from diloco.bucket.store import Create, Delete, List, Operation, Read, Size, Write
from diloco.bucket.store.backend import Backend, Failure, patiently
from diloco.errors import ConfigError, DiLoCoError

LENGTH = 1 << 20


def probe(backend: Backend) -> None:
    """Reject a store without create-only puts. Eight puts race for one name: a store that checks first and writes
    afterwards would pass if they came one by one."""
    patiently(lambda: _race(backend))


def _race(backend: Backend) -> None:
    name = f"probe/{secrets.token_hex(8)}"
    winners: list[bytes] = []
    failures: list[Failure] = []

    def attempt(body: bytes) -> None:
        try:
            if backend.attempt(Create(name, body)) is True:
                winners.append(body)
        except Failure as failure:
            failures.append(failure)

    bodies = [f"{i}".encode() for i in range(9)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(attempt, bodies[:8]))
        if len(winners) > 1:  # proof enough: a store that overwrites may not even read the name back
            raise _no_create_only(f"{len(winners)} won")
        read = pool.submit(backend.attempt, Read(name, 16))
        attempt(bodies[8])
        first, second = read.result(), backend.attempt(Read(name, 16))
    backend.attempt(Delete(name))
    if not (isinstance(first, bytes) and isinstance(second, bytes)):
        raise Failure(f"the store accepted {name} and could not read it back")
    if len(winners) > 1 or first != second:
        raise _no_create_only(f"{len(winners)} won, and the name read as {first!r} and then as {second!r}")
    if failures:
        raise failures[0]
    if not winners:
        raise Failure("9 puts raced for one name, and no reply said that one had won: replies were lost")
    if first != winners[0]:
        raise _no_create_only(f"{winners[0]!r} won, and the name reads as {first!r}")


def _no_create_only(outcome: str) -> ConfigError:
    return ConfigError(
        f"the store has no create-only puts: 9 puts raced for one name, {outcome}. Members could disagree on who is in "
        "a round. Use S3, R2, GCS, Azure, MinIO, a local folder or NFS."
    )


class Trial:
    """A few objects below `probe/`."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.folder = f"probe/{secrets.token_hex(8)}/"
        self.body = secrets.token_bytes(LENGTH)
        self.names = [f"{self.folder}{name}" for name in ("a", "b/1", "b/2-x_y.0", "c")]

    def do(self, operation: Operation) -> Any:
        return patiently(lambda: self.backend.attempt(operation))

    def reads(self, name: str) -> Any:
        return self.do(Read(name, LENGTH))

    def listed(self, prefix: str, after: str = "") -> dict[str, int]:
        """A store that is a folder may list folders, too."""
        listing = self.do(List(prefix, after))
        return {name: listing[name] for name in sorted(listing) if name != f"{self.folder}b"}


# Each promise is a docstring; the functions run in this order.


def creates_once(trial: Trial) -> bool:
    """Of several concurrent puts that create a name, one wins, forever."""
    probe(trial.backend)
    return True


def reads_back(trial: Trial) -> bool:
    """An object reads back as it was put."""
    for name in trial.names:
        trial.do(Create(name, trial.body))
    return all(trial.reads(name) == trial.body for name in trial.names)


def keeps(trial: Trial) -> bool:
    """Creating a name that is taken changes nothing."""
    trial.do(Create(trial.names[0], b"other"))
    return trial.reads(trial.names[0]) == trial.body


def lists(trial: Trial) -> bool:
    """A listing has every object below a prefix, also those put just before, and nothing else."""
    below = trial.listed(f"{trial.folder}b/")
    return [*trial.listed(trial.folder)] == trial.names and [*below] == trial.names[1:3]


def lists_sizes(trial: Trial) -> bool:
    """A listing has the size of every object."""
    return set(trial.listed(trial.folder).values()) == {LENGTH}


def lists_after(trial: Trial) -> bool:
    """A listing can begin after a name, in the order of bytes."""
    return [*trial.listed(trial.folder, trial.names[1])] == trial.names[2:]


def reads_ranges(trial: Trial) -> bool:
    """A range of an object can be read, also of an empty one."""
    middle = trial.do(Read(trial.names[3], 0, first=100, at=1000))
    end = trial.do(Read(trial.names[3], 0, first=100, at=LENGTH - 50))
    trial.do(Create(empty := f"{trial.folder}empty", b""))
    nothing = trial.do(Read(empty, 0, first=100))
    trial.do(Delete(empty))
    return middle == trial.body[1000:1100] and end == trial.body[-50:] and nothing == b""


def knows_sizes(trial: Trial) -> bool:
    """The size of an object is known without reading it."""
    return trial.do(Size(trial.names[3])) == LENGTH


def overwrites(trial: Trial) -> bool:
    """An overwritten object reads as the new one at once."""
    trial.do(Write(trial.names[3], b"new"))
    return trial.reads(trial.names[3]) == b"new"


def deletes(trial: Trial) -> bool:
    """A deleted object is gone at once, and reading it is not an error."""
    for name in trial.names:
        trial.do(Delete(name))
    gone = all(trial.reads(name) is None and trial.do(Size(name)) is None for name in trial.names)
    return gone and not trial.listed(trial.folder)


PROMISES = (creates_once, reads_back, keeps, lists, lists_sizes, lists_after, reads_ranges, knows_sizes, overwrites,
            deletes)  # fmt: skip


def broken_promises(backend: Backend) -> Iterator[str]:
    """Check all promises. Yields those that the store breaks, in words."""
    trial = Trial(backend)
    for promise in PROMISES:
        try:
            kept, seen = promise(trial), ""
        except DiLoCoError as error:
            kept, seen = False, f" ({error})"
        if not kept:
            yield f"{promise.__doc__}{seen}"
