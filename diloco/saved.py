"""What `DiLoCo.state_dict` holds: one entry for the shard of this process, with a part for each fragment.

torch.distributed.checkpoint takes equal names on several ranks for equal values, so there is one entry per shard.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from diloco import mistakes
from diloco.errors import Mismatch
from diloco.sync import FragmentSync, Trained


@dataclass(frozen=True)
class Progress:
    """How far a replica has come."""

    step: int
    trained: Trained
    tokens: bool  # whether the work is counted in tokens
    weights: int  # checksum of the trained parameters, which are saved apart from this state
    overlap: int | None  # as this replica chose it; None: it is fixed


def save(
    shard: str, replica: int | str | None, progress: Progress, fragments: Sequence[FragmentSync]
) -> dict[str, Any]:
    return {
        shard: {
            "step": progress.step,
            "work": progress.trained.saved(),
            "tokens": progress.tokens,
            "weights": progress.weights,
            "replica": replica,
            "overlap": progress.overlap,
            "parts": {str(fragment.number): fragment.state_dict() for fragment in fragments},
        }
    }


def check(state: Mapping[str, Any], shard: str, replica: int | str | None, fragments: Sequence[FragmentSync]) -> None:
    """Raise unless the state fits the fragments; warn if it is another replica's."""
    mistakes.check_state(state, shard)
    parts = state[shard]["parts"]
    mistakes.check_replica(state[shard]["replica"], replica)
    if len(parts) != len(fragments):
        raise Mismatch(
            f"the saved state has {len(parts)} fragments, this model {len(fragments)}: use the model and the "
            "fragments of the run that was saved"
        )


def load(state: Mapping[str, Any], shard: str, fragments: Sequence[FragmentSync]) -> Progress:
    """Fill the fragments."""
    saved = state[shard]
    for fragment in fragments:
        fragment.load_state_dict(saved["parts"][str(fragment.number)])
    return Progress(saved["step"], Trained(*saved["work"]), saved["tokens"], saved["weights"], saved["overlap"])
