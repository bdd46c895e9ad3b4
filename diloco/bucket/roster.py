"""Who may take part in a run whose members have keys of their own: lists, signed by the founder.

All members must agree on which list counts in a round, or one of them would take a record that another refuses. So the
founder puts a new list into a slot of the next rounds of every fragment, where a closing record could be (a *change*):
it counts for the slots behind it and for all rounds that follow. Creating a name has one winner, so either the change
is before the record or the record before the change, for all members, permanently. A record says which list it was
closed under, and follows the one before it in that too.

    run.json                        the first list, version 0, and the founder's public key
    keys/<version>.<digest>         a later list, for members that come after its change
    keys/<version>.<digest>.from    the rounds in which it took effect
    rounds/<i>/<f>/closed.<k>       a change: the same list in the place of a record
"""

import re

from diloco.bucket.round_store import RoundStore
from diloco.bucket.rounds import Link, folder, record_name
from diloco.bucket.snapshots import index_of, snapshot_folder
from diloco.bucket.store.envelope import HEADER, PREFIX, Envelope, Invalid, put
from diloco.bucket.store.keys import Listed, shown
from diloco.bucket.store.lists import list_name, load, seal_list
from diloco.bucket.store.operations import Create, List, Read, Task, create, together
from diloco.errors import ConfigError, DiLoCoError

AHEAD = 3
"""Rounds into which a change is put at once: a member that closes rounds meanwhile would have to close as many before
the first of them is there."""
TRIES = 100
_FROM = re.compile(r"keys/([0-9]{8}\.[0-9a-f]{64})\.from")


def load_lists(envelope: Envelope) -> Task[None]:
    """All lists, and since when they count: old records are signed by members that may be struck off since. What is not
    signed by the founder is passed over."""
    roster = envelope.roster
    if roster is None:
        return
    names = yield List("keys/")
    yield from together([load(envelope, name.removeprefix("keys/")) for name in sorted(names)])
    for name in names:
        if (match := _FROM.fullmatch(name)) and match[1] in roster.known and match[1] not in roster.since:
            yield from _load_since(envelope, name, match[1])


def _load_since(envelope: Envelope, name: str, tail: str) -> Task[None]:
    data = yield Read(name, PREFIX.size + HEADER)
    assert envelope.roster is not None
    try:
        since = [] if data is None else envelope.open(name, "list", data, 0).header.get("since")
    except Invalid:
        return
    if isinstance(since, list) and all(isinstance(index, int) for index in since):
        envelope.roster.since[tail] = tuple(since)


def check_listed(envelope: Envelope, name: str) -> None:
    """Whether this member may take part under this name. Raises ConfigError."""
    if envelope.roster is None or envelope.roster.newest.members.get(name) == envelope.signer != b"":
        return
    listed = envelope.roster.newest.members
    why = f"the run lists another key for {name!r}" if name in listed else f"the run does not list {name!r}"
    raise ConfigError(f"{why}: ask its founder for `diloco keys add BUCKET {name} {shown(envelope.signer)}`")


def change(envelope: Envelope, fragments: int, listed: Listed) -> Task[list[int]]:
    """Put a new list into the run. Returns the round of each fragment from which on it counts. Only the founder's
    signature makes it one."""
    yield from put(seal_list(envelope, list_name(listed.tail), listed))
    since = []
    for fragment in range(fragments):
        since.append((yield from _change_fragment(envelope, fragment, listed)))
    name = f"{list_name(listed.tail)}.from"
    yield from create(name, envelope.seal(name, "list", {"since": since}).body, PREFIX.size + HEADER)
    return since


def _change_fragment(envelope: Envelope, fragment: int, listed: Listed) -> Task[int]:
    rounds = RoundStore.reader(fragment, envelope)
    index, link = yield from _last_snapshot(envelope, rounds, fragment)
    for _ in range(TRIES):
        while True:  # to the open round
            record, slot, _ = yield from rounds.record(index + 1, link)
            if record is None:
                break
            index, link = index + 1, record.link
            if link.keys == listed.tail:
                return index
        if rounds.in_force(index + 1, link).keys == listed.tail:
            return index + 1
        for ahead in range(AHEAD, 0, -1):
            names = yield List(folder(fragment, index + ahead))
            free = next(k for k in range(len(names) + 1) if record_name(fragment, index + ahead, k) not in names)
            name = record_name(fragment, index + ahead, max(free, slot) if ahead == 1 else free)
            yield Create(name, seal_list(envelope, name, listed).body)
    raise DiLoCoError(f"fragment {fragment}: {TRIES} times rounds were closed before the new list was there; try again")


def _last_snapshot(envelope: Envelope, rounds: RoundStore, fragment: int) -> Task[tuple[int, Link]]:
    """The newest round that a snapshot leads to, and what the next record has to follow."""
    names = yield List(snapshot_folder(fragment))
    for name in sorted(names, reverse=True):
        index = index_of(name)
        if not index:
            continue
        data = yield Read(name, 0, first=PREFIX.size + HEADER)
        try:
            head = None if data is None else envelope.open(name, "snapshot", data, None, head=True)
            record = None if head is None else (yield from rounds.find(index, head.text("record")))
        except Invalid:
            continue
        if record is not None:
            return index, record.link
    return 0, Link()


def changed(envelope: Envelope, name: str, public: bytes | None) -> Listed:
    """The newest list with another key for a name, or without it. Raises ConfigError."""
    roster = envelope.roster
    assert roster is not None
    if envelope.signer != roster.founder:
        raise ConfigError("only the founder of the run can change who takes part: give the founder's key with "
                          "--key-file")  # fmt: skip
    members = dict(roster.newest.members)
    if public is None and members.pop(name, None) is None:
        raise ConfigError(f"{name!r} is not listed: {', '.join(sorted(members)) or 'nobody'} is")
    if public is not None:
        if (other := next((n for n, key in members.items() if key == public and n != name), None)) is not None:
            raise ConfigError(f"this key is that of {other!r}: each member needs its own")
        members[name] = public
    return Listed(roster.newest.version + 1, members)
