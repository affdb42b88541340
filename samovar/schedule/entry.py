"""live_request: the record of a new request, and which blocks its choices may share with whom."""

from __future__ import annotations

from samovar.core.request import Request
from samovar.schedule.live import LiveRequest
from samovar.schedule.options import SchedulerOptions
from samovar.schedule.prefix_cache import CacheIdentity, PrefixKey


def live_request(
    request: Request, order: int, options: SchedulerOptions, identity: CacheIdentity, generation: int
) -> LiveRequest:
    """The record of a request without its choices. `order` is its running number, `generation` that of the cache."""
    params, block_size = request.params, options.block_size
    shares = options.enable_prefix_caching
    reads = shares and params.reads_prefix_cache
    # Choices always share the prompt among themselves, under a key of their own if not with others.
    is_private = params.n > 1 and not reads
    root = None
    if shares or is_private:
        root = PrefixKey(
            identity=identity,
            block_size=block_size,
            generation=generation,
            cache_salt=request.cache_salt,
            private=order if is_private else None,
        ).digest()
    num_shared = (len(request.prompt_token_ids) - 1) // block_size * block_size if params.n > 1 else 0
    return LiveRequest(request, root, reads or is_private, is_private, num_shared_tokens=num_shared)
