"""What the figures of the parity study mean, in words. Figures, and the words that hang on them, come from the
results."""

from math import ceil, inf, nan

from studies.parity.cell import STEPS
from studies.parity.claims import bars, cosines, percent
from studies.parity.paired import FEW, MANY, compared, curve, judged, noise
from studies.parity.results import Results
from studies.parity.rows import BASE, DILOCO, DP, NAMED, NARROW, ROWS, STREAMING, WIDE, WIDTH, WIDTHS, at_width
from studies.parity.run import CURVE_EVERY
from studies.parity.spread import Spread, student
from studies.parity.tuning import tuned

ROUNDS = STEPS // BASE.sync_every
POWER = 1.28
"""Two runs that are equal in truth are seen inside a bar in four of five studies, if chance stays within this many
standard deviations of their mean."""


class Gaps:
    """Comparisons by the names of their rows."""

    def __init__(self, results: Results) -> None:
        self.results = results

    def spread(self, row: str, against: str = STREAMING, what: str = "final", of: str = "final") -> Spread | None:
        return compared(NAMED[row], NAMED[against], self.results, what, of)

    def __call__(self, row: str, against: str = STREAMING, what: str = "final", of: str = "final") -> str:
        return percent(self.spread(row, against, what, of))


def summary(results: Results) -> str:
    gap = Gaps(results)
    narrow, usual, wide = (gap(at_width(w, STREAMING), at_width(w, DP)) for w in WIDTHS)
    beside = gap.spread(STREAMING, DILOCO)
    return f"""
In short, for two replicas with overlap 1 and 4 bits (E3M0), in runs of {ROUNDS} rounds, at equal bytes and batch; gaps
are in percent of the loss, and above 0 is worse:

- Against data-parallel: {narrow} at width {NARROW}, {usual} at width {WIDTH}, {wide} at width {WIDE}; with an inner lr
  of its own at width {WIDTH} {gap("inner lr tuned too", DP)}. The bar of 1 % is {_verdicts(results)}. The paper has
  0.6 % at 35M parameters, a hundred times the largest of these.
- Against DiLoCo, which sends all at once in fp32 and waits for it: {gap(STREAMING, DILOCO)}. What streaming, overlap
  and 4 bits cost together is at most {beside.high if beside else inf:.1f} %; DiLoCo itself is at {gap(DILOCO, DP)}
  against data-parallel.
- fp32 on the wire instead of 4 bits: {gap("fp32 on the wire")}; overlap 5 instead of 1: {gap("overlap 5")}; random
  zeroing of the same number of bits, with an outer lr of its own: {gap("random zeroing")}.
- Outer momentum 0.9, as in all published runs, instead of 0.5: {gap("outer momentum 0.9")}.
- 4 replicas: {gap("M = 4", DP)} against data-parallel; 8 replicas: {gap("M = 8", DP)}.

{_seeds(results)} `make parity` goes on where the study was stopped.
"""


def _verdicts(results: Results) -> str:
    found = [bar.verdict.strip("*") for bar in bars(results)[: len(WIDTHS)]]
    if len(set(found)) == 1:
        return f"{found[0]} at all three"
    return ", ".join(f"{verdict} at width {w}" for verdict, w in zip(found, (WIDE, WIDTH, NARROW), strict=True))


def _seeds(results: Results) -> str:
    headline, others = ([len(judged(row, results)) for row in ROWS if row.headline is kind] for kind in (True, False))
    return f"Headline rows have {_range(headline)} seeds, the others {_range(others)}."


def _range(numbers: list[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low} to {high}"


def negative(results: Results) -> str:
    gap, shared = Gaps(results), noise(WIDTH, results)
    few, many = (student(shared.freedom) * shared.deviation / n**0.5 for n in (FEW, MANY))
    seeds = ceil(((1.96 + POWER) * shared.deviation / 0.2) ** 2)
    start, middle, end = cosines(results)
    streaming, zeroing = (tuned(NAMED[name], results)[0] for name in (STREAMING, "random zeroing"))
    return f"""
**Behind data-parallel.** The gap of {gap(STREAMING, DP)} was looked for in the tuning: with an inner lr of its own it
is {gap("inner lr tuned too", DP)}. In streaming: DiLoCo has {gap(DILOCO, DP)}, streaming in fp32 without overlap
{gap("streaming, fp32, no overlap", DP)}. In the outer step: one replica that makes it alone has {gap("M = 1", DP)}; two
that only average have {gap("plain averaging", DILOCO)} against DiLoCo. In the length of a round:
{gap("sync_every 10", DP)} with sync_every 10, {gap("sync_every 100", DP)} with 100. In the code: replicas that average
after every step of plain SGD are data-parallel to rounding, and one replica that takes its own mean is plain training
(tests/core/test_invariants.py, 2 and 3). What remains is that two replicas train apart. The scaling laws, fitted to
models from 35M parameters on, extrapolate to gaps of this height (below); they give a smaller gap to the larger model,
which these sizes do not show. Here all sizes train on the same bytes, the published ones on the same number for each
parameter: width {NARROW} and width {WIDE} differ in more than their size.

**The gap opens late.** {_opening(results)} A comparison that ends in the middle of a run, or in which
the lr does not decay, would call it parity.

**Outer momentum 0.9 is too long a memory here.** It averages over ten rounds of {ROUNDS}: it is late in the first
rounds, and late again while the lr decays (second plot). With its own best outer lr it is {gap("outer momentum 0.9")}
against 0.5. The published runs have several hundred rounds.

**Random zeroing needs an outer lr of its own.** Only an eighth of each delta arrives, and the anchors stay behind
unless the outer lr makes up for it. With the best one, {zeroing.outer_lr if zeroing else nan:g} instead of
{streaming.outer_lr if streaming else nan:g}, {gap("random zeroing")} remains.

**The replicas agree more than the paper's.** The cosine between their deltas goes from {start:.2f} over {middle:.2f}
to {end:.2f}; the paper saw 0.1 and less, in models from 35M parameters on.

**One replica is hardly worse than the anchors at the end**: {gap(STREAMING, STREAMING, "replica", "anchors")} (the
paper 3.7 %). At 5 % of the inner lr the replicas have almost met. It is not a reason to evaluate a replica in the
middle of a run.

**From 4 replicas on the mean is encoded again**, since every replica sums a part and sends it on. With 8 replicas a
mean that is sent in fp32 instead gives {gap("M = 8, mean sent in fp32", "M = 8")}; `Collective(mean_codec=BFloat16())`
sends half of that, and was not measured.

**What could not be resolved.** Two runs that differ in a detail only (a codec, an overlap) end {shared.deviation:.1f} %
apart (standard deviation of paired differences), whichever of them has the finer wire: at these sizes training
amplifies rounding. {FEW} seeds give intervals of ± {few:.2f} %, {MANY} of ± {many:.2f} %; to see two equal runs inside
a bar of ± 0.2 % would take about {seeds} seeds of each. The tables hold some sixty intervals of 95 %: about
three of them miss the truth.
"""


def _opening(results: Results) -> str:
    """The gap of the anchors over the run, from the curves."""
    found = curve(NAMED[STREAMING], NAMED[DP], results)
    steps = [CURVE_EVERY * (i + 1) for i in range(len(found))]
    lowest = min(range(len(found)), key=found.__getitem__)
    return (
        f"The anchors are {found[0]:+.1f} % from data-parallel at step {steps[0]}, when the outer optimizer has hardly "
        f"begun, {found[lowest]:+.1f} % at step {steps[lowest]} and {found[-1]:+.1f} % at step {steps[-1]}, when the "
        "inner lr has decayed (second plot, on fewer held-out bytes than the final losses)."
    )


def changed(results: Results) -> str:
    gap = Gaps(results)
    return f"""
- A fixed outer momentum of 0.9 is not the default any more. Today momentum grows with the rounds from 0 to 0.9, and the
  outer lr falls from 1 to 0.4 ("Today", above). `Nesterov(0.4, 0.9, follow=False)` is the paper's rule. Measured were
  {ROUNDS} rounds and 89k parameters.
- keep_local stays 0: 0.5 gives {gap("keep_local 0.5")} with overlap 1.
- The recipe that `diloco plan` writes leaves the outer momentum to the trainer, which knows the number of rounds.
"""
