"""What the Hugging Face hub's client raises, in one sentence."""

from __future__ import annotations

from huggingface_hub import errors as hub_errors

from tightfit.hub_errors import explain_hub_error


def test_hub_errors_are_told_apart() -> None:
    class Missing(hub_errors.RepositoryNotFoundError):
        def __init__(self) -> None:
            Exception.__init__(self, "401")

    class Gated(hub_errors.GatedRepoError):
        def __init__(self) -> None:
            Exception.__init__(self, "403")

    for cause, says in ((Missing(), "is not on the Hugging Face hub"), (Gated(), "is gated: accept its terms")):
        error = OSError("a long text")
        error.__cause__ = cause
        assert says in explain_hub_error("meta-llama/x", error)
    assert explain_hub_error("a/b", OSError("two\nlines")) == "model: 'a/b' cannot be read: two lines"
