"""Everything this package raises on purpose. One root, with subclasses only where a caller would catch them."""


class DiLoCoError(Exception):
    """Root of all errors raised by this package."""


class ConfigError(DiLoCoError, ValueError):
    """An argument is not allowed; the message says what is."""


class Mismatch(DiLoCoError):
    """Replicas disagree on settings, on the shape of the model, or on which round comes next."""


class Diverged(DiLoCoError):
    """Replicas that hold the same round have different anchors or outer state."""


class NotFinite(DiLoCoError):
    """A replica's delta holds inf or nan. Raised on every replica; nothing was applied on any."""


class PeerLost(DiLoCoError):
    """Another replica died, left, or did not answer in time. This replica's state can still be saved."""
