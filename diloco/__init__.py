"""Streaming DiLoCo: train one model on machines that are far apart, over slow links, without waiting for them."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diloco.bucket import Bucket as Bucket
    from diloco.codecs.codec import E3M0 as E3M0
    from diloco.codecs.codec import BFloat16 as BFloat16
    from diloco.codecs.codec import Float32 as Float32
    from diloco.codecs.codec import TwoBit as TwoBit
    from diloco.core.diloco import DiLoCo as DiLoCo
    from diloco.core.fragment import Balanced as Balanced
    from diloco.core.fragment import Sequential as Sequential
    from diloco.core.fragment import Strided as Strided
    from diloco.core.muon import muon as muon
    from diloco.core.outer import SGD as SGD
    from diloco.core.outer import Nesterov as Nesterov
    from diloco.errors import ConfigError as ConfigError
    from diloco.errors import DiLoCoError as DiLoCoError
    from diloco.errors import Diverged as Diverged
    from diloco.errors import Mismatch as Mismatch
    from diloco.errors import NotFinite as NotFinite
    from diloco.errors import PeerLost as PeerLost
    from diloco.exchange.collective import Collective as Collective
    from diloco.exchange.first_rank import FirstRank as FirstRank
    from diloco.exchange.launch import replica as replica
    from diloco.exchange.local import run as run_replicas  # noqa: F401

_HOME = {
    "bucket": ("Bucket",),
    "codecs.codec": ("E3M0", "BFloat16", "Float32", "TwoBit"),
    "core.diloco": ("DiLoCo",),
    "errors": ("ConfigError", "DiLoCoError", "Diverged", "Mismatch", "NotFinite", "PeerLost"),
    "core.muon": ("muon",),
    "core.fragment": ("Balanced", "Sequential", "Strided"),
    "exchange.first_rank": ("FirstRank",),
    "exchange.launch": ("replica",),
    "core.outer": ("SGD", "Nesterov"),
    "exchange.collective": ("Collective",),
}
_MODULE = {name: (module, name) for module, names in _HOME.items() for name in names}
_MODULE["run_replicas"] = ("exchange.local", "run")

__version__ = "0.1.0"
__all__ = ["__version__", *_MODULE]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> object:
    """Import a public name when it is first used: `import diloco` alone needs no torch."""
    if name in _MODULE:
        module, attribute = _MODULE[name]
        return getattr(import_module(f"diloco.{module}"), attribute)
    raise AttributeError(f"module 'diloco' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
