"""The text of a server's /metrics: asked for over HTTP, or read from a file."""

import http.client
import socket
import ssl
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

from nxbucket.toolkit.buckets import show
from nxbucket.toolkit.errors import TraceError, UsageError

MOST_BYTES = 1 << 26
_SAVE = "curl -s http://host:8000/metrics > metrics.txt"


def metrics_text(source: str, *, api_key: str | None, timeout_s: float) -> str:
    """Raises UsageError if `source` is neither a URL nor a file, TraceError for all else."""
    is_url = source.lower().startswith(("http://", "https://"))
    content = _asked(_url_of(source), api_key, timeout_s) if is_url else _saved(Path(source))
    if len(content) > MOST_BYTES:
        raise TraceError(
            f"{source} is more than {MOST_BYTES >> 20} MiB: no server's metrics",
            hint=f"{_SAVE} saves them",
        )
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise TraceError(
            f"{source} is no text of Prometheus metrics: it is not UTF-8", hint=f"{_SAVE} saves it"
        ) from None


def _url_of(source: str) -> str:
    """The server's root, or a prefix of a proxy, does as well."""
    address = source.rstrip("/")
    try:
        path = urlsplit(address).path
    except ValueError as err:
        raise UsageError(f"{show(source)} is no URL: {err}", hint="http://host:8000") from None
    return address if path.endswith("/metrics") else f"{address}/metrics"


def _saved(file: Path) -> bytes:
    try:
        with file.open("rb") as raw:
            return raw.read(MOST_BYTES + 1)
    except FileNotFoundError:
        url = f"http://{file}" if ":" in str(file) else "http://host:8000"
        raise UsageError(
            f"no such file: {file}", hint=f"name a file of metrics, or a server's URL: {url}"
        ) from None
    except ValueError as err:  # a null byte in the name
        raise UsageError(
            f"{str(file)!r} is no file name: {err}", hint=f"{_SAVE} saves one"
        ) from None
    except OSError as err:
        raise TraceError(
            f"{file} cannot be read: {err.strerror or err}", hint="check its path and permissions"
        ) from None


def _asked(url: str, api_key: str | None, timeout_s: float) -> bytes:
    try:
        request = urllib.request.Request(url)
        if api_key is not None:
            # Not to where the server may redirect.
            request.add_unredirected_header("Authorization", f"Bearer {api_key}")
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            content: bytes = response.read(MOST_BYTES + 1)
            return content
    except urllib.error.HTTPError as err:
        with err:
            raise TraceError(
                f"{url} answers {err.code} {err.reason}", hint=_mend(err.code)
            ) from None
    except (OSError, http.client.HTTPException, ValueError) as err:
        reason = err.reason if isinstance(err, urllib.error.URLError) else err
        raise _unanswered(url, reason, timeout_s) from None


def _mend(status: int) -> str:
    if status in (401, 403):
        return "set VLLM_API_KEY to the key it wants, or save the text and name the file"
    if status == 404:
        return "give the server's root, http://host:8000; a proxy may hide /metrics"
    return f"ask the server itself, not a proxy: {_SAVE}"


def _unanswered(url: str, reason: object, timeout_s: float) -> TraceError:
    match reason:
        case ConnectionRefusedError():
            what, hint = "nothing listens there", "is the server up, and is that its port?"
        case TimeoutError():
            what, hint = f"no answer within {timeout_s:g} s", "is the server up, or behind a proxy?"
        case socket.gaierror():
            what, hint = "no such host", "check the host's name"
        case ssl.SSLError():
            what, hint = f"TLS fails: {reason}", "is it http://, or a certificate of your own?"
        case _:
            what = str(reason) or type(reason).__name__
            hint = f"the URL is that of a server, such as http://host:8000; or {_SAVE}"
    return TraceError(f"{url}: {show(what, 200)}", hint=hint)
