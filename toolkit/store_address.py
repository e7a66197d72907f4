"""What may stand for a store: s3://bucket/prefix, or the path of a folder."""

import re

NEARLY_S3 = re.compile(r"s3(:|//)", re.IGNORECASE)


def is_folder(address: str) -> bool:
    """Whether an address other than s3://… is a folder's: `s3:/x`, `gs://x` and nothing are not."""
    return bool(address.strip()) and "://" not in address and not NEARLY_S3.match(address)
