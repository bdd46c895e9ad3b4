"""`diloco fleet`: what failures cost many chips, with data-parallel training and with DiLoCo."""

import json
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from diloco.errors import ConfigError
from diloco.flags import REQUIRED, flag
from diloco.plan import fleet as fleets
from diloco.plan import plot, quantity
from diloco.plan.events import DAY
from diloco.plan.failures import Fleet

GROUPS = ("chips and failures", "one group of chips", "members of DiLoCo", "output")
_chips, _group, _members, _output = (partial(flag, group=group) for group in GROUPS)
MEMBERS = (2, 4, 8, 16)
MOST = 3_000_000
"""Failures that are simulated: ten times as many events take a minute or two."""


@dataclass(frozen=True, kw_only=True)
class FleetConfig:
    """Predict which share of a fleet's time counts when its chips fail: with data-parallel training, rigid or elastic,
    and with DiLoCo."""

    # fmt: off
    chips: str = _chips(REQUIRED, "Number of chips, such as 16k or 1.2m.")
    mtbf: str = _chips("5.8y", "Mean time between failures of one chip, such as 1y.",
        why="what 419 interruptions of 16,384 chips in 54 days make, as published for Llama 3")
    slice: int = _chips(8, "Chips that stop together when one of them fails.", why="a host")
    repair: str = _chips("4h", "Mean time until chips that stopped are back.")
    detect: str = _group("30s", "Time until a failure is noticed.")
    restart: str = _group("10min", "Rigid groups: time until all chips compute again, from the checkpoint.")
    save_every: str = _group("10min", "Rigid groups: time between two checkpoints; what was computed since the last "
        "one is lost. For a member that takes the others' state: time between two syncs of a fragment.")
    spares: float | None = _group(None, "Rigid groups: share of the chips that stand by.",
        why="what gives the highest goodput")
    resize: str = _group("1min", "Elastic groups: time until the others compute again without the chips that failed; "
        "and once more when these are back.")
    members: tuple[int, ...] = _members((), "Numbers of members to compare.", why="2 4 8 16, as far as they fit")
    quorum: int = _members(1, "The fewest members that train; with fewer, all wait.")
    grace: str = _members("0s", "How long all members wait for one that stalls.")
    snapshot: str | None = _members(None, "Bytes that a restarted rigid member fetches from the others, such as 14gb; "
        "needs --link.", why="not counted")
    link: str | None = _members(None, "Rate of the link over which it fetches them, such as 1gbit.")
    days: float = _output(30.0, "Days to simulate beside the closed form.")
    seed: int = _output(0, "Seed of the simulation.")
    plot: Path | None = _output(None, "Draw goodput over the number of chips, to a .html, .svg or .png file.")
    json: bool = _output(False, "Print everything as JSON.")
    # fmt: on


CONFIG = FleetConfig
EXAMPLES = (
    "diloco fleet --chips 16k",
    "diloco fleet --chips 1m --mtbf 1y --members 2 8 --plot fleet.html",
    "diloco fleet --chips 64 --slice 8 --members 8 --quorum 4 --snapshot 14gb --link 1gbit",
)


def main(config: FleetConfig) -> int:
    if config.plot is not None:
        plot.check(config.plot)
    fleet, members = fleet_of(config), members_of(config)
    rows, found = fleets.rows(fleet, members, config.days, config.seed), fleets.effects(fleet, members[-1])
    if config.plot is not None:
        beside = plot.Beside(fleets.verdict(fleet, rows), fleets.sheets(fleet, rows, found),
                             [fleets.note(fleet, config.days)])  # fmt: skip
        plot.write(config.plot, fleets.plot(fleet, members), beside)
    if config.json:
        out = {"fleet": asdict(fleet), "rows": [asdict(row) for row in rows]}
        print(json.dumps(out | {"effects": [asdict(effect) for effect in found]}))
    else:
        print(fleets.tables(fleet, rows, found, config.days), end="")
    return 0


def members_of(config: FleetConfig) -> tuple[int, ...]:
    chips = quantity.count(config.chips, "chips")
    fitting = [number for number in MEMBERS if number * config.slice <= chips] or MEMBERS[:1]
    members = tuple(sorted(set(config.members or fitting)))
    if members[0] < 2:
        raise ConfigError(f"members={config.members}: give numbers from 2 on; one member is data-parallel training")
    if chips < members[-1] * config.slice:
        raise ConfigError(f"chips={config.chips!r}: too few for {members[-1]} members of at least one slice of "
                          f"{config.slice}; give --members or a smaller --slice")  # fmt: skip
    if not 1 <= config.quorum <= members[0]:
        raise ConfigError(f"quorum={config.quorum}: give 1 to {members[0]}, the smallest of --members")
    return members


def fleet_of(config: FleetConfig) -> Fleet:
    if config.slice < 1:
        raise ConfigError(f"slice={config.slice}: give a whole number of at least 1")
    if config.spares is not None and not 0 <= config.spares < 1:
        raise ConfigError(f"spares={config.spares}: give a share from 0 to 1, such as 0.05")
    if (config.snapshot is None) != (config.link is None):
        raise ConfigError("snapshot and link: give both, bytes and rate, or none")
    rejoin = 0.0
    if config.snapshot is not None and config.link is not None:
        rejoin = 8 * quantity.size(config.snapshot, "snapshot") / quantity.rate(config.link)
    fleet = Fleet(
        chips=quantity.count(config.chips, "chips"),
        mtbf=quantity.seconds(config.mtbf, "mtbf", zero=False),
        slice=config.slice,
        rejoin=rejoin,
        spares=config.spares,
        quorum=config.quorum,
        **{name: quantity.seconds(getattr(config, name), name)
           for name in ("detect", "restart", "resize", "repair", "save_every", "grace")},
    )  # fmt: skip
    if not config.days > 0:
        raise ConfigError(f"days={config.days:g}: give a number above 0")
    failures = fleet.chips * config.days * DAY / fleet.mtbf
    if failures > MOST:
        raise ConfigError(f"days={config.days:g}: {failures:,.0f} failures are too many to simulate; give at most "
                          f"{config.days * MOST / failures:.3g}")  # fmt: skip
    return fleet
