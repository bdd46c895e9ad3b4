"""`diloco fleet`: what chip failures cost data-parallel training and DiLoCo."""

import json
from dataclasses import asdict, dataclass
from functools import partial

from diloco.errors import ConfigError
from diloco.plan import fleet as fleets
from diloco.plan import quantity
from diloco.runs.flags import REQUIRED, flag

GROUPS = ("chips and failures", "a group of chips in lockstep", "members of DiLoCo", "output")
_chips, _group, _members, _output = (partial(flag, group=group) for group in GROUPS)
MEMBERS = (2, 4, 8, 16)


@dataclass(frozen=True, kw_only=True)
class FleetConfig:
    """Predict the goodput of a fleet whose chips fail: the share of chip time spent on work that counts, for
    data-parallel training and for DiLoCo."""

    # fmt: off
    chips: int = _chips(REQUIRED, "Number of chips, such as 16k or 1.2m.")
    mtbf: str = _chips("5.8y", "Mean time between failures of one chip, such as 1y.",
        why="Llama 3 reported 419 interruptions of 16,384 chips in 54 days")
    slice: int = _chips(8, "Chips that go down together when one of them fails.", why="a host")
    repair: str = _chips("4h", "Mean time until failed chips return.")
    detect: str = _group("30s", "Time until a failure is noticed.")
    restart: str = _group("10min", "Rigid groups: time until all chips compute again, from the checkpoint.")
    save_every: str = _group("10min", "Rigid groups: time between checkpoints; the work since the last one is lost.")
    resize: str = _group("1min", "Elastic groups: time to continue without the failed chips, and again with them when "
        "they return.")
    members: tuple[int, ...] = _members((), "Numbers of members to compare.", why="2 4 8 16, if they fit")
    quorum: int = _members(1, "Fewest members that train; with fewer, all wait.")
    json: bool = _output(False, "Print the results as JSON.")
    # fmt: on


CONFIG = FleetConfig
EXAMPLES = (
    "diloco fleet --chips 16k",
    "diloco fleet --chips 1m --mtbf 1y --members 2 8",
    "diloco fleet --chips 64 --slice 8 --members 8 --quorum 4",
)


def main(config: FleetConfig) -> int:
    fleet = fleet_of(config)
    rows = fleets.rows(fleet, _member_counts(config, fleet.chips))
    if config.json:
        print(json.dumps({"fleet": asdict(fleet), "rows": [asdict(row) for row in rows]}))
    else:
        print(fleets.text(fleet, rows), end="")
    return 0


def fleet_of(config: FleetConfig) -> fleets.Fleet:
    if config.slice < 1 or config.chips < 1:
        raise ConfigError(f"chips={config.chips}, slice={config.slice}: both must be at least 1")
    names = ("detect", "restart", "resize", "repair", "save_every")
    return fleets.Fleet(
        chips=config.chips,
        mtbf=quantity.seconds(config.mtbf, "mtbf", zero=False),
        slice=config.slice,
        quorum=config.quorum,
        **{name: quantity.seconds(getattr(config, name), name) for name in names},
    )


def _member_counts(config: FleetConfig, chips: float) -> list[int]:
    fitting = [number for number in MEMBERS if number * config.slice <= chips] or MEMBERS[:1]
    members = sorted(set(config.members or fitting))
    if members[0] < 2:
        raise ConfigError(f"members={members[0]}: use 2 or more; one member is data-parallel training")
    if chips < members[-1] * config.slice:
        raise ConfigError(f"chips={config.chips}: {members[-1]} members need at least one slice of {config.slice} "
                          "chips each; use fewer --members or a smaller --slice")  # fmt: skip
    if not 1 <= config.quorum <= members[0]:
        raise ConfigError(f"quorum={config.quorum}: use 1 to {members[0]}, the smallest of --members")
    return members
