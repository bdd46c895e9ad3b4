"""The commands of docs/bucket.md about keys and encryption, as they stand there, with a folder instead of the store."""

import re
import shlex
from pathlib import Path

from tests.support.commands import SMALL, ended, run_here, start

PAGE = (Path(__file__).parents[2] / "docs/bucket.md").read_text()
SECTION = PAGE[PAGE.index("## Trust") : PAGE.index("## Guaranteed")]
BLOCKS = [block.splitlines() for block in re.findall(r"^```console\n(.*?)^```", SECTION, re.MULTILINE | re.DOTALL)]
MORE = [*SMALL, "--data", "corpus.txt", "--steps", "20"]


def run_block(place, lines):
    """Run the commands in their order; returns what each has printed."""
    public, said = {}, []
    for line in lines:
        words = shlex.split(line.removeprefix("$ "), comments=True)
        words = [public.get(word, word.replace("s3://my-bucket", "stores")) for word in words]
        if words[0] == "openssl":
            (place / words[-1]).write_text("0f" * 32)
            continue
        assert words.pop(0) == "diloco"
        if words[0] == "train":
            name = "-".join(words[words.index(flag) + 1].rpartition("/")[2] for flag in ("--bucket", "--member"))
            code, out, err = ended(start(place, *words, *MORE, "--name", name))
        else:
            code, out, err = run_here(place, *words)
        assert code == 0, (line, err)
        if words[:2] == ["keys", "new"]:
            public["ed25519:1111…" if not public else "ed25519:2222…"] = out.strip()
        said.append(out + err)
    return said


def test_the_commands_about_keys_found_a_run_add_a_member_and_strike_it_off(place):
    said = run_block(place, BLOCKS[0])
    assert len(said) == 7 and "created run" in said[1] and "lists office, from round" in said[3]
    assert said[4].count("ed25519:") == 3 and "joined run" in said[5] and "has struck off office" in said[6]
    code, _, err = run_here(place, "train", *MORE, "--bucket", "stores/run-2", "--member", "office", "--key-file",
                            "office.key", "--name", "again")  # fmt: skip
    assert code != 0 and "the run does not list 'office'" in err


def test_the_commands_about_encryption_train_and_watch(place):
    said = run_block(place, BLOCKS[1])
    assert "created run" in said[0] and "lab" in said[1]
    assert not any(b"protocol" in path.read_bytes() for path in (place / "stores/run-3").rglob("*") if path.is_file())
