"""The way to the hub: one client, and its complaints as errors that a person can act on.

HF_ENDPOINT says where the hub is, HF_TOKEN who asks; both come from the environment alone, and the
token goes nowhere but into the request. A token that `hf auth login` left in a file is not used.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

from speculators_core.errors import (
    CheckpointError,
    Forbidden,
    InputError,
    NotFound,
    SpeclabError,
    Unavailable,
)
from speculators_core.hub.reference import HubId

if TYPE_CHECKING:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

_PUBLIC = "https://huggingface.co"
_TIMEOUT_S = 20.0  # without a byte
_NO_DIRECTORY = "if a directory is meant: none of this name is here"


def endpoint() -> str:
    """Where the hub is."""
    return (os.environ.get("HF_ENDPOINT") or _PUBLIC).rstrip("/")


def token() -> str | bool:
    """What HF_TOKEN holds; False: ask as nobody in particular."""
    return (os.environ.get("HF_TOKEN") or "").strip() or False


def api() -> HfApi:
    """A client of the hub that the environment names."""
    from huggingface_hub import HfApi
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

    disable_progress_bars()
    return HfApi(endpoint=endpoint(), token=token(), library_name="speclab")


@contextmanager
def speaking(hub_id: HubId) -> Iterator[None]:
    """Turn whatever the hub's client raises into our errors. Messages carry no token."""
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        yield
    except SpeclabError:
        raise
    except GatedRepoError as error:
        raise _gated(hub_id) from error
    except RevisionNotFoundError as error:
        raise NotFound(
            f"the repository has no revision {hub_id.revision or 'main'!r}",
            where=str(hub_id),
            hint="give a branch, a tag or a commit that its page lists",
        ) from error
    except RepositoryNotFoundError as error:
        raise _missing(hub_id) from error
    except LocalEntryNotFoundError as error:
        raise unreachable(hub_id, error.__cause__ or error) from error
    except EntryNotFoundError as error:
        raise NotFound(
            "the repository lacks a file that it lists", where=str(hub_id), hint="try again"
        ) from error
    except HFValidationError as error:
        raise InputError(
            "the hub takes no repository of this name", where=str(hub_id), hint="check the id"
        ) from error
    except OfflineModeIsEnabled as error:
        raise Unavailable(
            "the hub can't be reached: HF_HUB_OFFLINE is set, and the files are not all here",
            where=str(hub_id),
            hint="unset HF_HUB_OFFLINE, or give a directory",
        ) from error
    except HfHubHTTPError as error:
        raise _refused(hub_id, error) from error
    except OSError as error:
        raise _local(hub_id, error) from error
    except Exception as error:  # the client raises whatever its transport does
        raise unreachable(hub_id, error) from error


@contextmanager
def asking(hub_id: HubId, name: str, first: int, last: int | None = None) -> Iterator[Any]:
    """The streamed answer to a request for the bytes `first` to `last` (included; None: the end)
    of a file, its status checked: 206, or 200 from a server that sends the whole file. The client
    drops the token where it is sent on to another host.
    """
    from huggingface_hub import get_session, hf_hub_url, hf_raise_for_status
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    url = hf_hub_url(hub_id.repository, name, revision=hub_id.revision, endpoint=endpoint())
    headers = build_hf_headers(token=token(), library_name="speclab")
    headers |= {"Accept-Encoding": "identity"}
    if first or last is not None:
        headers["Range"] = f"bytes={first}-{'' if last is None else last}"
    with get_session().stream("GET", url, headers=headers, timeout=_TIMEOUT_S) as response:
        if response.status_code >= 400:
            response.read()
        hf_raise_for_status(response)
        yield response


def transport_errors() -> tuple[type[Exception], ...]:
    """What a connection that breaks raises; which of two packages speaks HTTP depends on the
    version of huggingface_hub.
    """
    from huggingface_hub import get_session

    transport: Any = import_module(type(get_session()).__module__.partition(".")[0])
    return (transport.TransportError,)


def unreachable(hub_id: HubId, error: BaseException) -> Unavailable:
    """The hub did not answer."""
    return Unavailable(
        f"the hub can't be reached ({type(error).__name__})",
        where=f"{endpoint()}: {hub_id}",
        hint="check the network and HF_ENDPOINT; or download the files elsewhere and give their "
        f"directory ({_NO_DIRECTORY})",
    )


def _gated(hub_id: HubId) -> Forbidden:
    asked = "the account of HF_TOKEN has not been let in" if token() else "HF_TOKEN is not set"
    return Forbidden(
        f"the repository is gated: its owner decides who may download it, and {asked}",
        where=str(hub_id),
        hint=f"accept its terms at {endpoint()}/{hub_id.repository}, then set HF_TOKEN to a token "
        "of that account",
    )


def _missing(hub_id: HubId) -> NotFound:
    seen = "HF_TOKEN may not see it" if token() else "it is private and HF_TOKEN is not set"
    return NotFound(
        f"the hub has no such repository, or {seen}",
        where=f"{endpoint()}: {hub_id}",
        hint=f"check the id; for a private repository set HF_TOKEN ({_NO_DIRECTORY})",
    )


def _refused(hub_id: HubId, error: HfHubHTTPError) -> SpeclabError:
    status = error.response.status_code
    where = f"{endpoint()}: {hub_id}"
    if status == 401:
        return Forbidden(
            "the hub does not accept the token", where=where, hint="is HF_TOKEN right and alive?"
        )
    if status == 403:
        return Forbidden(
            "the hub forbids this to the account of HF_TOKEN",
            where=where,
            hint="uploads need a token with the right to write to this name",
        )
    if status == 429:
        return Unavailable(
            "the hub asks to slow down", where=where, hint="wait a few minutes and try again"
        )
    return Unavailable(f"the hub answered with status {status}", where=where, hint="try again")


def _local(hub_id: HubId, error: OSError) -> SpeclabError:
    """A fault of this machine's disk; the transport's own errors may be OSErrors, too."""
    if error.filename is None and error.errno is None:
        return unreachable(hub_id, error)
    return Unavailable(
        f"the download can't be kept: {error.strerror or type(error).__name__}",
        where=str(error.filename or hub_id),
        hint="is there space, and may this user write there? HF_HOME says where downloads go",
    )


def damaged(hub_id: HubId, name: str) -> CheckpointError:
    """A file that arrived, but not as the hub describes it."""
    return CheckpointError(
        f"{name} arrived otherwise than the hub describes it; what came was deleted",
        where=str(hub_id),
        hint="download it again",
    )
