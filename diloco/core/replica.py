"""One replica: its model cut into fragments, the work it has done, and its statistics. Saved and restored as one."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from diloco.codecs import device as device_codec
from diloco.codecs.codec import Codec
from diloco.core import checks
from diloco.core.fragment import Fragmenter
from diloco.core.memory import Memory
from diloco.core.outer import Outer
from diloco.core.placement import OnDevice, OnHost, Where, choose
from diloco.core.schedule import Schedule
from diloco.core.stats import Stats
from diloco.core.sync import FragmentSync, Work, contract_of, sync_of_buffers, whole
from diloco.core.tensors import (
    checksum_all,
    find_layers,
    forget_not_finite,
    frozen,
    fsdp_modules,
    reshard,
    shard_id,
    trainable,
    trained_buffers,
    unwrap,
)
from diloco.core.view import FlatView, lanes_for
from diloco.errors import DiLoCoError, Mismatch


class Replica:
    def __init__(self, model: nn.Module | Sequence[nn.Module], outer: Outer) -> None:
        self.model = unwrap(model)
        self._fsdp = fsdp_modules(self.model)
        self.reshard()  # after a forward without a backward FSDP2 shows gathered parameters, which it frees later
        self._named: dict[str, Tensor] = dict(trainable(self.model))
        self._shapes = {name: tuple(p.shape) for name, p in self._named.items()}
        self.parameters, self.shard = list(self._named.values()), shard_id(self._named.values())
        self._outer = outer
        self.fragments: list[FragmentSync] = []
        self.buffers: list[FragmentSync] = []
        self.memory = Memory()
        self.step_count = 0
        self.work, self.counts_tokens = Work(), False
        self.stats = Stats()
        self._expected_weights: int | None = None  # checksum that came with a loaded state, until it is compared

    def cut(self, fragmenter: Fragmenter, codec: Codec, packs_for: int | None, where: Where) -> None:
        """Cut the model into fragments that start from its present values. `packs_for`: see `Identity`."""
        pieces = fragmenter.split(self._shapes, find_layers(self.model, self._named))
        checks.hint_one_fragment(fragmenter, pieces)
        buffers = trained_buffers(self.model)
        self.close()
        self.memory = memory = Memory(lanes_for([*pieces, whole(buffers)], self._named | buffers))
        views = [FlatView(piece, self._named, memory.lanes) for piece in pieces]
        on_device, self.why = choose(where, views, codec, self._outer, packs_for)
        self.where = "device" if on_device else "host"
        self.fragments = []
        for piece, view in zip(pieces, views, strict=True):
            packs = packs_for if view.lane and device_codec.supports(codec) else None
            if on_device and packs:
                place = OnDevice(view, self._outer, memory, codec, packs)
            else:
                place = OnHost(view, self._outer, memory, codec, packs)
            options = {"outer": self._outer, "codec": codec, "memory": memory, "packs_for": packs}
            self.fragments.append(FragmentSync(len(self.fragments), piece, view, place, **options))
        agreed = [fragment.state for fragment in self.buffers]  # before a restart; training has changed its own since
        self.buffers = sync_of_buffers(buffers, memory)
        for fragment, state in zip(self.buffers, agreed, strict=False):
            fragment.place.replace(state, reuse=True)
        for fragment in self.buffers:
            fragment.number = len(pieces)

    def close(self) -> None:
        """No more rounds follow."""
        self.memory.close()

    @property
    def all(self) -> list[FragmentSync]:
        return self.fragments + self.buffers

    @property
    def started(self) -> bool:
        """Whether there is progress that a join must not overwrite."""
        return bool(self.step_count) or any(fragment.state.index for fragment in self.all)

    def reshard(self) -> None:
        """FSDP2 must gather again after each change, and drop gathered parameters that it shows instead of its own."""
        reshard(self._fsdp)

    def find_buffers(self) -> None:
        """Modules may have replaced their buffers."""
        for fragment in self.buffers:
            fragment.view.find(trained_buffers(self.model))

    def prepare(self, schedule: Schedule) -> None:
        """Begin to copy the anchors of the next step's sends to the devices."""
        for fragment in self.fragments if self.memory.lanes else ():
            if schedule.sends_at(fragment.number, self.step_count + 1):
                fragment.place.prepare()

    def read_start(self) -> None:
        """Weights loaded since construction are the start, not progress."""
        for fragment in self.all:
            fragment.view.read(fragment.state.anchor)
            fragment.view.write(fragment.state.anchor)  # float64 rounded to fp32, as the others get it

    def reset(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Give up local work since the anchors."""
        for fragment in self.fragments:
            fragment.reset(self.work)
        self.reshard()
        for optimizer in optimizers:
            forget_not_finite(optimizer)

    def contract(self, sync_every: int, codec: Codec) -> dict[str, object]:
        """What all replicas must agree on."""
        settings = {
            "sync_every": sync_every,
            "codec": repr(codec),
            "outer": repr(self._outer),
            "shard": str(self.shard),
        }
        return settings | contract_of(self.all, self._shapes, frozen(self.model))

    def check_trained(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.reshard()
        checks.check_trained(self.model, self.parameters, optimizers)

    def check_not_captured(self) -> None:
        if any(lane.capturing() for lane in self.memory.lanes.values()):
            raise DiLoCoError("a CUDA graph is being captured, and its replays would not run this hook: create DiLoCo "
                              "without an optimizer, and call step() after each replay")  # fmt: skip

    def check_counted(self) -> None:
        """Raise if the model was trained and no step was counted, as soon as the loop evaluates or saves: the last sync
        would replace what was trained by the start."""
        if not self.started and any(fragment.moved() for fragment in self.fragments):
            raise DiLoCoError("the model has changed and no step was counted: the optimizers that DiLoCo has did not "
                              "(all) step. Pass the ones that train the model, or None and call step() after each "
                              "step")  # fmt: skip

    def check_weights(self) -> None:
        """Raise unless the model holds the weights that were saved together with a loaded state."""
        checks.check_weights(self._expected_weights, self.parameters)
        self._expected_weights = None

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self.step_count,
            "work": self.work.saved(),
            "tokens": self.counts_tokens,
            "weights": checksum_all(self.parameters),
            "stats": self.stats.totals(),
            "fragments": {str(fragment.number): fragment.state_dict() for fragment in self.all},
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        if len(saved["fragments"]) != len(self.all):
            raise Mismatch(
                f"the saved state has {len(saved['fragments'])} fragments, this model {len(self.all)}: use the model "
                "and the fragments of the run that was saved"
            )
        for fragment in self.all:
            fragment.load_state_dict(saved["fragments"][str(fragment.number)])
        self.step_count, self.work, self.counts_tokens = saved["step"], Work(*saved["work"]), saved["tokens"]
        for fragment in self.all:
            fragment.resumed = self.work
        self.stats = Stats(**saved["stats"])
        # Compare now if the model is loaded already: optimizer.train() of a schedule-free one moves it before join().
        self._expected_weights = None if saved["weights"] == checksum_all(self.parameters) else saved["weights"]
