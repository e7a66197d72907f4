"""A store in S3, through boto3: region, endpoint, profile and credentials are found as the AWS CLI
finds them (AWS_PROFILE, AWS_REGION, AWS_ENDPOINT_URL, ~/.aws, roles of the host or the pod).

Everything happens below the given prefix, so that credentials may be limited to it. Needed rights:
s3:GetObject to serve, s3:PutObject to push, s3:ListBucket to tell what is missing from what is
forbidden, s3:DeleteObject for gc.
"""

import base64
import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import boto3
import botocore.exceptions as aws
import tenacity
from boto3.s3.transfer import TransferConfig
from botocore import UNSIGNED
from botocore.config import Config

from nxbucket.compile.store import MAX_PUT_BYTES, Content, Progress, StoredObject, copy
from nxbucket.toolkit.errors import StoreError

T = TypeVar("T")
MAX_CONNECTIONS = 32
ATTEMPTS = 5
CONNECT_TIMEOUT_S = 10
READ_TIMEOUT_S = 60
MULTIPART_BYTES = 256 << 20
ABSENT = {"NoSuchKey", "404", "NotFound"}
FORBIDDEN = {"403", "AccessDenied", "Forbidden", "AllAccessDisabled"}
NOT_THE_VERSION = {"PreconditionFailed", "412", "ConditionalRequestConflict", "409"}
BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")

BROKEN_OFF = (
    aws.IncompleteReadError,
    aws.ResponseStreamingError,
    aws.ReadTimeoutError,
    aws.ConnectionClosedError,
)
"""A body that ended too soon: botocore's own retries end where the headers do."""


class S3Store:
    """`location` is s3://bucket or s3://bucket/prefix; a slash at its end changes nothing."""

    def __init__(self, location: str) -> None:
        bucket, _, prefix = location.removeprefix("s3://").partition("/")
        if not BUCKET.fullmatch(bucket):
            raise StoreError(
                f"{location}: {bucket!r} is no bucket's name", hint="s3://bucket/prefix"
            )
        self._bucket = bucket
        self._prefix = "".join(f"{part}/" for part in prefix.split("/") if part)
        self._location = f"s3://{bucket}/{self._prefix}".rstrip("/")
        with self._said(""):
            self._client = _client()

    @property
    def location(self) -> str:
        return self._location

    def read(self, name: str, limit_bytes: int) -> Content | None:
        def attempt() -> Content | None:
            found = self._get(name)
            if found is None:
                return None
            with contextlib.closing(found["Body"]) as body:
                if found["ContentLength"] > limit_bytes:
                    raise StoreError(
                        f"{self._location}/{name}: larger than {limit_bytes} bytes, which no entry "
                        "is"
                    )
                return Content(body.read(), found["ETag"])

        return self._again_if_broken_off(name, attempt)

    def fetch(self, name: str, into: Path, limit_bytes: int, progress: Progress) -> str | None:
        def attempt() -> str | None:
            found = self._get(name)
            if found is None:
                return None
            done = 0

            def more(num_bytes: int) -> None:
                nonlocal done
                done += num_bytes
                progress(num_bytes)

            with contextlib.closing(found["Body"]) as body, into.open("wb") as target:
                try:
                    return copy(body.read, target.write, limit_bytes, more)
                except BROKEN_OFF:
                    progress(-done)
                    raise

        return self._again_if_broken_off(name, attempt)

    def age_s(self, name: str, size_bytes: int, sha256: str) -> float | None:
        try:
            with self._said(name, "s3:GetObject"):
                found = self._client.head_object(**self._at(name), ChecksumMode="ENABLED")
        except _Absent:
            return None
        known = found.get("ChecksumSHA256")
        other = known is not None and "-" not in known and known != _base64(sha256)
        if other or found["ContentLength"] != size_bytes:
            return None
        written_s: float = found["LastModified"].timestamp()
        return max(0.0, time.time() - written_s)

    def upload(self, name: str, path: Path, sha256: str, progress: Progress) -> None:
        size = path.stat().st_size
        with self._said(name, "s3:PutObject"):
            if size > MULTIPART_BYTES:
                self._client.upload_file(
                    str(path),
                    self._bucket,
                    self._prefix + name,
                    ExtraArgs={"ChecksumAlgorithm": "SHA256"},
                    Config=TransferConfig(multipart_threshold=MULTIPART_BYTES),
                    Callback=progress,
                )
                return
            with path.open("rb") as body:
                self._client.put_object(**self._at(name), Body=body, ChecksumSHA256=_base64(sha256))
        progress(size)

    def put(self, name: str, payload: bytes, *, replacing: str | None) -> bool:
        condition = {"IfNoneMatch": "*"} if replacing is None else {"IfMatch": replacing}
        try:
            with self._said(name, "s3:PutObject"):
                self._client.put_object(
                    **self._at(name), Body=payload, ChecksumAlgorithm="SHA256", **condition
                )
        except (_OtherVersion, _Absent):
            # A request that was retried may have met its own first attempt: then it is there.
            found = self.read(name, MAX_PUT_BYTES)
            return found is not None and found.payload == payload
        return True

    def list(self, prefix: str) -> Iterator[StoredObject]:
        with self._said(prefix, "s3:ListBucket"):
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=self._prefix + prefix
            )
            for page in pages:
                for found in page.get("Contents", ()):
                    yield StoredObject(
                        found["Key"].removeprefix(self._prefix),
                        found["Size"],
                        found["LastModified"].timestamp(),
                    )

    def delete(self, name: str) -> None:
        with contextlib.suppress(_Absent), self._said(name, "s3:DeleteObject"):
            self._client.delete_object(**self._at(name))

    def _get(self, name: str) -> dict[str, Any] | None:
        try:
            with self._said(name, "s3:GetObject"):
                found: dict[str, Any] = self._client.get_object(**self._at(name))
                return found
        except _Absent:
            return None

    def _at(self, name: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": self._prefix + name}

    def _again_if_broken_off(self, name: str, attempt: Callable[[], T]) -> T:
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(BROKEN_OFF),
            stop=tenacity.stop_after_attempt(ATTEMPTS),
            wait=tenacity.wait_random_exponential(multiplier=0.2, max=5),
            reraise=True,
        )
        with self._said(name, "s3:GetObject"):
            return retrying(attempt)

    @contextlib.contextmanager
    def _said(self, name: str, permission: str = "") -> Iterator[None]:
        """botocore's exceptions as ours; absence and a lost race as exceptions of their own."""
        at = f"{self._location}/{name}" if name else self._location
        try:
            yield
        except aws.ClientError as err:
            code = str(err.response.get("Error", {}).get("Code", ""))
            if code in ABSENT:
                raise _Absent from err
            if code in NOT_THE_VERSION:
                raise _OtherVersion from err
            raise self._refused(at, code, permission, err) from err
        except aws.NoCredentialsError as err:
            raise StoreError(
                f"{at}: no AWS credentials",
                hint="aws configure, AWS_PROFILE or a role; AWS_NO_SIGN_REQUEST=1 for a public "
                "bucket",
            ) from err
        except (aws.BotoCoreError, OSError) as err:
            raise StoreError(
                f"{at}: {_sentence(err)}",
                hint="check the network and AWS_ENDPOINT_URL, AWS_REGION and AWS_PROFILE; what is "
                "done stays done, so the same command goes on from here",
            ) from err

    def _refused(self, at: str, code: str, permission: str, err: aws.ClientError) -> StoreError:
        if code in FORBIDDEN:
            absent = (
                ". Without s3:ListBucket, S3 gives the same answer for an object that is not there"
                if permission == "s3:GetObject"
                else ""
            )
            return StoreError(
                f"{at}: access denied{absent}",
                hint=f"grant {permission} on arn:aws:s3:::{self._bucket}/{self._prefix}* and "
                f"s3:ListBucket on arn:aws:s3:::{self._bucket}, or use other credentials",
            )
        if code == "NoSuchBucket":
            return StoreError(
                f"{at}: there is no bucket {self._bucket}", hint="aws s3 mb, or mend the name"
            )
        headers = err.response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
        if region := headers.get("x-amz-bucket-region"):
            return StoreError(
                f"{at}: the bucket is in {region}", hint=f"export AWS_REGION={region}"
            )
        return StoreError(
            f"{at}: S3 answers {_sentence(err)}",
            hint="what is done stays done: the same command goes on from here",
        )


class _Absent(Exception):
    pass


class _OtherVersion(Exception):
    pass


def _client() -> Any:
    unsigned = os.environ.get("AWS_NO_SIGN_REQUEST", "").lower() in ("1", "true", "yes")
    return boto3.Session().client(
        "s3",
        config=Config(
            connect_timeout=CONNECT_TIMEOUT_S,
            read_timeout=READ_TIMEOUT_S,
            max_pool_connections=MAX_CONNECTIONS,
            retries={"mode": "standard", "total_max_attempts": ATTEMPTS},
            # Every byte is checked against the sha256 in its name, or parsed as an entry is.
            response_checksum_validation="when_required",
            signature_version=UNSIGNED if unsigned else None,
        ),
    )


def _base64(sha256: str) -> str:
    return base64.b64encode(bytes.fromhex(sha256)).decode()


def _sentence(err: BaseException) -> str:
    return " ".join(str(err).split()) or type(err).__name__
