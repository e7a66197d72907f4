"""A store in S3: obstore moves the bytes, botocore finds region, endpoint and credentials.

botocore, so that it is as the AWS CLI does it: AWS_PROFILE, AWS_REGION, AWS_ENDPOINT_URL, ~/.aws,
SSO, the role of the host or the pod.

Everything happens below the given prefix, so that credentials may be limited to it. Needed rights:
s3:GetObject to serve, s3:PutObject to push, s3:ListBucket to tell what is missing from what is
forbidden, s3:DeleteObject for gc.
"""

import contextlib
import os
import re
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import obstore
import obstore.store
import tenacity
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)

from nxbucket.compile.canonical import file_sha256, sha256_hex
from nxbucket.compile.manifest import MAX_ENTRY_BYTES
from nxbucket.compile.store import (
    CHUNK_BYTES,
    Content,
    OddObject,
    Progress,
    StoredObject,
    copy,
    disk_said,
    other_bytes,
)
from nxbucket.toolkit.errors import StoreError

if TYPE_CHECKING:
    from botocore.session import Session
    from obstore.store import ClientConfig, RetryConfig, S3Config, S3Credential

T = TypeVar("T")
ATTEMPTS = 5
PART_BYTES = 8 << 20
"""A file larger than two of these goes up in parts, a few at a time."""
PARTS_AT_ONCE = 2
CREDENTIALS_LAST = timedelta(minutes=5)
"""Then botocore is asked again, which renews those that end."""
CLIENT: "ClientConfig" = {
    "allow_http": True,  # for an endpoint that says http://; S3's own say https://
    "connect_timeout": "10s",
    "read_timeout": "90s",
    "timeout": "1h",
    "user_agent": "nxbucket",
}
RETRIES: "RetryConfig" = {
    "max_retries": ATTEMPTS - 1,
    "retry_timeout": timedelta(minutes=3),
    "backoff": {
        "init_backoff": timedelta(seconds=0.2),
        "max_backoff": timedelta(seconds=5),
    },
}
BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
ERROR_CODE = re.compile(r"<Code>(\w+)</Code>")
TRIED_AGAIN_OR_ANSWERED = re.compile(r"after \d+ retries|status code")
STATUS = re.compile(r"status code: (\d{3})")
NOT_FOUND = "Object at location"
"""How obstore's FileNotFoundError begins, which the local disk's does not."""
ELSEWHERE = "redirect without LOCATION"
"""What obstore says where S3 answers that the bucket is in another region."""
CREDENTIAL_FAULTS = {
    "ExpiredToken": "they have expired",
    "InvalidAccessKeyId": "there is no such access key",
    "InvalidToken": "the session token is not valid",
    "RequestTimeTooSkewed": "this host's clock is wrong",
    "SignatureDoesNotMatch": "the secret key is not that of the access key",
    "TokenRefreshRequired": "they have expired",
}


class S3Store:
    """`location` is s3://bucket or s3://bucket/prefix; a slash at its end changes nothing."""

    def __init__(self, location: str) -> None:
        bucket, _, prefix = location.removeprefix("s3://").partition("/")
        if not BUCKET.fullmatch(bucket):
            raise StoreError(
                f"{location}: {bucket!r} is no bucket's name", hint="s3://bucket/prefix"
            )
        if not prefix.isprintable():
            raise StoreError(
                f"{location!r}: its prefix cannot be printed", hint="s3://bucket/prefix"
            )
        if {".", ".."} & {*prefix.split("/")}:
            raise StoreError(
                f"{location}: `.` and `..` mean nothing in S3", hint="s3://bucket/prefix"
            )
        self._bucket = bucket
        self._prefix = "".join(f"{part}/" for part in prefix.split("/") if part)
        self._location = f"s3://{bucket}/{self._prefix}".rstrip("/")
        self._opened: obstore.store.S3Store | None = None
        self._credentials: _Credentials | None = None
        self._opening = threading.Lock()

    @property
    def location(self) -> str:
        return self._location

    def read(self, name: str, limit_bytes: int) -> Content | None:
        def act(bucket: obstore.store.S3Store) -> Content:
            found = bucket.get(self._prefix + name)
            if found.meta["size"] > limit_bytes:
                raise OddObject(
                    f"{self._location}/{name}: larger than {limit_bytes} bytes, which no entry is: "
                    "remove it there, and push again"
                )
            return Content(bytes(found.bytes()), str(found.meta["e_tag"]))

        return self._ask(name, "s3:GetObject", act)

    def fetch(self, name: str, into: Path, limit_bytes: int, progress: Progress) -> str | None:
        def act(bucket: obstore.store.S3Store) -> str:
            # A body that breaks off is asked for again from there, by obstore.
            chunks = bucket.get(self._prefix + name).stream(CHUNK_BYTES)
            return copy(chunks, target.write, limit_bytes, progress)

        with disk_said(into), into.open("wb") as target:
            return self._ask(name, "s3:GetObject", act)

    def age_s(self, name: str, size_bytes: int, sha256: str) -> float | None:
        """S3 checked what was written against its checksum, and upload against this sha256."""
        found = self._ask(name, "s3:GetObject", lambda b: b.head(self._prefix + name))
        if found is None or found["size"] != size_bytes:
            return None
        return max(0.0, time.time() - found["last_modified"].timestamp())

    def upload(self, name: str, path: Path, sha256: str, progress: Progress) -> None:
        with disk_said(path):
            size = path.stat().st_size
            in_parts = size > 2 * PART_BYTES
            # What is hashed is what is sent, but for a large file.
            payload = path if in_parts else path.read_bytes()
            found = file_sha256(path) if isinstance(payload, Path) else sha256_hex(payload)
        if found != sha256:
            raise other_bytes(path)

        def act(bucket: obstore.store.S3Store) -> None:
            bucket.put(
                self._prefix + name,
                payload,
                use_multipart=in_parts,
                chunk_size=PART_BYTES,
                max_concurrency=PARTS_AT_ONCE,
            )

        with disk_said(path):
            self._ask(name, "s3:PutObject", act, absent_is_answer=False)
        progress(size)

    def put(self, name: str, payload: bytes, *, replacing: str | None) -> bool:
        mode: Any = "create" if replacing is None else {"e_tag": replacing}
        retrying = tenacity.Retrying(
            # obstore does not send it again where it cannot know whether it came through.
            retry=tenacity.retry_if_exception(_is_broken_off),
            stop=tenacity.stop_after_attempt(ATTEMPTS),
            wait=tenacity.wait_random_exponential(multiplier=0.2, max=5),
            reraise=True,
        )

        def act(bucket: obstore.store.S3Store) -> None:
            retrying(bucket.put, self._prefix + name, payload, mode=mode)

        try:
            self._ask(name, "s3:PutObject", act, absent_is_answer=False)
        except _OtherVersion:
            found = self.read(name, MAX_ENTRY_BYTES)
            return found is not None and found.payload == payload
        return True

    def list(self, prefix: str) -> Iterator[StoredObject]:
        def act(bucket: obstore.store.S3Store) -> list[StoredObject]:
            return [
                StoredObject(
                    found["path"].removeprefix(self._prefix),
                    found["size"],
                    found["last_modified"].timestamp(),
                )
                for page in bucket.list(self._prefix + prefix)
                for found in page
            ]

        yield from self._ask(prefix, "s3:ListBucket", act) or ()

    def delete(self, name: str) -> None:
        self._ask(name, "s3:DeleteObject", lambda b: b.delete(self._prefix + name))

    def _ask(
        self,
        name: str,
        permission: str,
        act: Callable[[obstore.store.S3Store], T],
        *,
        absent_is_answer: bool = True,
    ) -> T | None:
        """None if there is no such object. Raises StoreError, or _OtherVersion."""
        at = f"{self._location}/{name}"
        with self._opening:
            if self._opened is None:
                self._opened = self._open(None)
        try:
            try:
                return act(self._opened)
            except BaseError as err:
                if ELSEWHERE not in str(err) or (region := self._region()) is None:
                    raise
                self._opened = self._open(region)
                return act(self._opened)
        except (AlreadyExistsError, PreconditionError) as err:
            raise _OtherVersion from err
        except BaseError as err:
            raise self._refused(at, permission, err) from err
        except FileNotFoundError as err:
            if not str(err).startswith(NOT_FOUND):
                raise  # The local disk's.
            if absent_is_answer and "NoSuchBucket" not in str(err):
                return None
            raise self._no_bucket(at) from err

    def _open(self, region: str | None) -> obstore.store.S3Store:
        with _configuration_said(self._location):
            import botocore.session

            session = botocore.session.get_session()
            config = _config(session, self._bucket, self._location)
            if region is not None:
                config["region"] = region
            if not config.get("skip_signature"):
                self._credentials = _Credentials(session, self._location)
            return obstore.store.S3Store(
                self._bucket,
                config=config,
                client_options=CLIENT | _trusted(session),
                retry_config=RETRIES,
                credential_provider=self._credentials,
            )

    def _region(self) -> str | None:
        """Where the bucket is: S3 tells everybody, also those who may not see into it."""
        assert self._opened is not None
        endpoint = self._opened.config.get("endpoint")
        host = f"https://{self._bucket}.s3.amazonaws.com"
        request = urllib.request.Request(
            f"{endpoint}/{self._bucket}" if endpoint else host, method="HEAD"
        )
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                headers = answer.headers
        except urllib.error.HTTPError as err:
            headers = err.headers
        except OSError:
            return None
        region: str | None = headers.get("x-amz-bucket-region")
        return region

    def _no_bucket(self, at: str) -> StoreError:
        return StoreError(
            f"{at}: there is no bucket {self._bucket}",
            hint=f"aws s3 mb s3://{self._bucket}, or mend the name",
        )

    def _refused(self, at: str, permission: str, err: BaseException) -> StoreError:
        said = str(err)
        if self._credentials is not None and self._credentials.fault is not None:
            return _configuration_fault(self._location, self._credentials.fault)
        code = found[1] if (found := ERROR_CODE.search(said)) else ""
        status = found[1] if (found := STATUS.search(said)) else ""
        if code == "NoSuchBucket":
            return self._no_bucket(at)
        if fault := CREDENTIAL_FAULTS.get(code):
            return StoreError(
                f"{at}: S3 does not take the credentials: {fault} ({code})",
                hint="aws sts get-caller-identity tells whose they are; aws sso login or aws "
                "configure renews them",
            )
        forbidden = isinstance(err, PermissionDeniedError | UnauthenticatedError)
        if forbidden or status in ("401", "403"):
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
        if ELSEWHERE in said:
            return StoreError(
                f"{at}: the bucket is in another region",
                hint=f"aws s3api get-bucket-location --bucket {self._bucket}, then AWS_REGION",
            )
        return StoreError(
            f"{at}: {_sentence(said)}",
            hint="check the network and AWS_ENDPOINT_URL, AWS_REGION and AWS_PROFILE; what is "
            "done stays done, so the same command goes on from here",
        )


class _OtherVersion(Exception):
    """The object is there already, or is not the version that was to be replaced."""


def _is_broken_off(err: BaseException) -> bool:
    """Whether no answer came, and it was not tried again: neither a refusal nor a lost race."""
    return (
        isinstance(err, BaseError)
        and not isinstance(err, AlreadyExistsError | PreconditionError)
        and TRIED_AGAIN_OR_ANSWERED.search(str(err)) is None
    )


def _config(session: "Session", bucket: str, location: str) -> "S3Config":
    from botocore.configprovider import ConfiguredEndpointProvider

    scoped = session.get_scoped_config()
    config: S3Config = {
        "region": (
            os.environ.get("AWS_REGION") or session.get_config_variable("region") or "us-east-1"
        ).strip(),
        # Of the whole object, and in the signature: it stands for the bytes, as with the AWS CLI.
        "checksum_algorithm": "CRC64NVME",
        "unsigned_payload": True,
        "disable_bulk_delete": True,  # a request of its own for each, below the prefix
        "skip_signature": os.environ.get("AWS_NO_SIGN_REQUEST", "").lower() in ("1", "true", "yes"),
    }
    endpoint = None
    if not session.get_config_variable("ignore_configured_endpoint_urls"):
        endpoint = ConfiguredEndpointProvider(
            full_config=session.full_config, scoped_config=scoped, client_name="s3"
        ).provide()
    if endpoint:
        _check_endpoint(endpoint, location)
        config["endpoint"] = endpoint.rstrip("/")
    elif "." not in bucket:  # a dot in the host's name does not fit S3's certificate
        config["virtual_hosted_style_request"] = True
    return config


def _check_endpoint(endpoint: str, location: str) -> None:
    """obstore does not survive one that is none."""
    try:
        parts = urllib.parse.urlsplit(endpoint)
        good = parts.scheme in ("http", "https") and bool(parts.hostname)
        good = good and (parts.port is None or parts.port > 0)
        good = good and not any(c.isspace() or not c.isprintable() for c in endpoint)
    except ValueError:
        good = False
    if not good:
        raise StoreError(
            f"{location}: the endpoint {endpoint!r} is no address",
            hint="AWS_ENDPOINT_URL (or endpoint_url of the profile) is like "
            "http://127.0.0.1:9000 or https://minio.example.com",
        )


class _Credentials:
    """What obstore asks for keys. Raises StoreError if there are none.

    `fault`: why they could not be renewed, which obstore only tells as a refusal.
    """

    def __init__(self, session: "Session", location: str) -> None:
        found = session.get_credentials()
        if found is None:
            raise StoreError(
                f"{location}: no AWS credentials",
                hint="aws configure, AWS_PROFILE or a role; AWS_NO_SIGN_REQUEST=1 for a public "
                "bucket",
            )
        self._found = found
        self._location = location
        self.fault: Exception | None = None
        self()  # What is wrong with them is said here, and not from within obstore.

    def __call__(self) -> "S3Credential":
        try:
            frozen = self._found.get_frozen_credentials()
        except Exception as err:
            self.fault = err
            raise
        assert frozen.access_key is not None
        assert frozen.secret_key is not None
        for value in (frozen.access_key, frozen.secret_key, frozen.token or ""):
            if any(c.isspace() or not c.isprintable() for c in value):
                raise StoreError(
                    f"{self._location}: the AWS credentials hold a blank or a line's end",
                    hint="take it out of AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY or "
                    "AWS_SESSION_TOKEN",
                )
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": datetime.now(UTC) + CREDENTIALS_LAST,
        }


def _trusted(session: "Session") -> "ClientConfig":
    """The certificates of a company's own endpoint: AWS_CA_BUNDLE, or ca_bundle of the profile."""
    bundle = session.get_config_variable("ca_bundle")
    return {"root_certificate": Path(bundle).read_bytes()} if bundle else {}


@contextlib.contextmanager
def _configuration_said(location: str) -> Iterator[None]:
    """What goes wrong before the first request: profiles, credentials, certificates."""
    import botocore.exceptions as aws

    try:
        yield
    except (aws.BotoCoreError, aws.ClientError, BaseError, OSError, ValueError) as err:
        raise _configuration_fault(location, err) from err


def _configuration_fault(location: str, err: Exception) -> StoreError:
    return StoreError(
        f"{location}: {_sentence(str(err))}",
        hint="check AWS_PROFILE, ~/.aws/config, AWS_CA_BUNDLE and AWS_WEB_IDENTITY_TOKEN_FILE; aws "
        "sts get-caller-identity tells what the AWS CLI makes of them, aws sso login renews them",
    )


def _sentence(said: str) -> str:
    """Without obstore's pages for its developers, and the address, which is said already."""
    first = " ".join(said.partition("Debug source:")[0].split())
    found = REQUEST.search(first)
    if found is None:
        return first
    why = next((words for sign, words in SIGNS.items() if sign in said), found["why"])
    tries = f", asked {int(found['retries']) + 1} times" if found["retries"] else ""
    return f"{why} ({found['method']}, after {float(found['time']):.1f} {found['unit']}{tries})"


REQUEST = re.compile(
    r"Error performing (?P<method>[A-Z]+) \S+ in (?P<time>[\d.]+)(?P<unit>\w*)"
    r"(, after (?P<retries>\d+) retries[^-]*)?\s+- (?P<why>.*)"
)
SIGNS = {
    "ConnectionRefused": "connection refused: nothing listens there",
    "dns error": "no such host",
    "kind: Timeout": "no answer in time",
    "ConnectionReset": "the connection was broken off",
}
