"""What a store must offer: stores that do, and stores that break one promise each."""

import pytest

from diloco.bucket.store import Create, Delete, List, Read, Size, Write
from diloco.bucket.store.backend import Failure, Folder, open_store
from diloco.bucket.store.contract import PROMISES, broken_promises
from diloco.bucket.store.envelope import Encrypted


def test_a_folder_and_the_store_in_memory_keep_all_promises(tmp_path):
    stores = Folder(tmp_path), open_store("memory://promises"), Encrypted(Folder(tmp_path / "x"), b"k" * 32)
    (tmp_path / "x").mkdir()
    for store in stores:
        assert list(broken_promises(store)) == []
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


class Broken:
    """A folder that does one operation differently."""

    def __init__(self, root, changed):
        self.store, self.changed, self.names = Folder(root), changed, {}

    def attempt(self, operation):
        if isinstance(operation, List):
            late, self.names[operation.prefix] = self.names.get(operation.prefix, {}), self.store.attempt(operation)
            return self.changed(self.store, operation) or late if self.changed is late_lists else self._do(operation)
        return self._do(operation)

    def _do(self, operation):
        answer = self.changed(self.store, operation)
        return self.store.attempt(operation) if answer is None else answer


def overwrites_always(store, operation):
    if isinstance(operation, Create):
        return store.attempt(Write(operation.name, operation.data)) or True
    return None


def cuts_off(store, operation):
    return b"" if isinstance(operation, Read) and operation.first is None and store.attempt(operation) else None


def late_lists(store, operation):
    return None


def lists_no_sizes(store, operation):
    return dict.fromkeys(store.attempt(operation), 0) if isinstance(operation, List) else None


def ignores_after(store, operation):
    return store.attempt(List(operation.prefix)) if isinstance(operation, List) else None


def ignores_ranges(store, operation):
    return store.attempt(Read(operation.name, 1 << 30)) if isinstance(operation, Read) and operation.first else None


def refuses_ranges_of_nothing(store, operation):
    if isinstance(operation, Read) and operation.first and not store.attempt(Size(operation.name)):
        raise Failure("416 Range Not Satisfiable")


def has_no_sizes(store, operation):
    return 0 if isinstance(operation, Size) and store.attempt(operation) else None


def never_overwrites(store, operation):
    return False if isinstance(operation, Write) else None


def never_deletes(store, operation):
    return False if isinstance(operation, Delete) else None


def refuses(store, operation):
    raise Failure("no")


@pytest.mark.parametrize(
    ("changed", "promise"),
    [
        (overwrites_always, "creates_once"), (overwrites_always, "keeps"), (cuts_off, "reads_back"),
        (late_lists, "lists"), (lists_no_sizes, "lists_sizes"), (ignores_after, "lists_after"),
        (ignores_ranges, "reads_ranges"), (refuses_ranges_of_nothing, "reads_ranges"), (has_no_sizes, "knows_sizes"),
        (never_overwrites, "overwrites"),
        (never_deletes, "deletes"), (refuses, "reads_back"),
    ],
)  # fmt: skip
def test_a_store_that_breaks_a_promise_is_told_which(changed, promise, tmp_path, monkeypatch):
    monkeypatch.setattr("diloco.bucket.store.backend.PAUSES", ())
    text = next(p.__doc__ for p in PROMISES if p.__name__ == promise)
    assert any(broken.startswith(text) for broken in broken_promises(Broken(tmp_path, changed)))
