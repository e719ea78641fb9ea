"""Rows as objects of S3, Google Cloud Storage or Azure, or of a server that speaks like one of them.

    {prefix}/{scope, 16 hex digits}/{key, hex}        a header (`seal`) and the row

An object is written once: if the server can tell that it exists, it stays as it is and counts as stored.
Rows are sent from their own memory and copied once when they arrive. Of an object that is too long, not
much more than a row is read, whatever the server says about its length. A request, with one quick retry,
ends within the time-out of the backend; the rest of a batch is not tried if the server did not answer or
the time is up.

Errors are `OSError`s of one line. They never repeat the text of the server or the client library, which may
hold addresses with signatures. Any thread may call; calls block without the GIL.
"""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar
from urllib.parse import urlsplit

from kvtier.errors import ConfigError
from kvtier.tier_config import ObjectConfig
from kvtier.tiers.base import Backend, BackendRow
from kvtier.tiers.seal import HEADER_BYTES, copy_into, pack_header, seal_in

if TYPE_CHECKING:
    from obstore.store import AzureStore, GCSStore, S3Store

_T = TypeVar("_T")

_REQUEST_SHARE = 0.8
"""The part of the time-out that one request may take: a retry at the last moment still ends in time."""
_RETRY_SHARE = 0.1
_CONNECT_SHARE = 0.4
_BACKOFF = timedelta(milliseconds=20)

_STATUS = re.compile(r"non-2xx status code: (\d{3})")
_HTTP_KIND = re.compile(r"HttpError \{\s+kind: (\w+)")
_SOURCE = re.compile(r"source: ([A-Z]\w+) ?[{,]")
_CODE = re.compile(r"<Code>(\w{1,64})</Code>")
_CREDENTIAL_HOSTS = r"169\.254\.|metadata\.google|sts\.|oauth2\.|login\.microsoft"
_CREDENTIALS = re.compile(rf"https?://({_CREDENTIAL_HOSTS})|/latest/api/token")
"""The addresses that the store asks for credentials when it was given none."""


class ObjectBackend(Backend):
    """Objects of one bucket. Each row knows its length; a probe moves `row_bytes`."""

    contains_batch = 1
    writes_once = True

    def __init__(self, config: ObjectConfig, row_bytes: int, *, timeout: float) -> None:
        """Open a store without any request. `ConfigError`: no package, or a wrong setting."""
        try:
            import obstore
        except ImportError:
            raise ConfigError(
                "object", "needs the package obstore: in a checkout, pip install '.[object]'"
            ) from None
        self._obstore, self._exceptions = obstore, obstore.exceptions
        self.url, self._row_bytes, self._timeout = config.url, row_bytes, timeout
        self._prefix = urlsplit(config.url).path.strip("/")
        self._create = True
        try:
            self._store = _open_store(config, timeout)
        except self._exceptions.BaseError as error:
            what = _SOURCE.findall(str(error))
            hint = "; set AZURE_STORAGE_ACCOUNT_NAME" if "MissingAccount" in what else ""
            problem = f"the store does not take its settings or credentials: {', '.join(what)}{hint}"
            raise ConfigError("object", problem) from None

    def __repr__(self) -> str:
        return f"ObjectBackend({self.url})"

    def write(self, rows: Sequence[BackendRow]) -> list[OSError | None]:
        return self._move_all(self._write, rows)

    def read(self, rows: Sequence[BackendRow]) -> list[bytes | OSError | None]:
        return self._move_all(self._read, rows)

    def contains(self, rows: Sequence[BackendRow]) -> list[bool]:
        answers = self._move_all(self._contains, rows)
        for answer in answers:
            if isinstance(answer, OSError):
                raise answer
        return [answer is True for answer in answers]

    def delete(self, rows: Sequence[BackendRow]) -> None:
        for answer in self._move_all(self._delete, rows):
            if isinstance(answer, OSError):
                raise answer

    def probe(self) -> None:
        """Raise `OSError` if the store does not accept an object as long as a row, or does not return it.

        A small object might pass where no row does. All engines use one name for the probe, and leave the
        object there.
        """
        name = self._name("probe")
        try:
            self._obstore.put(self._store, name, bytes(self._row_bytes), use_multipart=False)
            found = self._fetch(name, self._row_bytes)
        except BaseException as error:
            raise self._translate(error) from None
        if len(found) != self._row_bytes:
            came = f"more than {self._row_bytes}" if len(found) > self._row_bytes else len(found)
            problem = f"the probe came back with {came} bytes instead of {self._row_bytes}"
            raise OSError(errno.EIO, f"object store {self.url}: {problem}")

    def close(self) -> None:
        return

    # -- one row -----------------------------------------------------------------------------------

    def _move_all(self, move: Callable[[BackendRow], _T], rows: Sequence[BackendRow]) -> list[_T | OSError]:
        """Move rows one after the other; stop when the server does not answer or the time is up."""
        answers: list[_T | OSError] = []
        until, down = time.monotonic() + self._timeout, None
        for row in rows:
            if down is None and time.monotonic() >= until:
                down = OSError(errno.ETIMEDOUT, f"object store {self.url}: no time was left for this row")
            if down is not None:
                answers.append(down)
                continue
            try:
                answers.append(move(row))
            except BaseException as error:
                told = self._translate(error)
                down = told if isinstance(told, (ConnectionError, TimeoutError)) else None
                answers.append(told)
        return answers

    def _write(self, row: BackendRow) -> None:
        name = self._row_name(row)
        buffers: list[Any] = [pack_header(row), *row.pieces]
        mode: Literal["create", "overwrite"] = "create" if self._create else "overwrite"
        try:
            self._obstore.put(self._store, name, iter(buffers), mode=mode, use_multipart=False)
        except self._exceptions.AlreadyExistsError:
            return
        except self._exceptions.BaseError as error:
            if not self._create or _status(error) != 501:
                raise
            self._create = False  # the server has no conditional writes
            self._write(row)

    def _read(self, row: BackendRow) -> bytes | None:
        nbytes = HEADER_BYTES + row.nbytes
        try:
            value = self._fetch(self._row_name(row), nbytes)
        except FileNotFoundError:
            return None
        if len(value) != nbytes:
            return b""
        copy_into(row.pieces, value[HEADER_BYTES:])
        return seal_in(value[:HEADER_BYTES], row)

    def _fetch(self, name: str, nbytes: int) -> memoryview:
        """Return an object; of one that is longer than `nbytes`, a little more than that.

        The stream stops there: a server may announce this range and send without end. A range that is as
        long as announced arrives in one piece.
        """
        try:
            answer = self._obstore.get(self._store, name, options={"range": (0, nbytes + 1)})
            return memoryview(next(answer.stream(min_chunk_size=nbytes + 1), b""))
        except self._exceptions.BaseError as error:
            if _status(error) == 416:  # an empty object has no range
                return memoryview(b"")
            raise

    def _contains(self, row: BackendRow) -> bool:
        try:
            self._obstore.head(self._store, self._row_name(row))
        except FileNotFoundError:
            return False
        return True  # its length does not matter: a read that fails its check deletes it

    def _delete(self, row: BackendRow) -> None:
        try:
            self._obstore.delete(self._store, self._row_name(row))
        except FileNotFoundError:
            return

    def _row_name(self, row: BackendRow) -> str:
        return self._name(f"{row.scope:016x}/{row.key.hex()}")

    def _name(self, rest: str) -> str:
        return f"{self._prefix}/{rest}" if self._prefix else rest

    # -- errors ------------------------------------------------------------------------------------

    def _translate(self, error: BaseException) -> OSError:
        """Describe an error in one line and our own words: the original may hold addresses with secrets.

        Errors of other origins than the client and the system are raised again.
        """
        if type(error).__name__ == "PanicException":  # of compiled code: not an Exception, and in no module
            hint = "is there a line end in a credential or in object.region?"
            return OSError(errno.ECONNABORTED, f"object store {self.url}: the client panicked; {hint}")
        if not isinstance(error, (self._exceptions.BaseError, OSError)):
            raise error
        text = str(error)
        status, kind, code = _status(error), _HTTP_KIND.search(text), _CODE.search(text)
        refusals = (self._exceptions.PermissionDeniedError, self._exceptions.UnauthenticatedError)
        if isinstance(error, refusals):
            number, problem = errno.EACCES, "these credentials may not do that"
            if self.url.startswith("s3:") and not text.partition("performing ")[2].startswith("PUT"):
                problem += "; without s3:ListBucket that is said of absent objects, too"
        elif isinstance(error, FileNotFoundError):
            number, problem = errno.ENOENT, "there is no such bucket or container"
        elif _CREDENTIALS.search(text):
            number, problem = errno.EACCES, "no credentials could be had"
        elif status:
            number, problem = errno.EIO, "the server failed"
        elif kind is not None and kind[1] == "Timeout":
            number, problem = errno.ETIMEDOUT, f"no answer within {self._timeout:g} s"
        elif kind is not None:
            number, problem = errno.ECONNREFUSED, "the server cannot be reached, or does not speak HTTP"
        elif "without LOCATION" in text:
            number, problem = errno.EIO, "the server sends us elsewhere; is the region right?"
        else:
            number, problem = errno.EIO, f"the client failed with {type(error).__name__}"
        answer = f" (HTTP {status}{f', {code[1]}' if code else ''})" if status else ""
        return OSError(number, f"object store {self.url}: {problem}{answer}")


def _status(error: Exception) -> int:
    """Return the HTTP status in an error of the client library; 0: there is none."""
    found = _STATUS.search(str(error))
    return int(found[1]) if found else 0


def _open_store(config: ObjectConfig, timeout: float) -> S3Store | GCSStore | AzureStore:
    from obstore.store import AzureStore, GCSStore, S3Store

    url = urlsplit(config.url)
    settings: dict[str, Any] = {
        "client_options": {
            "allow_http": config.allow_http,
            "timeout": timedelta(seconds=_REQUEST_SHARE * timeout),
            "connect_timeout": timedelta(seconds=_CONNECT_SHARE * timeout),
        },
        "retry_config": {
            "max_retries": 1,
            "retry_timeout": timedelta(seconds=_RETRY_SHARE * timeout),
            "backoff": {"init_backoff": _BACKOFF, "max_backoff": _BACKOFF, "base": 2},
        },
    }
    if config.endpoint is not None:
        settings["base_url" if url.scheme == "gs" else "endpoint"] = config.endpoint
    if url.scheme == "az":
        return AzureStore(url.netloc, **settings)
    if url.scheme == "gs":
        return GCSStore(url.netloc, **settings)
    if config.region is not None:
        settings["region"] = config.region
    if (provider := _profile_credentials()) is not None:
        settings["credential_provider"] = provider
    # The seal protects the bytes: without a second digest in the request a put takes half as long.
    return S3Store(url.netloc, unsigned_payload=True, disable_bulk_delete=True, **settings)


def _profile_credentials() -> Any:
    """Return a provider that reads AWS profile files, which the store does not; `None` without profiles."""
    names = ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI")
    if any(os.environ.get(name) for name in (*names, "AWS_CONTAINER_CREDENTIALS_FULL_URI")):
        return None
    file = Path(os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or "~/.aws/credentials").expanduser()
    if not os.environ.get("AWS_PROFILE") and not file.is_file():
        return None
    try:
        from botocore.exceptions import BotoCoreError
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError:
        raise ConfigError("object", "AWS profiles need the package boto3: pip install boto3") from None
    try:
        return Boto3CredentialProvider()
    except (BotoCoreError, ValueError) as error:
        problem = f"AWS profiles give no credentials: {type(error).__name__}; is AWS_PROFILE right?"
        raise ConfigError("object", problem) from None
