"""Lists of members as objects: sealed by the founder, read by everybody; and who may be in a round under which list."""

from collections.abc import Iterable
from typing import Protocol, TypeVar

from diloco.bucket.store.envelope import HEADER, PREFIX, Answer, Envelope, Invalid, Sealed
from diloco.bucket.store.keys import TAIL, Listed, read_list, version_of
from diloco.bucket.store.operations import Read, Task

LIST = PREFIX.size + HEADER + (1 << 20)


def list_name(tail: str) -> str:
    return f"keys/{tail}"


def seal_list(envelope: Envelope, name: str, listed: Listed) -> Sealed:
    return envelope.seal(name, "list", {"version": listed.version}, listed.payload)


def open_list(envelope: Envelope, name: str, data: Answer) -> Listed:
    """Raises Invalid."""
    found = envelope.open(name, "list", data, None)
    try:
        return read_list(found.payload)
    except (ValueError, KeyError, TypeError, RecursionError):
        raise Invalid("it is not a list of members") from None


def load(envelope: Envelope, tail: str) -> Task[Listed | None]:
    """The list that a record names, if there is one."""
    roster = envelope.roster
    assert roster is not None
    if tail in roster.known or not TAIL.fullmatch(tail):
        return roster.known.get(tail)
    data = yield Read(list_name(tail), LIST)
    try:
        listed = None if data is None else open_list(envelope, list_name(tail), data)
    except Invalid:
        return None
    if listed is None or listed.tail != tail:
        return None
    roster.add(listed)
    return listed


def load_named(envelope: Envelope, name: str, data: Answer) -> Task[None]:
    """The list that a record names, before its signer is looked for in the lists that are known."""
    try:
        tail = Envelope(envelope.run).open(name, "record", data, None).text("keys")
    except Invalid:
        return
    yield from load(envelope, tail)


def check_round(
    envelope: Envelope, place: tuple[int, int], tail: str, by: str, signer: bytes, members: Iterable[str]
) -> Task[None]:
    """Whether a record of a fragment's round may be closed under this list: its writer and its members are listed, and
    no later list counted already. Raises Invalid."""
    roster, (fragment, index) = envelope.roster, place
    if roster is None:
        return
    listed = yield from load(envelope, tail)
    if listed is None:
        raise Invalid("the list of members that it names is not there")
    for later, since in roster.since.items():
        if version_of(later) > listed.version and fragment < len(since) and index >= since[fragment]:
            raise Invalid("it was closed under a list of members that did not count any more")
    if listed.members.get(by) != signer:
        raise Invalid("its writer is not listed")
    if not set(members) <= set(listed.members):
        raise Invalid("it names a member that is not listed")


def signer_in(envelope: Envelope, tail: str, signer: bytes) -> str:
    """Whose key this is in a list that was read; nobody's, if members have none of their own. Raises Invalid."""
    if envelope.roster is None:
        return ""
    listed = envelope.roster.known.get(tail)
    for name, public in listed.members.items() if listed is not None else ():
        if public == signer:
            return name
    raise Invalid("its signer is not listed in this round")


class Signed(Protocol):
    @property
    def member(self) -> str: ...
    @property
    def signer(self) -> bytes: ...


S = TypeVar("S", bound=Signed)


def admitted(envelope: Envelope, tail: str, deltas: Iterable[S]) -> list[S]:
    """The deltas of those who are listed, each signed with the key that the list has for its member."""
    if envelope.roster is None:
        return list(deltas)
    listed = envelope.roster.known.get(tail)
    return [d for d in deltas if listed is not None and listed.members.get(d.member) == d.signer]
