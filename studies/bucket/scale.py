"""What a round costs a member as members become many. Run: python -m studies.bucket.scale

By the library's own protocol in virtual time (virtual.py): requests and bytes are counted, not estimated. Fragments
have few values, in as many pieces as a large one has; the bytes of values of a larger fragment follow from its layout,
and all other bytes are those that were counted. Results are kept after each row; a row that is there is not measured
again.
"""

import argparse
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import diloco.bucket.rounds as rounds_
from benchmarks.record import Target, insert, read, table, write
from diloco.bucket import members as members_
from diloco.bucket import round_store
from diloco.bucket.rounds import layout_of
from diloco.bucket.snapshots import EVERY, STRIDE
from diloco.bucket.store.envelope import Envelope, Opened
from diloco.codecs.codec import E3M0
from diloco.plan.costs import PRICES
from studies.bucket.virtual import Plan, World, crowd

RESULTS = Path(__file__).parent / "scale.json"
PAGES = (Path(__file__).parent / "README.md", Path(__file__).parents[2] / "docs/bucket.md")
VALUES, LEAST = 1 << 16, 2 << 10
"""Of a fragment in virtual time, and the fewest bytes of one of its pieces: 16 pieces, as a fragment of 42 M has."""
MODEL, FRAGMENTS, SYNC_EVERY = 1e9, 24, 100
LARGE = int(MODEL) // FRAGMENTS
MEMBERS, MODELS = (4, 16, 64, 256, 1024), (8, 64, 512)


def measure(members: int, fragments: int, sync_every: int, rounds: int) -> dict[str, Any]:
    """Requests, bytes and milliseconds of CPU of a member, for each round of a fragment; heartbeats by the minute.
    The CPU is that of the whole simulation."""
    plan = Plan(members, fragments, VALUES, LARGE, sync_every)
    seen: list[tuple[Any, ...]] = []
    _saved.clear()
    for world in crowd(plan, rounds):
        seen.append((world, _totals(world), sum(s.index for m in world.members for s in m.states), world.now,
                     time.process_time() + sum(_saved)))  # fmt: skip
        print(time.strftime("%H:%M:%S"), members, "members, round", world.members[0].states[0].index, flush=True)
    (_, *began), (world, *after) = seen[0], seen[-1]
    done, cpu = after[1] - began[1], after[3] - began[3]
    minutes = members * (after[2] - began[2]) / 60
    counted = after[0] - began[0]
    taken = [outcome for member in world.members for _, outcome in member.rounds]
    rows = {f"{what} {kind}": n / (minutes if kind == "life" else done) for (what, kind), n in counted.items()}
    return {
        "members": members, "fragments": fragments, "sync_every": sync_every, "values": VALUES,
        "members of a round": sum(len(outcome.members) for outcome in taken) / len(taken), "cpu ms": 1e3 * cpu / done,
        **rows,
    }  # fmt: skip


def _totals(world: World) -> Counter[Any]:
    return sum((m.count for m in world.members), Counter[Any]())


def values_moved(n: int, members: int) -> tuple[float, float]:
    """Bytes of encoded values that a member sends and receives: its delta and its part of the shares; a piece of all
    other deltas, and all other shares."""
    nbytes = layout_of(E3M0(), n).nbytes
    return nbytes * (1 + 1 / members), nbytes * 2 * (members - 1) / members


def snapshots(n: int, outer: int, members: int) -> float:
    """Bytes that a member puts for snapshots of n values and their outer state, for each round."""
    rounds = -(-2 * EVERY // max(members, 2) // STRIDE) * STRIDE
    return 4 * (n + outer) / rounds / members


def moved(row: dict[str, Any], n: int, outer: int) -> tuple[float, float]:
    """Bytes up and down of a round of n values and their outer state, with everything but heartbeats."""
    members = row["members"]
    (up, down), large = values_moved(row["values"], members), values_moved(n, members)
    up = large[0] + snapshots(n, outer, members) + row["up values"] - up + row["up beside"]
    beside = row["down values"] - down + row["down beside"] + row.get("listed beside", 0.0)
    return up, large[1] + beside


def moved_of_large(row: dict[str, Any]) -> tuple[float, float]:
    """The same of a fragment of the model, with an outer state as large as the anchor."""
    return moved(row, LARGE, LARGE)


def bound(n: int, members: int) -> float:
    """What an all-reduce of 4 bits a value moves each way."""
    return 2 * (members - 1) / members * n / 2


def requests(row: dict[str, Any], what: str) -> float:
    """Of a member and round."""
    return row.get(f"{what} values", 0.0) + row.get(f"{what} beside", 0.0)


def day(row: dict[str, Any], listed: tuple[float, float], store: str) -> dict[str, float]:
    """What a member of a model of 1B moves and pays in a day."""
    prices = PRICES[store]
    rounds, minutes = 86_400 / SYNC_EVERY * FRAGMENTS, 1440
    lists, answers = listed
    up, down = (rounds * each for each in moved_of_large({**row, "listed beside": answers}))
    up, down = up + minutes * row["up life"], down + minutes * (row["down life"] + row["listed life"])
    puts = rounds * (requests(row, "PUT") + lists) + minutes * (row["PUT life"] + row["LIST life"])
    gets = rounds * (requests(row, "GET") + requests(row, "HEAD")) + minutes * row["GET life"]
    requested = (puts * prices.puts + gets * prices.gets) / 1e6
    return {"up": up, "down": down, "requests": requested, "egress": down / 1e9 * prices.gigabyte}


def rounds(values: dict[str, Any]) -> str:
    """What a member asks and moves for one round of a fragment."""
    rows = [
        (f"{m:,}", f"{moved_of_large(r)[0] / LARGE:.2f}, {moved_of_large(r)[1] / LARGE:.2f}",
         f"{max(moved_of_large(r)) / bound(LARGE, m):.2f}", f"{requests(r, 'GET') + requests(r, 'HEAD'):.0f}",
         f"{requests(r, 'PUT'):.1f}", f"{r['LIST beside']:.1f}", f"{r['GET life']:.0f}", f"{r['cpu ms']:.0f} ms")
        for m in MEMBERS if (r := values.get(f"{m} members"))
    ]  # fmt: skip
    head = ("members", "bytes a value: up, down", "÷ an all-reduce", "GET, HEAD", "PUT", "LIST",
            "GET for heartbeats, a minute", "CPU")  # fmt: skip
    return table(head, rows)


def costs(values: dict[str, Any]) -> str:
    """What a member of a model of 1B moves and pays in a day."""
    rows = []
    for m in MODELS:
        if (row := values.get(f"{m} members")) and (listed := _listed(values, m)) is not None:
            s3, r2 = day(row, listed, "S3"), day(row, listed, "R2")
            dollars = s3["requests"], s3["egress"], s3["requests"] + s3["egress"], r2["requests"]
            gigabytes = f"{s3['up'] / 1e9:.0f}, {s3['down'] / 1e9:.0f} GB"
            rows.append((f"{m}", gigabytes, *(f"${each:.2f}" for each in dollars)))
    return table(("members", "up, down", "requests, S3", "egress, S3", "together, S3", "together, R2"), rows)


def _listed(values: dict[str, Any], members: int) -> tuple[float, float] | None:
    """Answers to LISTs, and their bytes, for each round of a fragment, where 24 fragments share them. What
    is listed grows with the members, and an answer has at most 1,000 names."""
    names = [f"{m} members, {FRAGMENTS} fragments" for m in (members, 64, 8)]
    row = next((values[name] for name in names if name in values), None)
    if row is None:
        return None
    more = members / row["members"]
    return row["LIST beside"] * more, row["listed beside"] * more


def targets(values: dict[str, Any]) -> list[Target]:
    found = {m: values[f"{m} members"] for m in MEMBERS if f"{m} members" in values}
    out = [
        Target(f"{m} members: bytes ÷ an all-reduce of 4 bits", max(moved_of_large(r)) / bound(LARGE, m), at_most=1.3)
        for m, r in found.items()
    ]
    if 4 in found and max(found) > 4:
        for what in ("GET", "LIST"):
            ratio = requests(found[max(found)], what) / requests(found[4], what)
            out.append(
                Target(f"{what} of a round, {max(found)} members ÷ 4", ratio, at_most=max(found).bit_length() / 3)
            )
    costs = []
    for m in (8, 64):
        if (row := values.get(f"{m} members")) and (listed := _listed(values, m)) is not None:
            paid = day(row, listed, "S3")
            costs.append(paid["requests"] + paid["egress"])
    if len(costs) == 2:
        out.append(Target("a member's cost, 64 members ÷ 8", costs[1] / costs[0], at_most=2.0))
    return out


def main() -> None:
    parser = argparse.ArgumentParser(prog="studies.bucket.scale", description="what a round costs as members are many")
    parser.add_argument("--only", nargs="+", default=None, metavar="ROW", help="rows to measure again, as '64 members'")
    arguments = parser.parse_args()
    rounds_.LEAST = LEAST
    remember_heads()
    remember_lives()
    values: dict[str, Any] = (read(RESULTS) or {"values": {}})["values"]
    rows: dict[str, tuple[Any, ...]] = {  # of a thousand members, who averages reads for 20 s
        f"{m} members": (m, 1, 20 if m < 500 else 40, 4 if m < 100 else 2) for m in sorted({*MEMBERS, *MODELS})
    }
    rows |= {f"{m} members, {FRAGMENTS} fragments": (m, FRAGMENTS, SYNC_EVERY, 3) for m in (8, 64)}
    for name, plan in rows.items():
        if name in (arguments.only or (name for name in rows if name not in values)):
            found = measure(*plan)
            values = (read(RESULTS) or {"values": {}})["values"] | {name: found}
            write(RESULTS, {"model": MODEL, "fragments": FRAGMENTS, "sync_every": SYNC_EVERY, "step": 1.0}, values,
                  targets(values), quiet=True)  # fmt: skip
            print(name, json.dumps(values[name]), flush=True)
    print(*targets(values), sep="\n")
    for path, tables in zip(PAGES, ({"rounds": rounds(values)}, {"costs": costs(values)}), strict=True):
        path.write_text(insert(path.read_text(), tables))


_saved: list[float] = []
"""Seconds of CPU of what was done once for all members."""


def remember_heads() -> None:
    """All members check the same heads of a record. Here three do, and the least time is counted for each other one."""
    real, known = round_store.read_heads, dict[str, tuple[Any, list[float]]]()

    def read_heads(found: Any, envelope: Any, record: Any, layout: Any) -> Any:
        if len(known) > 64:
            known.clear()
        heads, seconds = known.get(record.digest, (None, []))
        if len(seconds) == 3:
            _saved.append(min(seconds))
            return heads
        began = time.process_time()
        heads = real(found, envelope, record, layout)
        known[record.digest] = heads, [*seconds, time.process_time() - began]
        return heads

    round_store.read_heads = read_heads


def remember_lives() -> None:
    """Heartbeats are the same for all, too. Their time is not counted."""
    real_open, real_read = Envelope.open, members_.read_member
    opened, lives = dict[bytes, Opened](), dict[str, members_.Member]()

    def open_(self: Envelope, name: str, kind: str, data: Any, size: int | None, *, head: bool = False) -> Opened:
        if kind != "member":
            return real_open(self, name, kind, data, size, head=head)
        if data not in opened:
            if len(opened) > 20_000:
                opened.clear()
                lives.clear()
            opened[data] = real_open(self, name, kind, data, size)
        return opened[data]

    def read_member(found: Opened) -> members_.Member:
        if found.digest not in lives:
            lives[found.digest] = real_read(found)
        return lives[found.digest]

    Envelope.open, members_.read_member = open_, read_member


if __name__ == "__main__":
    main()
