"""Write docs/benchmarks.md from what was measured. Run: python -m benchmarks.table

A benchmark or a study is one section: a function that turns its record into Markdown, and a row in SECTIONS.
"""

from collections.abc import Callable
from pathlib import Path

from benchmarks.record import RESULTS, Record, Target, read, table
from studies.autopilot.section import section as autopilot
from studies.bucket.section import chaos, restarts
from studies.bucket.section import section as bucket
from studies.netlab.plot import draw
from studies.netlab.section import section as netlab

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "benchmarks.md"
STUDIES = ROOT / "studies"

HEAD = """# Benchmarks

This page is generated. Its figures come from `benchmarks/results/*.json`, which `make bench` measures, and from
`studies/*/*.json`, which `make netlab`, `make autopilot`, `make bucket` and `make chaos` measure.
Two times are compared only if they were measured in turn within one run, because the speed of a machine changes from
hour to hour. A speed in GB/s or ms alone is for orientation.
"""


def main() -> None:
    text = HEAD
    for path, title, section in SECTIONS:
        record = read(path)
        text += f"\n## {title}\n\n{SINCE.get(path, '')}"
        if record is None:
            text += f"Not measured: there is no `{path.relative_to(ROOT)}`.\n"
        else:
            text += f"{section(record).strip()}\n\n{targets(record)}\n{MISSED.get(path, '')}{machine(record)}\n"
    PAGE.parent.mkdir(exist_ok=True)
    if (record := read(NETLAB)) is not None:
        draw(record, PAGE.parent / "netlab.svg")
    PAGE.write_text(text)
    print(f"wrote {PAGE.name}")


def codec(record: Record) -> str:
    settings = record["settings"]
    columns = ("codec", "bits a value", "encode", "decode", "decode to new memory", "next state", "error", "cosine")
    rows = [
        (
            name,
            f"{found['bits']:.2f}",
            *(f"{found[f'{way}_ratio']:.2f} × ({found[f'{way}_gbyte_s']:.1f} GB/s)" for way in ("encode", "decode")),
            f"{found['fresh_ratio']:.2f} × ({found['fresh_gbyte_s']:.1f} GB/s)",
            f"{1 / found['next_ratio']:.1f} times a copy",
            f"{found['relative_error']:.2g}",
            f"{found['cosine']:.5f}",
        )
        for name, found in record["values"].items()
    ]
    return f"""
`python -m benchmarks.codec`: {settings["values"]:,} Gaussian values on one core. Speed is relative to a copy of the
same fp32 tensor into warm memory, timed in turn with it (median of {settings["repetitions"]} repetitions). Decoding
goes to warm memory too, as in a round; into newly allocated memory it also pays for the pages. "Next state" is all that
the communication thread does with the deltas of two replicas: decode both, mean, Nesterov, fingerprint.

{table(columns, rows)}"""


def reduce(record: Record) -> str:
    settings, values = record["settings"], record["values"]
    link = settings["link"]
    times = [
        (
            f"{rate} Mbit/s" if rate.isdigit() else rate,
            f"{found['e3m0_seconds']:.3f} s",
            f"{found['e3m0_seconds'] / found['bound']:.2f} ×" if "bound" in found else "",
            f"{found['fp32_seconds']:.3f} s",
            f"{found['ratio']:.1f}",
        )
        for rate, found in values["seconds"].items()
    ]
    columns = ("replicas", "bound, bytes a parameter", "payload", "sent, with TCP", "received, with TCP", "sent again")
    rows = [
        (
            str(m),
            f"{found['bound_bytes_per_parameter']:g}",
            *(f"{found[key]:.3f} ×" for key in ("payload", "tx", "rx")),
            f"{found['retransmitted_segments']} segments",
        )
        for m, found in ((m, values[f"bytes_{m}"]) for m in (2, 4))
    ]
    return f"""
`python -m benchmarks.reduce`, as root: replicas in network namespaces of their own, gloo over virtual Ethernet (MTU
{settings["mtu"]}), each sending at most {link["mbit"]:g} Mbit/s (`tc tbf`, burst {link["burst_kbyte"]} kB, latency
{link["latency_ms"]} ms; no delay is added). Bytes are those of a fragment of {settings["fragment"]:,} parameters with
{settings["codec"]}, per round and replica, in units of the bound 2(M−1)/M · 4 bits; "with TCP" is what the kernel
counted on the interface, Ethernet headers and acknowledgements included.

{table(columns, rows)}

A 4-bit mean of {settings["parameters"]:,} parameters between 2 replicas, and gloo's fp32 `all_reduce` of the same
number (median of {settings["repetitions"]} repetitions, in turn; the kernel hands over many segments at once). The
bound is the payload over the rate; headers add 4.6 % to it:

{table(("link", "4-bit mean", "times the bound", "fp32 all_reduce", "times as long"), times)}"""


def overhead(record: Record) -> str:
    settings, speed, memory = record["settings"], record["values"]["speed"], record["values"]["memory"]
    low, high = speed["interval"]
    cpu, larger = speed["cpu_ns"], ""
    if "cpu_ns" in memory:
        size = memory["parameters"] // settings["fragments"]
        larger = f"""
A round also has a cost that does not depend on its size: with fragments of {size:,} parameters the first two
together take {memory["cpu_ns"]:.1f} ns. Most of that is memory, which the two processes share: the hook reads and
writes 20 bytes a parameter, encoding reads 4, the next state reads and writes 17. The rest is handing bytes to the
kernel."""
    peaks = [
        ("joining, where the weights differ", f"{memory['join_mb']:.0f} MB", ""),
        ("during rounds", f"{memory['rounds_mb']:.0f} MB", f"{memory['rounds_allowed_mb']:.0f} MB"),
        ("in `finish()`", f"{memory['finish_mb']:.0f} MB", f"{memory['finish_allowed_mb']:.0f} MB"),
    ]
    return f"""
`python -m benchmarks.overhead`: two processes with one core each, shared by training, communication thread and gloo,
over loopback; {speed["parameters"]:,} parameters, {settings["fragments"]} fragments, sync_every
{settings["sync_every"]}, overlap {settings["overlap"]}, {settings["codec"]}, steps of {speed["step_ms"]:.0f} ms. Blocks
of one sync_every with DiLoCo and without alternate (ABBA, {settings["pairs"]} pairs).

With DiLoCo the two make {speed["ratio"]:.4f} of the steps per second they make without (median over pairs; 95 %
bootstrap interval {low:.4f} to {high:.4f}). Training waited {speed["waited_ms_per_round"]:.1f} ms a round for its
result. CPU time a parameter and round: {cpu["hook"]:.1f} ns on the training thread, {cpu["thread"]:.1f} ns on the
communication thread, {cpu["gloo"]:.1f} ns in gloo's threads.{larger}

Memory on {memory["parameters"]:,} parameters, peak of resident bytes above what was there before (freed heap given
back to the system before the first reading), the larger of both processes. Allowed are 8 bytes a parameter, 20 for
each in flight (one fragment during rounds, all in `finish()`), and 32 MB:

{table(("peak", "measured", "allowed"), peaks)}"""


def accelerator(record: Record) -> str:
    settings = record["settings"]
    columns = ("link", "settings", "planned", "measured", "waiting", "hook a step", "longest", "hook, times its bound")
    rows = [
        (
            f"{name.split()[0]} Gbit/s",
            f"{name.split()[1]}: sync_every {found['sync_every']}, {found['fragments']}, overlap {found['overlap']}",
            f"{found['planned']:.1%}",
            f"{found['measured']:.1%}",
            f"{found['waited']:.1%}",
            f"{1000 * found['hook_seconds']:.1f} ms",
            f"{1000 * found['longest_hook_seconds']:.0f} ms",
            f"{found['hook_over_passes']:.2f}",
        )
        for name, found in record["values"].items()
    ]
    return f"""
`python -m benchmarks.accelerator`, as root: as if an accelerator trained. Two processes with one core each, in network
namespaces; a step is a pause of {settings["step_seconds"]:g} s. {settings["parameters"]:,} parameters in
24 layers in the memory of the host, E3M0. The hook is what DiLoCo takes from the training thread without waiting; its
bound is the time of the passes over the memory that a CPU cannot avoid (read local and anchor, write the delta; read
the anchor, write local), measured in the same processes. "Waiting" is the share of the time.

{table(columns, rows)}"""


def trainer(record: Record) -> str:
    settings, values = record["settings"], record["values"]
    return f"""
`python -m benchmarks.trainer`: `diloco train --method local` against a bare PyTorch loop with the same model
({settings["model"]}, {settings["batch"]} × {settings["context"]} tokens a step), one process on one core, blocks of
{settings["steps"]} steps in turn (ABBA, {settings["pairs"]} pairs). The trainer makes {values["ratio"]:.3f} of the bare
loop's tokens per second (median over pairs); its logging is in the time."""


def start(record: Record) -> str:
    named = {
        "python": "`python -c pass`, to compare",
        "import": "`python -c 'import diloco'`",
        "help": "`diloco --help`",
        "fleet": f"`diloco {record['settings']['fleet']}`: a million chips, 30 days, ten simulations",
    }
    rows = [
        (text, *(f"{record['values'][name][key]:.3f} s" for key in ("median", "least"))) for name, text in named.items()
    ]
    return f"""
`python -m benchmarks.start`: fresh interpreters, from start to end, in turns: {record["values"]["import"]["times"]} of
each kind, {record["values"]["fleet"]["times"]} for the fleet.

{table(("what", "median", "least"), rows)}"""


NETLAB = STUDIES / "netlab/results.json"
BUCKET = STUDIES / "bucket/results.json"
RESTARTS = STUDIES / "bucket/restarts.json"

SECTIONS: tuple[tuple[Path, str, Callable[[Record], str]], ...] = (
    (RESULTS / "codec.json", "Codecs: speed and loss", codec),
    (RESULTS / "reduce.json", "A round: bytes and seconds", reduce),
    (RESULTS / "overhead.json", "What training pays", overhead),
    (RESULTS / "accelerator.json", "As if an accelerator trained", accelerator),
    (RESULTS / "trainer.json", "The trainer against a bare loop", trainer),
    (RESULTS / "start.json", "How soon it answers", start),
    (NETLAB, "The network lab: utilisation over a slow link", netlab),
    (STUDIES / "autopilot/results.json", "The autopilot", autopilot),
    (BUCKET, "The bucket: members come and go", bucket),
    (RESTARTS, "Restarts", restarts),
    (STUDIES / "bucket/chaos.json", "Chaos", chaos),
)

SINCE = {
    BUCKET: """\
Since all figures but those of traffic, outage, loss and carrying were measured, the training thread comes before the
others at the bucket's lock, two members put snapshots less often, and a store that does not answer is asked twice as
often.

""",
}
"""What changed under the figures of a section since they were measured. Remove the entry of what is measured again."""

MISSED = {
    RESULTS / "reduce.json": """
What is missed: at 100 Mbit/s the same bytes take 1.075 times the bound through a bare TCP socket, headers included. The
rest is the exchange of headers before a round, the first piece, which is encoded before anything travels, and the last
one, which is decoded after all has come.
""",
    RESULTS / "overhead.json": """
What is missed: hook and thread read the weights and the anchors, write the delta, encode it, and make and write the
next state. These passes over memory alone took about 2.9 ns a parameter on a machine where a copy takes 0.6, and
handing the bytes to the kernel 0.4. The smaller the model, the more of its figure is what a round costs at any size. An
earlier run had 6.6 and 3.6. All three kinds of threads, also gloo's, took 27 % more in this one: the machine's memory
is not always equally quick.
""",
    RESULTS / "accelerator.json": """
What is missed: with the given settings at 1 Gbit/s an earlier run was 3.1 points from the plan, and waited for 1.7 % of
the time. Why this one waited longer was not found out.
""",
    STUDIES / "bucket/chaos.json": """
What is missed: nine hooks of a thousand events took more than 50 ms, and they wait for a core. The five longest, 118 to
166 ms, had none for 113 to 158 ms of that, and ran for 0.3 to 9 ms. In the other four, up to 90 ms, it was the training
thread or another thread of its process, which had the interpreter or the lock, that had no core; one ran for 31 ms. The
members leave the two cores idle for 62 % of the time, but the machine's host takes 4 % of them, at its own times; what
it takes from a thread that runs counts as that thread's processor time. A lower priority for the bucket's own threads
was tried, on busy cores: the longest hook took 366 ms instead of 134, because the thread that has the interpreter then
waits for a core. Where two members have a core each, the survivor's longest hook at a kill takes 14 ms
([above](#the-bucket-members-come-and-go)). Over S3, keys with an empty segment were deleted again after 1 to 5 s: while
they lie there, listing takes more requests, and an earlier way of listing past them made joins take 10 s.
""",
}
"""Why targets of a section are not met. Remove the entry of what is met."""


def targets(record: Record) -> str:
    found = [Target(**target) for target in record["targets"]]
    rows = [(t.what, t.bound, f"{t.measured:.4g}", "yes" if t.met else "**no**") for t in found]
    return table(("target", "bound", "measured", "met"), rows)


def machine(record: Record) -> str:
    made = record["machine"]
    return f"\n{made['cpu']}, {made['cores']} cores, {made['system']}, Python {made['python']}, torch {made['torch']}."


if __name__ == "__main__":
    main()
