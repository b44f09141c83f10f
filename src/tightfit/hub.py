"""The Hugging Face hub: whether it can be asked, and what went wrong where it was."""

from __future__ import annotations

import socket
from pathlib import Path
from pickle import UnpicklingError
from threading import Thread
from urllib.parse import urlsplit
from urllib.request import getproxies

from tightfit.bundled import BUNDLED, bundled_family, bundled_shape
from tightfit.errors import nearest, one_line

HUB_SECONDS = 2.0
"""Seconds that the hub has to answer; its client would try again for half a minute."""


def only_local(name: str) -> bool:
    """Whether files of a name on the hub are to be taken from this machine's cache alone, since neither the hub nor the
    proxy before it answers; False for a folder."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or Path(name).is_dir():  # of which the client knows itself
        return False
    address = urlsplit(getproxies().get("https") or constants.ENDPOINT)
    answered: list[bool] = []

    def connect() -> None:
        try:
            port = address.port or (80 if address.scheme == "http" else 443)
            with socket.create_connection((address.hostname, port), timeout=HUB_SECONDS):
                answered.append(True)
        except OSError:
            pass

    thread = Thread(target=connect, daemon=True)  # looking up a name knows no time limit
    thread.start()
    thread.join(HUB_SECONDS)
    return not answered


def explain_hub_error(name: str, error: BaseException) -> str:
    """One sentence for what went wrong while a folder or a Hugging Face model was read, and what to do."""
    from huggingface_hub import errors
    from safetensors import SafetensorError

    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    where, like, family = f"model: {name!r}", bundled_shape(name), ", ".join(bundled_family(name))
    shape = f"for a plan write model={like}, its bundled shape" if like else (
        f"for a plan there are bundled shapes of its family: {family}" if family else "or a bundled model")
    for kinds, sentence in (
        ((errors.GatedRepoError,), "is gated: accept its terms on its page, then run: hf auth login"),
        ((errors.RepositoryNotFoundError, errors.RevisionNotFoundError),
         f"is not on the Hugging Face hub, or is private; {nearest(name, BUNDLED)}"),
        ((errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError, ConnectionError, TimeoutError),
         "is not cached, for its config.json is not on this machine, and the Hugging Face hub cannot be reached; name "
         f"a folder that holds it, model=path/to/folder; {shape}"),
    ):
        if any(isinstance(cause, kinds) for cause in causes):
            return f"{where} {sentence}"
    if isinstance(error, UnpicklingError):
        return (f"model: the pickled weights of {name!r} hold more than tensors, or are damaged, and are not read; "
                "write a model with safetensors, or pretrained=false")
    if isinstance(error, SafetensorError) or "PytorchStreamReader" in str(error):
        return damaged_weights(name, error)
    if "trust_remote_code" in str(error):
        return f"{where} comes with Python code of its own; read it, then write trust_remote_code=true"
    return f"{where} cannot be read: {one_line(error)}"


def damaged_weights(name: str, error: BaseException) -> str:
    """One sentence for weights of a folder or a Hugging Face model that are cut off or otherwise damaged."""
    again = "save, copy or download that folder again" if Path(name).is_dir() else (
        f"download them again by: hf download {name} --force-download")
    return f"model: the weights of {name!r} are damaged ({one_line(error)}); {again}, or write pretrained=false"
