"""The bucket's part of docs/benchmarks.md, and that of the chaos."""

from benchmarks.record import Record, fill, table


def section(record: Record) -> str:
    settings, values = record["settings"], record["values"]
    head = f"""`make bucket`, as root for the slow link: members as processes on one machine. Where nothing else is
    said, a step is a pause of {1000 * settings["step"]:.0f} ms, as if an accelerator worked, and a change of
    {settings["parameters"]:,} parameters in {settings["fragments"]} fragments with sync_every
    {settings["sync_every"]}."""
    parts = {"folder": _folder, "kill": _kill, "link": _link, "outage": _outage, "loss": _loss, "carrying": _carrying}
    needs = {"folder": ("traffic", "utilisation", "slow", "join")}
    told = [tell(values) for name, tell in parts.items() if all(n in values for n in needs.get(name, (name,)))]
    return "\n\n".join([fill(head), *told])


def _folder(values: Record) -> str:
    traffic, busy, slow, join = (values[name] for name in ("traffic", "utilisation", "slow", "join"))
    return fill(f"""**Over a folder.** 100 rounds of two members with fragments of a million parameters moved
    {traffic["bytes"] / 1e6:.0f} MB in {traffic["requests"]:,} requests, {traffic["ratio"]:.3f} × the deltas alone:
    records, heartbeats, lists and the first snapshots are in it, which both put, because they began together. 200
    rounds, with the snapshots of round 112: {traffic["long"]["ratio"]:.3f} ×. Two members make
    {busy["ratio"]:.3f} of the steps per second without sync; {100 * busy["rounds_with_all"]:.0f} % of the rounds have
    both, one every {busy["steps_a_round"]:.3f} × sync_every. Beside a third at a tenth of their speed they make
    {slow["ratio"]:.3f} of their steps; {slow["counted"]} of the {slow["rounds"]} rounds that the slow one saw count it.
    While a third joins (4,000,000 parameters, {join["seconds"]:.1f} s) the others make {join["ratio"]:.3f} of their
    steps, over {join["window"]} s.""")


def _kill(values: Record) -> str:
    found = values["kill"]
    rows = [
        (name, *(f"{each['stall']:.2f} s" for each in found[kind]), f"{1000 * found[kind][0]['usual']:.0f} ms")
        for kind, name in (("bucket", "the bucket"), ("torchft", "torchft 0.2.0"))
        if kind in found
    ]
    columns = ("", *(f"kill {i + 1}" for i in range(len(found["bucket"]))), "usual step")
    text = fill(f"""**A kill.** Two replicas train the network lab's decoder, sync_every
    {found["settings"]["sync_every"]}, {found["settings"]["fragments"]} fragments, each on a core; one is ended by
    `kill -9`. The longest step of the other, beyond its usual one, in turn:""")
    return f"{text}\n\n{table(columns, rows)}"


def _link(values: Record) -> str:
    found = values["link"]
    rows = [
        (f"{r['multiple']:g} × ({r['mbit']:g} Mbit/s)", f"{100 * r['collective']:.1f} %", f"{100 * r['bucket']:.1f} %",
         f"{r['steps_a_round']:.1f}", f"{100 * r['rounds_with_all']:.0f} %", f"{1000 * r['server_cpu_round']:.0f} ms")
        for r in found["rates"]
    ]  # fmt: skip
    columns = ("link", "collective", "bucket", "steps a round", "rounds with both", "server's CPU a round")
    settings = found["settings"]
    text = fill(f"""**Over a slow link.** Two members and an S3 server (moto), each in a network namespace of its own;
    {settings["parameters"]:,} parameters, {settings["fragments"]} fragments, sync_every {settings["sync_every"]},
    overlap {settings["overlap"]}; rates in multiples of what 4 bits a parameter need. A delta goes up and then down,
    so a round takes longer than with the collective reducer; the training thread does not wait for it:""")
    return f"{text}\n\n{table(columns, rows)}"


def _outage(values: Record) -> str:
    found = values["outage"]
    return fill(f"""**The server is gone** for {found["seconds"]:.0f} s: meanwhile two members make {found["rate"]:.3f}
    of their steps per second, and the longest call of the hook takes {1000 * found["longest_hook"]:.0f} ms. Rounds held
    before, meanwhile and in the 20 s after: {found["rounds_before"][0]}, {found["rounds_meanwhile"][0]} and
    {found["rounds_after"][0]}; the first new one was applied {max(found["first_round_after"]):.1f} s after its
    return.""")


def _loss(values: Record) -> str:
    found = values["loss"]
    pairs = ", ".join(f"{b:.3f} ({a:.3f})" for a, b in found["pairs"])
    return fill(f"""**Loss.** `diloco train` with two members of a bucket, and with the collective reducer in brackets,
    for {len(found["pairs"])} seeds: {pairs}. In the mean {found["ratio"]:.4f} × (standard error
    {found["error"]:.4f}).""")


def _carrying(values: Record) -> str:
    found = values["carrying"]
    arms = {"alone": "two fast members alone", "carried": "with the slow one, carrying",
            "given up": "with the slow one, late work given up"}  # fmt: skip
    rows = [
        (title, ", ".join(f"{x:.3f}" for x in each["losses"]), f"{each['ratio']:.4f}", f"{100 * each['share']:.1f} %",
         "–" if arm == "alone" else "{} of {}".format(*each["counted"]))
        for arm, title in arms.items()
        for each in [found[arm]]
    ]  # fmt: skip
    settings = found["settings"]
    text = fill(f"""**What carrying does.** Two members make {settings["ticks"]} steps, a third a
    {settings["slower"]}th of them; a small decoder, sync_every {settings["sync_every"]}, in one process with a clock
    of its own, so that only the arms differ:""")
    columns = ("", "loss, by seed", "÷ alone", "the slow one's weight", "rounds that count it")
    tail = fill("""Carried or given up, the late work makes no difference that three seeds could show. Both are above
    the first arm, by more in one seed than in the others; rounds that wait for the slow one are applied later, and
    whether that is the reason was not found out.""")
    return f"{text}\n\n{table(columns, rows)}\n\n{tail}"


def restarts(record: Record) -> str:
    found, plain = record["values"]["disturbed"], record["values"]["undisturbed"]
    events = ", ".join(f"{count} × {kind}" for kind, count in sorted(found["events"].items()))
    return fill(f"""`python -m studies.bucket.restarts`: four members that run `diloco train` over a folder, disturbed
    {sum(found["events"].values())} times
    ({events}); all were killed at once in the middle. {found["rounds"]} rounds were closed, with
    {found["members a round"]:.2f} members on average; the longest time without one, while any member trained, was
    {found["longest without a round"]:.1f} s. {found["states compared"]} states were compared by fingerprint. The loss
    of the anchors is {found["losses"][0]:.3f}, that of the undisturbed run with the same number of tokens
    {plain["losses"][0]:.3f}: with four members at a time, the same tokens make fewer steps.""")


def chaos(record: Record) -> str:
    """One paragraph for each medium."""
    told = []
    for kind, found in record["values"].items():
        events = ", ".join(f"{count} × {what}" for what, count in sorted(found["events"].items()))
        joins, restarts = found["joins while nothing else was wrong"], found["restarts of all"]
        where = "a folder" if kind == "folder" else "an S3 server"
        told.append(
            fill(f"""**Over {where}**, {sum(found["events"].values())} events in {found["seconds"] / 60:.0f}
        minutes ({events}); {found["starts"]} starts, {found["of these"]["clock off by an hour"]} of them with a clock
        that is off by an hour. {found["records"]:,} rounds were closed, with {found["members a record"]:.2f} members on
        average; {found["states compared"]:,} states were compared. Joins took {joins["median"]:.1f} s in the median and
        {joins["90 %"]:.1f} s in nine of ten cases while nothing else was wrong, up to {found["joins"]["most"]:.0f} s
        with the store failing. After all had been killed at once ({restarts["count"]} times), the first had joined
        again after {restarts["median"]:.1f} s (median). The hook, from where the optimizer's own step ends, took at
        most {1000 * found["longest hook"]:.0f} ms of the training thread; in the first step of a member that returns,
        where it takes the rounds that were closed meanwhile, {found["longest first hook"]:.1f} s. The loss fell from
        {found["loss at first"]:.3f} to {found["loss at last"]:.3f}; in the end all joined, closed rounds and left
        within {found["seconds to the end"]:.0f} s.""")
        )
    head = fill("""`make chaos`: real processes that train a small regression, disturbed in every way; a witness follows
    the records past all faults. A time without a round counts while some member has joined and is not stopped, and the
    store takes puts.""")
    return "\n\n".join([head, *told])
