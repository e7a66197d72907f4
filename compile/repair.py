"""Mend an entry of the local cache that cannot be used."""

from typing import Literal

from nxbucket.compile.cache import ArtifactCache, Hit
from nxbucket.compile.leases import collecting
from nxbucket.compile.remote import Pulled, pull
from nxbucket.compile.sound import sound_lookup
from nxbucket.compile.store import Store

Repair = Literal["pulled", "mended meanwhile", "dropped", "left: it is being compiled"]


def repair_entry(cache: ArtifactCache, key: str, store: Store | None) -> Repair:
    """Pull it again, or drop it and the blobs of it that are damaged."""
    with cache.lock(key, blocking=False) as held:
        if not held:
            return "left: it is being compiled"
        if isinstance(sound_lookup(cache, key), Hit):
            return "mended meanwhile"
        if store is not None and isinstance(pull(store, cache, key), Pulled):
            return "pulled"
        entry = cache.entry(key)
        with cache.writing(), collecting(cache.root):
            cache.entry_path(key).unlink(missing_ok=True)
            for blob in () if isinstance(entry, str) else entry.blobs:
                if cache.check_blob(blob) is not None:
                    cache.blob_path(blob.digest).unlink(missing_ok=True)
        return "dropped"
