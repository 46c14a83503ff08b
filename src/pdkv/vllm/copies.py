"""Copies between vLLM's blocks, layer by layer in its own memory, and the staging pool's, which have all layers.

On a GPU they run on their own stream, all layers of a step at once. vLLM's stream waits only until its blocks have been
read, or written: the transfer over the bus overlaps with its next steps.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from pdkv.connectors.step_done import ON_HOST, StepDone, make_step_done
from pdkv.connectors.transfer.planning import as_ids, run_starts
from pdkv.kernels.streams import streams_of
from pdkv.vllm.staging import BlockPairs

if TYPE_CHECKING:
    import torch


class StagingCopies:
    """Called on vLLM's thread, whose current stream is the one that computes.

    Args:
        caches: by layer, (num_blocks, ...), on one device.
        staging: (num_staging_blocks, num_layers, elements of one layer's block), in host memory, pinned for a GPU.
    """

    def __init__(self, caches: "Sequence[torch.Tensor]", staging: "torch.Tensor") -> None:
        self.last: StepDone = ON_HOST
        """Wait for all copies so far: the staging pool then has all copied content, and its sources have been read."""
        self._caches = caches
        self._staging = staging
        self._device = caches[0].device
        self._streams = streams_of(self._device)
        self._stream = self._streams.make_stream()

    def copy_out(self, pairs: BlockPairs) -> None:
        """Copy out of vLLM's blocks, as its stream has computed them; it may overwrite them when this returns."""
        if not pairs.staging:
            return
        if self._streams.is_host:
            self._copy_out_on_host(pairs)
            return
        from pdkv.kernels.upload import to_tensor

        computed, read = self._streams.make_event(), self._streams.make_event()
        computed.record()
        with self._stream.on():
            blocks = to_tensor(as_ids(pairs.vllm), self._device)
            computed.wait()
            images = self._make_images(pairs)
            for layer, cache in enumerate(self._caches):
                images[:, layer] = cache[blocks].flatten(1)
            read.record()
            for staged, part in _runs(pairs):
                self._staging[staged].copy_(images[part], non_blocking=True)
            self._record()
        read.wait()

    def copy_in(self, pairs: BlockPairs) -> None:
        """Copy into vLLM's blocks, before later work on its stream."""
        if not pairs.staging:
            return
        if self._streams.is_host:
            self._copy_in_on_host(pairs)
            return
        from pdkv.kernels.upload import to_tensor

        computed, written = self._streams.make_event(), self._streams.make_event()
        computed.record()
        with self._stream.on():
            blocks = to_tensor(as_ids(pairs.vllm), self._device)
            images = self._make_images(pairs)
            for staged, part in _runs(pairs):
                images[part].copy_(self._staging[staged], non_blocking=True)
            self._record()
            computed.wait()  # the blocks' previous owner is done
            for layer, cache in enumerate(self._caches):
                cache[blocks] = images[:, layer].view(len(pairs.vllm), *cache.shape[1:])
            written.record()
        written.wait()

    def _make_images(self, pairs: BlockPairs) -> "torch.Tensor":
        """(pairs, layers, elements), on the device."""
        import torch

        return torch.empty((len(pairs.vllm), *self._staging.shape[1:]), dtype=self._staging.dtype, device=self._device)

    def _record(self) -> None:
        self.last = make_step_done(self._device)
        self.last.record()

    def _copy_out_on_host(self, pairs: BlockPairs) -> None:
        import torch

        staged, blocks = torch.tensor(pairs.staging), torch.tensor(pairs.vllm)
        for layer, cache in enumerate(self._caches):
            self._staging[staged, layer] = cache[blocks].flatten(1)

    def _copy_in_on_host(self, pairs: BlockPairs) -> None:
        import torch

        staged, blocks = torch.tensor(pairs.staging), torch.tensor(pairs.vllm)
        for layer, cache in enumerate(self._caches):
            cache[blocks] = self._staging[staged, layer].view(len(pairs.vllm), *cache.shape[1:])


def _runs(pairs: BlockPairs) -> Iterator[tuple[slice, slice]]:
    """Staging blocks that are adjacent, and which of the pairs they are."""
    staged = as_ids(pairs.staging)
    for first, stop in pairwise([*run_starts(staged).tolist(), staged.size]):
        yield slice(pairs.staging[first], pairs.staging[first] + stop - first), slice(first, stop)
