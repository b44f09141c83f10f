"""Errors of the Hugging Face hub's client, in one sentence each."""

from __future__ import annotations

from tightfit.bundled import BUNDLED
from tightfit.errors import nearest, one_line


def explain_hub_error(name: str, error: BaseException) -> str:
    """One sentence for what went wrong while a folder or a Hugging Face model was read, and what to do."""
    from huggingface_hub import errors

    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    where = f"model: {name!r}"
    for kinds, sentence in (
        ((errors.GatedRepoError,), "is gated: accept its terms on its page, then run: hf auth login"),
        ((errors.RepositoryNotFoundError, errors.RevisionNotFoundError),
         f"is not on the Hugging Face hub, or is private; {nearest(name, BUNDLED)}"),
        ((errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError, ConnectionError, TimeoutError),
         "is not cached, and the Hugging Face hub cannot be reached; name a local folder or a bundled model"),
    ):
        if any(isinstance(cause, kinds) for cause in causes):
            return f"{where} {sentence}"
    if "trust_remote_code" in str(error):
        return f"{where} comes with Python code of its own; read it, then write trust_remote_code=true"
    return f"{where} cannot be read: {one_line(error)}"
