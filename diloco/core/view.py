"""A fragment's values in this process: where anchors meet the model's own tensors.

Values are flat fp32 in the fragment's order, on the host or where the model is. Parameters may be sharded, on any
device, of any type. They are read and written in place, never replaced, so optimizers, compiled graphs and FSDP keep
them.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import torch
from torch import Tensor, nn
from torch._utils import _unflatten_dense_tensors

from diloco.codecs import kernels
from diloco.codecs.codec import Codec
from diloco.core.fragment import Fragment
from diloco.core.lane import AHEAD, Lane, Upload, Wait, all_of, has_lane, sleep_until
from diloco.core.outer import CHUNK
from diloco.core.payload import encode
from diloco.core.tensors import first_row, local
from diloco.exchange.mean import Packed

SMALL = 1 << 12
"""Values. Neighbors that are smaller are handled together: with thousands of experts, a few Python calls for each would
take longer than the work on their values."""
DEVICE_CHUNK = 1 << 24
"""Values for which intermediate results are computed at once on an accelerator: 64 MB each."""


@dataclass(frozen=True)
class Span:
    """Rows of one local tensor, and where they lie in the run's flat values."""

    name: str
    tensor: Tensor
    start: int
    stop: int
    position: int
    size: int

    def rows(self) -> Tensor:
        return local(self.tensor)[self.start : self.stop]

    def of(self, flat: Tensor) -> Tensor:
        """The same rows of flat values."""
        return flat[self.position : self.position + self.size].view(self.rows().shape)

    @property
    def small(self) -> bool:
        plain = type(self.tensor) in (Tensor, nn.Parameter)
        return plain and self.size < SMALL and self.size == self.tensor.numel()


@dataclass(frozen=True)
class Small:
    """Neighboring spans, each of a whole small tensor."""

    tensors: list[Tensor]
    place: slice  # in the run's flat values

    def of(self, flat: Tensor) -> tuple[Tensor, ...]:
        """The same values of a flat tensor, in the shapes of the tensors."""
        return _unflatten_dense_tensors(flat[self.place], self.tensors)


def _together(spans: Iterable[Span]) -> Iterator[Span | Small]:
    for small, run in groupby(spans, key=lambda span: span.small):
        neighbors = list(run)
        if not small:
            yield from neighbors
            continue
        first, last = neighbors[0], neighbors[-1]
        yield Small([span.tensor for span in neighbors], slice(first.position, last.position + last.size))


def _chunks(rows: Tensor) -> list[slice]:
    """Rows to compute with at once: on a CPU so few that intermediate results stay in the cache."""
    n, chunk = len(rows), CHUNK if rows.device.type == "cpu" else DEVICE_CHUNK
    step = max(chunk * n // max(rows.numel(), 1), 1)
    return [slice(i, i + step) for i in range(0, n, step)]


class Run:
    """Neighboring spans on one device. Flat values are on that device too; without a lane they may be on the host."""

    def __init__(self, spans: Sequence[Span], place: slice, lane: Lane | None) -> None:
        self.spans, self.place, self.lane = spans, place, lane
        self.device = spans[0].tensor.device
        self._parts = list(_together(spans))

    def holds(self, values: Tensor) -> bool:
        """Whether flat values are where the kernels can use them. Otherwise they go through the lane."""
        return self.lane is None or values.device == self.device

    def read(self, out: Tensor) -> None:
        for part in self._parts:
            if isinstance(part, Small):
                torch._foreach_copy_(part.of(out), part.tensors)
            else:
                part.of(out).copy_(part.rows())

    def write(self, values: Tensor) -> None:
        for part in self._parts:
            if isinstance(part, Small):
                torch._foreach_copy_(part.tensors, part.of(values))
                continue
            rows, new = part.rows(), part.of(values)
            if kernels.passes(rows, new):
                kernels.copy(new, rows)
                torch.autograd.graph.increment_version(rows)  # a live graph must notice, as it does after copy_
            else:
                rows.copy_(new)

    def subtract(self, anchor: Tensor, out: Tensor) -> None:
        for part in self._parts:
            if isinstance(part, Small):
                out[part.place] = anchor[part.place]
                same = out.device == self.device
                torch._foreach_sub_(part.of(out), part.tensors if same else [t.to(out.device) for t in part.tensors])
                continue
            rows, a, o = part.rows(), part.of(anchor), part.of(out)
            if kernels.passes(a, rows, o):
                kernels.subtract(a, rows, o)
            else:
                torch.sub(a, rows.to(o.device), out=o)

    def merge(self, anchor: Tensor, keep_local: float) -> None:
        if keep_local == 0:
            self.write(anchor)
        for span in self.spans if 0 < keep_local < 1 else ():
            rows, target = span.rows(), span.of(anchor)
            for part in _chunks(rows):
                moved = target[part].to(rows.device) * (1 - keep_local)
                rows[part] = (rows[part].float() * keep_local).add_(moved)

    def rebase(self, new: Tensor, old: Tensor) -> None:
        for span in self.spans:
            rows, after, before = span.rows(), span.of(new), span.of(old)
            for part in _chunks(rows):
                rows[part] = rows[part].float() + (after[part] - before[part]).to(rows.device)

    def copies(self) -> list[Tensor]:
        """Of the model's values: on the device if there is room, otherwise on the host."""
        try:
            return [span.rows().clone() for span in self.spans]
        except torch.OutOfMemoryError:
            return [span.rows().to("cpu") for span in self.spans]

    def restore(self, copies: Sequence[Tensor]) -> None:
        for span, values in zip(self.spans, copies, strict=True):
            span.rows().copy_(values)


Uploads = Sequence[Upload | None]
"""One for each run."""


class FlatView:
    """All of a fragment. `lanes`: to the accelerators from and to which values are copied while training continues."""

    def __init__(
        self, fragment: Fragment, tensors: Mapping[str, Tensor], lanes: Mapping[torch.device, Lane] | None = None
    ) -> None:
        self._fragment, self._lanes, self._tensors = fragment, lanes or {}, dict[str, Tensor]()
        self.find(tensors)

    def find(self, tensors: Mapping[str, Tensor]) -> None:
        """Use these tensors from now on."""
        self._tensors = tensors = self._tensors | dict(tensors)
        self.size = 0
        self.runs: list[Run] = []
        for device, pieces in groupby(self._fragment, key=lambda piece: tensors[piece.name].device):
            spans: list[Span] = []
            begin, size = self.size, 0
            for piece in pieces:
                tensor = tensors[piece.name]
                rows, first = local(tensor), first_row(tensor)
                start = min(max(piece.start - first, 0), len(rows))
                stop = min(max(piece.stop - first, start), len(rows))
                spans.append(Span(piece.name, tensor, start, stop, size, rows[start:stop].numel()))
                size += spans[-1].size
            self.size = begin + size
            self.runs.append(Run(spans, slice(begin, self.size), self._lanes.get(device)))

    @property
    def lane(self) -> Lane | None:
        """To the one device that holds all of the fragment, if there is one."""
        return self.runs[0].lane if len(self.runs) == 1 else None

    @property
    def spans(self) -> list[Span]:
        return [span for run in self.runs for span in run.spans]

    @torch.no_grad()
    def read(self, out: Tensor) -> None:
        """out ← the model's values. The host waits for them."""
        for run in self.runs:
            if run.lane is None or run.holds(out):
                run.read(out[run.place])
                continue
            values = run.lane.scratch()
            run.read(values)
            arrived = run.lane.download(values, out[run.place])
            run.lane.give(values, arrived)
            sleep_until(arrived)

    @torch.no_grad()
    def write(self, values: Tensor, uploads: Uploads = ()) -> None:
        """The model's values ← values."""
        self.merge(values, 0.0, uploads)

    @torch.no_grad()
    def subtract(self, anchor: Tensor, out: Tensor, uploads: Uploads = ()) -> Wait:
        """out ← anchor − the model's values. Call what this returns before you read `out`."""
        waits = []
        for run, upload in self._with(uploads):
            if run.lane is None:
                run.subtract(anchor[run.place], out[run.place])
                continue
            with run.lane.timed():
                delta = self._delta(run, anchor, upload)
            arrived = run.lane.download(delta, out[run.place])
            run.lane.give(delta, arrived)
            waits.append(partial(sleep_until, arrived))
        return all_of(waits)

    @torch.no_grad()
    def pack(
        self,
        anchor: Tensor,
        codec: Codec,
        replicas: int,
        payload: Tensor,
        *,
        uploads: Uploads = (),
        state: Sequence[Tensor] = (),
    ) -> None:
        """payload ← anchor − the model's values, encoded where the model is. `state`: see `encode`."""
        ((run, upload),) = self._with(uploads)
        assert run.lane is not None
        with run.lane.timed():
            delta = self._delta(run, anchor, upload)
            encode(codec, delta[: self.size], replicas, payload, state)
            run.lane.done(delta)

    @staticmethod
    def _delta(run: Run, anchor: Tensor, upload: Upload | None) -> Tensor:
        """A buffer that begins with the delta: the one that the anchor came in, or a fresh one."""
        assert run.lane is not None
        if run.holds(anchor):
            delta = run.lane.scratch()
            run.subtract(anchor[run.place], delta)
            return delta
        upload = upload or FlatView._upload(run, anchor)
        values = upload.values()
        run.subtract(values, values)
        return upload.keep()

    @torch.no_grad()
    def merge(self, anchor: Tensor, keep_local: float, uploads: Uploads = ()) -> None:
        """local ← keep_local · local + (1 − keep_local) · anchor."""
        for run, upload in self._with(uploads):
            if run.lane is None:
                run.merge(anchor[run.place], keep_local)
                continue
            with run.lane.timed():
                if run.holds(anchor):
                    run.merge(anchor[run.place], keep_local)
                else:
                    upload = upload or self._upload(run, anchor)
                    run.merge(upload.values(), keep_local)
                    upload.release()

    @torch.no_grad()
    def rebase(self, new: Tensor, old: Tensor, uploads: Uploads = ()) -> None:
        """local ← local + new − old: follow the anchor and keep all local work. `uploads`: of the new one."""
        for run, upload in self._with(uploads):
            if run.holds(new):
                run.rebase(new[run.place], old[run.place])
                continue
            both = upload or self._upload(run, new), self._upload(run, old)
            run.rebase(*(upload.values() for upload in both))
            for upload in both:
                upload.release()

    def upload(self, values: Tensor) -> Uploads:
        """Begin to copy host values to the devices, where there is room. The next call that needs them takes them."""
        return [run.lane and run.lane.upload(values[run.place], leave=AHEAD) for run in self.runs]

    def mark(self) -> Wait:
        """A function that waits for all copies so far, both ways. Call it before you change memory that was written
        from."""
        return all_of([run.lane.mark() for run in self.runs if run.lane is not None])

    def copies(self) -> list[list[Tensor]]:
        return [run.copies() for run in self.runs]

    @torch.no_grad()
    def restore(self, copies: Sequence[Sequence[Tensor]]) -> None:
        for run, values in zip(self.runs, copies, strict=True):
            run.restore(values)

    def find_non_finite(self, values: Tensor | Packed) -> int | None:
        """The first span with inf or nan. A sum, at a quarter of the cost, is enough to know that there is none. Of a
        delta that is encoded already, the model shows where it was."""
        if isinstance(values, Packed):
            if values.finite:
                return None
            spans = (i for i, span in enumerate(self.spans) if not torch.isfinite(span.rows()).all())
            return next(spans, 0)
        if torch.isfinite(values.sum()):
            return None
        spans = [(run.place.start + span.position, span.size) for run in self.runs for span in run.spans]
        non_finite = (i for i, (at, size) in enumerate(spans) if not torch.isfinite(values[at : at + size]).all())
        return next(non_finite, None)

    def _with(self, uploads: Uploads) -> Iterator[tuple[Run, Upload | None]]:
        """Uploads that were released before count as none."""
        for i, run in enumerate(self.runs):
            upload = uploads[i] if uploads else None
            yield run, None if upload is None or upload.released else upload

    @staticmethod
    def _upload(run: Run, values: Tensor) -> Upload:
        assert run.lane is not None
        upload = run.lane.upload(values[run.place])
        assert upload is not None, "uploads ahead of time leave enough"
        return upload


def lane_sizes(fragments: Iterable[Fragment], tensors: Mapping[str, Tensor]) -> dict[torch.device, int]:
    """By device: the values of the largest part of a fragment on it."""
    sizes: dict[torch.device, int] = {}
    for fragment in fragments:
        for run in FlatView(fragment, tensors).runs:
            sizes[run.device] = max(sizes.get(run.device, 0), run.place.stop - run.place.start)
    return sizes


LEAST = 32
"""Values of a lane's buffers: an encoded delta of a few values is larger than they are."""


def lanes_for(fragments: Iterable[Fragment], tensors: Mapping[str, Tensor]) -> dict[torch.device, Lane]:
    """A lane to each accelerator that holds a part of the model."""
    return {
        device: Lane(device, max(n, LEAST)) for device, n in lane_sizes(fragments, tensors).items() if has_lane(device)
    }
