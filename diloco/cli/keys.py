"""`diloco keys`: who may take part in a run whose members have keys of their own."""

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from diloco.errors import ConfigError
from diloco.flags import REQUIRED, flag

if TYPE_CHECKING:
    from diloco.bucket.store.envelope import Envelope
    from diloco.bucket.store.keys import Listed
    from diloco.bucket.store.store import Store

What = Literal["new", "list", "add", "strike"]
WORDS = {"new": 1, "list": 1, "add": 3, "strike": 2}
"""How many words follow each."""


@dataclass(frozen=True, kw_only=True)
class KeysConfig:
    """Make a key of your own, and see or change who is listed in a run. The member that begins a run with a key of its
    own is its founder, the only one that can add members and strike them off, while the run goes on."""

    what: What = flag(REQUIRED, "new FILE makes a key and prints its public half. list BUCKET shows who is listed. add "
                      "BUCKET NAME PUBLIC lists a member, or gives it another key. strike BUCKET NAME takes one off.",
                      positional=True)  # fmt: skip
    words: tuple[str, ...] = flag((), "What follows it.", positional=True)
    key_file: Path | None = flag(None, "The founder's key, to add and to strike.", why="nothing can be changed")
    founder: str | None = flag(None, "The founder's public key.", why="the one that the run names is believed")
    encrypt: Path | None = flag(None, "The file with which the run is encrypted.", why="it is not encrypted")

    def __post_init__(self) -> None:
        if len(self.words) != WORDS[self.what]:
            raise ConfigError(f"keys {self.what}: {len(self.words)} words follow, {WORDS[self.what]} are wanted; "
                              "diloco keys --help says which")  # fmt: skip


CONFIG = KeysConfig
EXAMPLES = (
    "diloco keys new me.key",
    "diloco keys list s3://bucket/run",
    "diloco keys add s3://bucket/run lab ed25519:… --key-file founder.key",
    "diloco keys strike s3://bucket/run lab --key-file founder.key",
)
assert set(WORDS) == set(get_args(What))


def main(config: KeysConfig) -> int:
    from diloco.bucket.members import check_name
    from diloco.bucket.roster import changed
    from diloco.bucket.store.keys import new_pair, public_key, shown

    if config.what == "new":
        print(shown(new_pair(Path(config.words[0])).public))
        return 0
    if config.what == "list":
        return _list(config)
    name = check_name(config.words[1])
    public = public_key(config.words[2]) if config.what == "add" else None
    for part in _parts(config):  # first all, so that nothing is changed if one cannot be
        changed(part.envelope, name, public)
    for part in _parts(config):
        listed = changed(part.envelope, name, public)
        since = part.change(listed)
        print(f"{part.url}: {'lists' if public else 'has struck off'} {name}, from round {max(since, default=1)} on")
    return 0


def _list(config: KeysConfig) -> int:
    from diloco.bucket.store.keys import shown

    part = next(iter(_parts(config)))
    roster = part.envelope.roster
    assert roster is not None
    print(f"founder {shown(roster.founder)}, version {roster.newest.version}")
    for name, public in sorted(roster.newest.members.items()):
        print(f"{name} {shown(public)}")
    return 0


def _parts(config: KeysConfig) -> list["_Part"]:
    """The run, or the runs of all its shards."""
    from diloco.bucket import below, find_run
    from diloco.bucket.roster import load_lists
    from diloco.bucket.store.cipher import open_encrypted
    from diloco.bucket.store.keys import read_key, read_secret
    from diloco.bucket.store.store import Store

    url, encrypt = config.words[0], None if config.encrypt is None else read_secret(config.encrypt)
    key, parts = read_key(config.key_file, config.founder), []
    urls = [url] if find_run(url, key, encrypt=encrypt) is not None else [below(url, k) for k in range(1 << 20)]
    for each in urls:
        try:
            run = find_run(each, key, encrypt=encrypt)
        except ConfigError:
            if each == url or not parts:
                raise
            run = None
        if run is None:
            break
        if run.founder is None:
            raise ConfigError(f"{each}: the members of this run have no keys of their own; begin one with a key from "
                              "`diloco keys new FILE`")  # fmt: skip
        part = _Part(each, run.envelope(key), len(run.snapshots), Store(open_encrypted(each, encrypt, create=False)))
        part.store.run(load_lists(part.envelope), nullcontext())
        parts.append(part)
    if not parts:
        raise ConfigError(f"there is no run in {url}: check the address")
    return parts


@dataclass(frozen=True)
class _Part:
    url: str
    envelope: "Envelope"
    fragments: int
    store: "Store"

    def change(self, listed: "Listed") -> list[int]:
        from diloco.bucket.roster import change

        return self.store.run(change(self.envelope, self.fragments, listed), nullcontext())
