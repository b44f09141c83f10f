"""The numbers of classes that are named by texts: a trained model's own, where it knows them."""

from __future__ import annotations

from tightfit.data.readers import LABEL
from tightfit.errors import DataError
from tightfit.model_facts import ModelFacts


def classes_by_number(names: tuple[str, ...], facts: ModelFacts, num_labels: int | None) -> tuple[str, ...]:
    """The names of classes by number: the model's `label_names` where each of the data's `names` is one of them, else
    the data's own order, as transformers' examples have it.

    num_labels: the recipe's. Raises DataError where the model knows some of the names alone, unless that is written.
    """
    strange = [name for name in names if name not in facts.label_names]
    if names and not strange:
        return facts.label_names
    if len(strange) < len(names) and num_labels is None:
        raise DataError(f"{LABEL}: {strange[0]!r} is none of the model's classes ({', '.join(facts.label_names)}), and "
                        f"others are; rename it, or write num_labels={max(len(names), 2)} to number classes anew")
    return names
