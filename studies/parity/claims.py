"""What was claimed, by the paper and by us, against what was measured."""

from dataclasses import dataclass
from math import inf, nan
from statistics import fmean

from studies.parity.paired import compared, judged
from studies.parity.results import Results
from studies.parity.rows import DILOCO, DP, NAMED, NARROW, STREAMING, WIDE, WIDTH, WIDTHS, at_width
from studies.parity.spread import Spread


@dataclass(frozen=True)
class Bar:
    """A difference in percent and where it should lie."""

    what: str
    found: Spread | None
    low: float = -inf
    high: float = inf

    @property
    def verdict(self) -> str:
        if self.found is None:
            return "not run"
        if self.low <= self.found.low and self.found.high <= self.high:
            return "met"
        return "**missed**" if self.found.high < self.low or self.high < self.found.low else "unresolved"

    @property
    def limit(self) -> str:
        if self.low == -inf:
            return f"≤ {self.high:+g} %"
        return f"≥ {self.low:+g} %" if self.high == inf else f"within ± {self.high:g} %"

    def cells(self) -> tuple[str, ...]:
        return self.what, percent(self.found), str(self.found.n) if self.found else "", self.limit, self.verdict


def percent(found: Spread | None) -> str:
    return f"{signed(found)} %" if found else "not run"


def signed(found: Spread) -> str:
    return f"{found.mean:+.2f}" if found.half_width == inf else f"{found.mean:+.2f} ± {found.half_width:.2f}"


def bars(results: Results) -> list[Bar]:
    def gap(row: str, against: str, what: str = "final") -> Spread | None:
        return compared(NAMED[row], NAMED[against], results, what)

    return [
        *(Bar(f"{at_width(width, STREAMING)}, against data-parallel",
              gap(at_width(width, STREAMING), at_width(width, DP)), high=1.0)
          for width in (WIDE, WIDTH, NARROW)),
        Bar("streaming, overlap 1, E3M0, against DiLoCo", gap(STREAMING, DILOCO), -0.5, 0.5),
        Bar("fp32 on the wire, against E3M0", gap("fp32 on the wire", STREAMING), -0.2, 0.2),
        Bar("random zeroing, against E3M0", gap("random zeroing", STREAMING), low=0.5),
        Bar("overlap 5, against 1", gap("overlap 5", STREAMING), -0.3, 0.3),
        Bar("one replica, against the model that is exported", gap(STREAMING, STREAMING, "replica"), low=0.0),
        Bar("M = 4, against M = 2", gap("M = 4", STREAMING), low=0.0),
        Bar("M = 8, against M = 4", gap("M = 8", "M = 4"), low=0.0),
    ]  # fmt: skip


def of_the_paper(results: Results) -> list[tuple[str, str, str, str]]:
    """(claim, the paper's figure, ours, whether it holds), in the order of the paper."""

    def gap(row: str, against: str = STREAMING, what: str = "final", of: str = "final") -> Spread | None:
        return compared(NAMED[row], NAMED[against], results, what, of)

    sizes = [gap(at_width(width, STREAMING), at_width(width, DP)) for width in WIDTHS]
    shrunk = sizes[0] and sizes[-1] and sizes[0] - sizes[-1]
    late, tenth = gap("overlap 10"), gap("overlap 10, keep_local 0.5", "keep_local 0.5")
    often, usual = gap("sync_every 10", "DiLoCo, sync_every 10"), gap(STREAMING, DILOCO)
    wire, replica, mean = gap("fp32 on the wire"), *(gap(STREAMING, what=w, of="anchors") for w in ("replica", "mean"))
    start, middle, end = cosines(results)
    return [
        ("overlap 0, one fragment, fp32 is DiLoCo; M = 1, outer lr 1, momentum 0 is the inner optimizer", "exact",
         "to rounding (tests/core/test_invariants.py, 3 and 4)", "yes"),
        ("sync_every 100, two fragments: sends at 100, 150, 200, …", "exact",
         "exact (tests/core/test_schedule.py)", "yes"),
        ("keep_local 1: replicas never meet; 0: a fragment is equal on all when it was applied", "exact",
         "bit for bit (tests/core/test_invariants.py, 3)", "yes"),
        ("400 times fewer bits than data-parallel at sync_every 100", "400",
         "397, with the scales; 1.008 of the bound on the wire ([benchmarks](benchmarks.md))", "yes"),
        ("the peak is that of one fragment: 8 times lower with 3 of 24 layers", "8",
         "largest burst = largest fragment (tests/train/test_train.py)", "yes"),
        ("simulated utilisation, Table 4", "75 cells", "72 equal, 3 one grid step off ([planner](planner.md))", "yes"),
        ("gap to data-parallel, sync_every 30 (Table 5)", "+0.6 % at 35M to −0.4 % at 1B",
         " / ".join(percent(size) for size in sizes) + " at " + parameters(results), below(0.63, *sizes)),
        ("gap to data-parallel, sync_every 100", "+1.4 % at 35M to +0.4 % at 1B", percent(gap("sync_every 100", DP)),
         below(1.5, gap("sync_every 100", DP))),
        ("the gap shrinks as the model grows (here at equal bytes, in the paper at equal tokens per parameter)", "yes",
         f"{percent(shrunk)} smaller at width {WIDE} than at width {NARROW}", above(0.0, shrunk)),
        ("4 bits on the wire change the loss by less than 0.2 %", "no visible change", f"{percent(wire)} for fp32",
         below(0.2, wire, wire and -wire)),
        ("random zeroing of the same number of bits is clearly worse (by 0.5 %)", "worse",
         percent(gap("random zeroing")), above(0.5, gap("random zeroing"))),
        ("overlap 10 costs less than 0.2 %", "< 0.2 %", f"{percent(late)}; with keep_local 0.5 {percent(tenth)}",
         below(0.2, late, tenth)),
        ("one replica may merge later (overlap 1 and 5) for less than 0.2 %", "harmless",
         percent(gap("overlap 1 and 5")), below(0.2, gap("overlap 1 and 5"))),
        ("strided fragments are no worse than sequential ones", "similar", percent(gap("sequential")) +
         " for sequential", above(0.0, gap("sequential"))),
        ("freezing what is not sent next costs some 20 % (10 % and more)", "+20 %",
         percent(gap("unsynced layers frozen")), above(10.0, gap("unsynced layers frozen"))),
        ("anchors are better than one replica", "2.67 against 2.77 (+3.7 %)", percent(replica), above(0.0, replica)),
        ("anchors are better than the mean of replicas", "2.67 against 2.68 (+0.4 %)", percent(mean), above(0.0, mean)),
        ("M = 4 costs more than M = 2", "+0.8 to +2.0 %", percent(gap("M = 4")), above(0.0, gap("M = 4"))),
        ("streaming is more robust than DiLoCo at small sync_every", "figure 13",
         f"{percent(often)} against DiLoCo at sync_every 10, {percent(usual)} at 30", above(0.0, often and -often)),
        ("memory 5/3 of data-parallel's", "5/3", "20 bytes a parameter against 12, and 2.5 under way",
         "yes"),
        ("cosine between the replicas' deltas falls", "+0.1 → 0 → −0.1", f"{start:+.2f} → {middle:+.2f} → {end:+.2f}",
         "yes, higher" if start > middle > end > 0.05 else "yes" if start > middle > end else "no"),
        ("and is lower in larger models", "yes", " / ".join(f"{cosines(results, w)[1]:+.2f}" for w in WIDTHS) +
         " in the middle, at " + parameters(results), "yes" if _falls(results) else "no"),
    ]  # fmt: skip


def below(limit: float, *found: Spread | None) -> str:
    """Whether all are, judged by their complete intervals."""
    seen = [each for each in found if each is not None]
    if len(seen) < len(found):
        return "not run"
    if all(each.high <= limit for each in seen):
        return "yes"
    return "no" if any(each.low > limit for each in seen) else "unresolved"


def above(limit: float, found: Spread | None) -> str:
    return below(-limit, found and -found)


def parameters(results: Results) -> str:
    found = {r["cell"]["width"]: r["parameters"] for r in results.values()}
    return ", ".join(f"{round(found[width] / 1000)}k" for width in WIDTHS if width in found)


def cosines(results: Results, width: int = WIDTH) -> tuple[float, float, float]:
    """First tenth, middle and last tenth of a run: mean over the fragments and seeds of streaming."""
    rows = judged(NAMED[at_width(width, STREAMING)], results)
    found = [fragment for result in rows for fragment in result["cosines"]]
    start, middle, end = (fmean(fragment[i] for fragment in found) if found else nan for i in (0, 5, 9))
    return start, middle, end


def _falls(results: Results) -> bool:
    middles = [cosines(results, width)[1] for width in WIDTHS]
    return middles == sorted(middles, reverse=True)
