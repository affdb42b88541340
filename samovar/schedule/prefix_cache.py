"""PrefixKey, PrefixCache: which block already holds the K/V of which prompt beginning.

A full block is named by a chained digest: blake2b over (digest of the block before it, its token ids, what else its
K/V depends on). The chain starts from the digest of a `PrefixKey`, so everything that can change the K/V of equal
tokens - model, weights, cache type, adapter, salt - separates whole chains, and two blocks share a name only if
their whole histories are equal. Only blocks whose every token is known to be computed are published.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from hashlib import blake2b
from struct import Struct

from samovar.schedule.block_pool import BlockPool

DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheIdentity:
    """What every K/V entry of this engine depends on: fixed while the engine lives."""

    model: str = ""
    weights_version: str = ""
    """Changes whenever weights change under the same model name."""
    kv_dtype: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixKey:
    """Everything besides tokens that the K/V of one request depends on, or that must not be shared across."""

    identity: CacheIdentity
    block_size: int
    generation: int = 0
    """Counts resets: what a request from before a reset publishes is never found after it."""
    adapter_load_id: int | None = None
    """Number of the adapter's load, not its name: a replaced adapter is another one."""
    cache_salt: str | None = None
    private: int | None = None
    """Set for a request that shares with nobody but its own choices."""

    def digest(self) -> bytes:
        """Start of the chain: tagged, length-prefixed fields, so that no two keys encode alike."""
        encoded = bytearray()
        for owner in (self.identity, self):
            for f in dataclasses.fields(owner):
                if f.name == "identity":
                    continue
                value = getattr(owner, f.name)
                # Salts come from JSON, where a lone surrogate is possible.
                raw = b"" if value is None else str(value).encode("utf-8", "surrogatepass")
                encoded += f"{f.name}:{'absent' if value is None else len(raw)}:".encode() + raw
        return blake2b(encoded, digest_size=DIGEST_BYTES, person=b"samovar-key").digest()


class PrefixCache:
    """Names full blocks and finds them again. The blocks themselves belong to the pool."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size
        self._pack = Struct(f"<{block_size}I").pack

    def block_digest(
        self, parent: bytes, token_ids: SequenceOf[int], media: SequenceOf[tuple[int, bytes]] = ()
    ) -> bytes:
        """Name of the full block `token_ids` after the chain `parent`.

        `media` lists (offset in the block, whole content digest) of media whose placeholder tokens lie in the block.
        """
        content = parent + self._pack(*token_ids)
        for offset, digest in media:
            content += Struct("<II").pack(offset, len(digest)) + digest
        return blake2b(content, digest_size=DIGEST_BYTES, person=b"samovar-block").digest()

    def extend(self, digests: list[bytes], root: bytes, token_ids: list[int], num_blocks: int) -> None:
        """Append digests until `num_blocks` are known; those already there are not computed again."""
        size = self._block_size
        for i in range(len(digests), num_blocks):
            parent = digests[i - 1] if i else root
            digests.append(self.block_digest(parent, token_ids[i * size : (i + 1) * size]))

    def match(self, digests: list[bytes], root: bytes, token_ids: list[int]) -> list[int]:
        """Blocks of the longest published beginning that leaves at least one token to compute.

        Extends `digests` as far as it has to look, one block beyond the match at most.
        """
        found: list[int] = []
        for i in range((len(token_ids) - 1) // self._block_size):
            if i == len(digests):
                self.extend(digests, root, token_ids, i + 1)
            block = self._pool.find(digests[i])
            if block is None:
                break
            found.append(block)
        return found

    def publish(self, block_ids: SequenceOf[int], digests: SequenceOf[bytes]) -> None:
        """Enter blocks whose every token is computed."""
        for block, digest in zip(block_ids, digests, strict=True):
            self._pool.publish(block, digest)

    def reset(self) -> None:
        """Forget all contents."""
        self._pool.unpublish_all()
