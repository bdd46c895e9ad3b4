"""The corpus: the same for everyone, split without overlap, prepared once; and what it says if something is wrong."""

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from diloco.errors import ConfigError
from diloco.runs.config import TrainConfig
from diloco.runs.writer import open_sinks
from diloco.train import settings
from diloco.train.data.corpus import documents, prepare
from diloco.train.model import build
from tests.support.processes import context

LINES = [f"line {i}: {'abcdefghij'[i % 10] * (i % 37)} end" for i in range(2000)]


@pytest.fixture(scope="module")
def standard(tmp_path_factory):
    return prepare([], "bytes", tmp_path_factory.mktemp("cache"))


@pytest.fixture
def book(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("\n".join(LINES * 8))
    return path


def _ids(path: Path) -> np.ndarray:
    return np.fromfile(path, np.uint16)


def _documents(path: Path) -> list[bytes]:
    ids = _ids(path)
    pieces = np.split(ids, np.flatnonzero(ids == 256) + 1)
    assert len(pieces[-1]) == 0  # the last document too has its end
    return [piece[:-1].astype(np.uint8).tobytes() for piece in pieces[:-1]]


def test_the_default_corpus_is_the_standard_library_without_tests(standard):
    files = documents.find([]).items
    assert all(isinstance(f, Path) and f.suffix == ".py" for f in files)
    folders = {part for f in files for part in Path(f).parts[-4:-1]}
    assert not {"test", "tests", "idle_test", "site-packages", "__pycache__"} & folders
    assert {"argparse.py", "typing.py"} <= {Path(f).name for f in files}
    assert 5e6 < standard.nbytes < 1e8
    assert standard.name.startswith("Python 3.")


def test_the_split_is_disjoint_without_duplicates_and_about_a_twentieth(standard):
    train, held_out = _documents(standard.train), _documents(standard.held_out)
    texts = train + held_out
    assert len(texts) == len(set(texts))
    assert 0.02 < len(held_out) / len(texts) < 0.09
    assert set(texts) == {content for f in documents.find([]).items if (content := Path(f).read_bytes())}
    assert sum(map(len, train)) == standard.nbytes
    assert standard.bytes_per_token == sum(map(len, held_out)) / len(_ids(standard.held_out))


def test_the_unigram_loss_is_what_it_says(standard):
    counts = np.bincount(_ids(standard.train), minlength=257) + 1
    expected = -np.log(counts / counts.sum())[_ids(standard.held_out)].mean()
    assert standard.unigram_loss() == pytest.approx(expected)
    assert 2.5 < expected < 4  # program text


def test_evaluation_is_fixed_spread_and_in_equal_batches(standard):
    windows = standard.evaluation(128, 32_768)
    again = standard.evaluation(128, 32_768)
    assert {x.shape for x, _ in windows} == {(16, 128)} and len(windows) == 16
    assert all(torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) for a, b in zip(windows, again, strict=True))
    ids = _ids(standard.held_out).astype(np.int64)
    count = (len(ids) - 1) // 128
    for n, (x, y) in enumerate(zip(*(torch.cat(part) for part in zip(*windows, strict=True)), strict=True)):
        start = n * count // 256 * 128
        assert x.tolist() == ids[start : start + 128].tolist() and y.tolist() == ids[start + 1 : start + 129].tolist()


def test_text_files_are_cut_at_lines_and_nothing_is_lost(tmp_path, book):
    corpus = prepare([str(book)], "bytes", tmp_path / "cache")
    pieces = list(documents.texts(documents.find([str(book)])))
    assert b"".join(pieces) == book.read_bytes() and len(pieces) > 10
    assert all(piece.endswith(b"end\n") for piece in pieces[:-1])
    assert sorted(_documents(corpus.train) + _documents(corpus.held_out)) == sorted(pieces)


def test_a_folder_and_its_files_give_each_file_once_in_order(tmp_path):
    for name in ("b.txt", "a.jsonl", "sub/c.txt", "notes.md"):
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('{"text": "x"}\n')
    folder = tmp_path / "data"
    files = documents.find([str(folder), str(folder / "b.txt")]).items
    assert [Path(f).name for f in files] == ["a.jsonl", "b.txt", "c.txt"]


def test_a_folder_of_text_is_read_whole_and_says_what_it_skips(tmp_path):
    for name, content in {"readme.md": b"# x", "code/x.py": b"x = 1", "LICENSE": b"free", "a.json": b"{}",
                          "logo.png": b"\x89PNG\0", ".git/config": b"[core]"}.items():  # fmt: skip
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    sources = documents.find([str(tmp_path)])
    assert [Path(f).name for f in sources.items] == ["LICENSE", "a.json", "x.py", "readme.md"]
    assert len(sources.skipped) == 2
    assert "skipped 1 of 6 files (hidden)" in sources.skipped[0]
    assert "skipped 1 of 6 files (binary)" in sources.skipped[1]
    assert b"".join(documents.texts(sources, utf8=True)) == b"free{}x = 1# x"


def test_text_that_is_not_utf_8_is_refused_with_its_place_except_as_bytes(tmp_path):
    pytest.importorskip("tokenizers")
    path = tmp_path / "latin.txt"
    content = b"plain\n" * 10_000 + "Grüße aus Köln".encode("latin1")
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"latin\.txt: byte 60002 \(0xfc\) is not UTF-8; .*iconv.*--tokenizer bytes"):
        prepare([str(path)], "train:300", tmp_path / "cache")
    corpus = prepare([str(path)], "bytes", tmp_path / "cache")
    ids = np.concatenate([_ids(corpus.train), _ids(corpus.held_out)])
    assert ids[ids < 256].astype(np.uint8).tobytes() == content


def test_a_long_line_is_cut_but_not_inside_a_character(tmp_path):
    path = tmp_path / "one.txt"
    path.write_text("a" + "€😀" * 50_000, encoding="utf-8")
    pieces = list(documents.texts(documents.find([str(path)]), utf8=True))
    assert len(pieces) > 5 and b"".join(pieces) == path.read_bytes()
    assert max(map(len, pieces)) <= 2 * documents.PIECE + 3


def test_documents_are_lines_of_jsonl_and_rows_of_parquet(tmp_path):
    texts = [f"document {i} ü\n" for i in range(300)]
    (tmp_path / "x.jsonl").write_text("\n\n".join(json.dumps({"id": i, "text": t}) for i, t in enumerate(texts)))
    corpus = prepare([str(tmp_path / "x.jsonl")], "bytes", tmp_path / "cache")
    assert sorted(_documents(corpus.train) + _documents(corpus.held_out)) == sorted(t.encode() for t in texts)
    pyarrow = pytest.importorskip("pyarrow", reason="reading .parquet needs the extra diloco[parquet]")
    parquet = pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "x.parquet"
    parquet.write_table(pyarrow.table({"n": list(range(301)), "text": [*texts, None]}), file)
    assert list(documents.texts(documents.find([str(file)]))) == [t.encode() for t in texts]


def test_a_dataset_is_streamed_with_its_config_and_so_many_documents(tmp_path):
    pytest.importorskip("datasets", reason="hf:NAME needs the extra diloco[hf]")
    (tmp_path / "x.jsonl").write_text("\n".join(json.dumps({"text": f"row {i}"}) for i in range(50)))
    for spec, count in ((f"hf:{tmp_path}", 50), (f"hf:{tmp_path}:7", 7), (f"hf:{tmp_path}:default:9", 9)):
        assert list(documents.texts(documents.find([spec]))) == [f"row {i}".encode() for i in range(count)]
    with pytest.raises(ConfigError, match="check the name and the network"):
        list(documents.texts(documents.find([f"hf:{tmp_path}:other"])))


def test_a_corpus_of_one_document_has_its_last_twentieth_held_out(tmp_path):
    path = tmp_path / "x.jsonl"
    for text in ("a" * 999, "b" * 999, *(f"{i}" * 300 for i in range(40))):  # some of these hash into the held-out part
        path.write_text(json.dumps({"text": text}))
        corpus = prepare([str(path)], "bytes", tmp_path / "cache")
        whole = np.concatenate([_ids(corpus.train), _ids(corpus.held_out)])
        assert whole.tolist() == [*text.encode(), 256]
        assert len(_ids(corpus.held_out)) == round(len(whole) * 0.05)
        assert corpus.nbytes == len(_ids(corpus.train))


def test_a_trained_tokenizer_is_kept_with_the_corpus(tmp_path, book):
    pytest.importorskip("tokenizers")
    first = prepare([str(book)], "train:300", tmp_path / "cache")
    again = prepare([str(book)], "train:300", tmp_path / "cache")
    assert first.tokenizer.vocabulary == again.tokenizer.vocabulary == 300
    assert first.bytes_per_token > 1.5
    assert again.tokenizer.decode(_ids(again.train)[:20]).startswith("line 0")


def test_evaluation_takes_what_there_is(tmp_path, book):
    corpus = prepare([str(book)], "bytes", tmp_path / "cache")
    assert sum(len(x) for x, _ in corpus.evaluation(8, 10**9)) > 0.9 * len(_ids(corpus.held_out)) / 8
    assert [len(x) for x, _ in corpus.evaluation(8, 1)] == [1]


def test_a_prepared_corpus_is_found_and_a_changed_source_or_damaged_cache_is_prepared_again(tmp_path, book):
    first = prepare([str(book)], "bytes", tmp_path / "cache")
    written = first.train.stat().st_mtime_ns
    assert prepare([str(book)], "bytes", tmp_path / "cache").train.stat().st_mtime_ns == written
    before = book.stat().st_mtime_ns
    book.write_text(book.read_text().replace("line 5", "line ?"))
    os.utime(book, ns=(before, before + 1_000_000_000))  # of the same size: only the time of the change tells
    changed = prepare([str(book)], "bytes", tmp_path / "cache")
    assert changed.train != first.train and changed.sha256 != first.sha256
    content = changed.train.read_bytes()
    for damaged in (content[:-2], content + b"ab", None):  # as a cleaner of the cache may leave it
        changed.train.unlink() if damaged is None else changed.train.write_bytes(damaged)
        assert prepare([str(book)], "bytes", tmp_path / "cache").train.read_bytes() == content


def _prepare_at(barrier, book, cache, answers):
    barrier.wait()
    answers.put(prepare([str(book)], "bytes", cache).sha256)


@pytest.mark.slow
def test_processes_that_prepare_at_once_all_end_well(tmp_path, book):
    expected = prepare([str(book)], "bytes", tmp_path / "alone").sha256
    barrier, answers = context.Barrier(3), context.Queue()
    places = (barrier, book, tmp_path / "cache", answers)
    processes = [context.Process(target=_prepare_at, args=places) for _ in range(3)]
    for process in processes:
        process.start()
    assert [answers.get(timeout=150) for _ in processes] == [expected] * 3
    for process in processes:
        process.join()
    assert [p.exitcode for p in processes] == [0, 0, 0]
    assert len(list((tmp_path / "cache").iterdir())) == 1  # no temporary folder is left


BAD = {
    "x.png": b"a\0b", "none/x.png": b"a\0b", "empty.txt": b"", "good.txt": b"good " * 1000, "latin.txt": b"\xfc",
    "bad.jsonl": b'{"text": "a"}\n\n{"text": \n', "field.jsonl": b'{"content": "a"}', "list.jsonl": b"[1]",
    "latin.jsonl": b'{"text": "a"}\n{"text": "\xfc"}\n', "half.jsonl": b'{"text": "a"}\n{"text": "\\ud800"}\n',
    "no.parquet": b"no parquet at all",
}  # fmt: skip


@pytest.mark.parametrize(("names", "tokenizer", "text"), [
    (["nowhere.txt"], "bytes", "no such file or folder; check the path"),
    (["x.png"], "bytes", "a binary file"),
    (["none"], "bytes", r"the folder holds no text"),
    (["empty.txt"], "bytes", "the corpus is empty"),
    (["good.txt", "bad.jsonl"], "bytes", r"bad\.jsonl, line 3: not of the form .* fix or remove the line"),
    (["field.jsonl"], "bytes", r"field\.jsonl, line 1: not of the form"),
    (["list.jsonl"], "bytes", r"list\.jsonl, line 1: not of the form"),
    (["latin.jsonl"], "bytes", r"latin\.jsonl, line 2: not UTF-8"),
    (["half.jsonl"], "bytes", r"half\.jsonl, line 2: not UTF-8"),
    (["good.txt", "latin.txt"], "train:300", "byte 0 .* is not UTF-8"),
    (["no.parquet"], "bytes", 'column "text"'),
    (["good.txt", "body.parquet"], "bytes", r'body\.parquet.*column "text"'),
    (["binary.parquet"], "bytes", r'binary\.parquet.*column "text"'),
])  # fmt: skip
def test_bad_data_is_refused_with_the_remedy_also_by_a_dry_run(tmp_path, names, tokenizer, text):
    pyarrow = pytest.importorskip("pyarrow", reason="reading .parquet needs the extra diloco[parquet]")
    parquet = pytest.importorskip("pyarrow.parquet")
    pytest.importorskip("tokenizers")
    (tmp_path / "none").mkdir()
    for name, content in BAD.items():
        (tmp_path / name).write_bytes(content)
    parquet.write_table(pyarrow.table({"body": ["x"]}), tmp_path / "body.parquet")
    parquet.write_table(pyarrow.table({"text": [b"\xff"]}), tmp_path / "binary.parquet")
    data, cache = tuple(str(tmp_path / name) for name in names), tmp_path / "cache"
    with pytest.raises(ConfigError, match=text) as caught:
        prepare(data, tokenizer, cache)
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match=text):
        settings.check(TrainConfig(data=data, tokenizer=tokenizer, dry_run=True), 2)
    assert not cache.exists() or not list(cache.iterdir())  # nothing half done stays


def test_a_corpus_shorter_than_a_batch_or_a_window_is_refused(tmp_path):
    (tmp_path / "x.txt").write_text("short " * 100)
    corpus = prepare([str(tmp_path / "x.txt")], "bytes", tmp_path / "cache")
    with pytest.raises(ConfigError, match=r"4 windows of context 128, fewer than one batch of 8"):
        corpus.batches(0, 2, 4, 128, seed=0)
    with pytest.raises(ConfigError, match="30 tokens are held out, fewer than one window of context 128"):
        corpus.evaluation(128, 1000)


def test_a_cache_that_cannot_be_written_is_named(tmp_path, book):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot prepare the corpus: .*file.*XDG_CACHE_HOME"):
        prepare([str(book)], "bytes", tmp_path / "file" / "cache")


@pytest.mark.parametrize(
    ("module", "use", "text"),
    [
        ("datasets", lambda: prepare(["hf:x"], "bytes"), r"data='hf:x' needs datasets: pip install .*\[hf\]'"),
        ("pyarrow", lambda: prepare(["x.parquet"], "bytes"), r"x.parquet needs pyarrow: pip install .*\[parquet\]'"),
        ("tokenizers", lambda: prepare(["x.txt"], "train:300"), r"needs the tokenizers library: .*\[bpe\]'"),
        ("transformers", lambda: build("hf:x", 9, 9, seed=0), r"model='hf:x' needs transformers: .*\[hf\]'"),
        ("wandb", lambda: open_sinks(["wandb"], "run", {}, Path()), r"track=wandb is not installed: .*\[wandb\]'"),
    ],
)
def test_a_missing_library_is_named_with_its_extra(tmp_path, monkeypatch, module, use, text):
    (tmp_path / "x.parquet").touch()
    (tmp_path / "x.txt").write_text("text")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in (module, f"{module}.parquet"):
        monkeypatch.setitem(sys.modules, name, None)  # what `import` finds if it is not installed
    with pytest.raises(ConfigError, match=text):
        use()
