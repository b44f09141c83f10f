"""Recordings go through JSON unchanged, and each machine gets the verdict that it should."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from tests.doctor.recordings import FOLDER, NAMES, recorded
from tightfit.doctor.checks import checks, problems
from tightfit.doctor.readings import Readings

STOPPED_BY = {
    "container-without-card": ["driver.pci_cards"],
    "driver-too-old": ["driver.version"],
    "no-driver": ["driver.nouveau"],
    "old-card": ["software.cuda_error"],
}
"""What stops training, by recording; nothing in the others."""


@pytest.mark.parametrize("name", NAMES)
def test_readings_survive_json(name):
    readings = recorded(name)
    assert Readings.model_validate_json(json.dumps(readings.model_dump(mode="json"))) == readings


def test_a_misspelled_field_is_an_error():
    values = recorded("healthy").model_dump(mode="json")
    values["gpus"][0]["temprature"] = 40
    with pytest.raises(ValueError, match="temprature"):
        Readings.model_validate_json(json.dumps(values))


@pytest.mark.parametrize("name", NAMES)
def test_the_verdict(name):
    assert [finding.field for finding in problems(checks(recorded(name)))] == STOPPED_BY.get(name, [])


@pytest.mark.parametrize("name", NAMES)
def test_every_finding_names_its_field_and_what_to_do(name):
    readings = recorded(name)
    for finding in checks(readings):
        json.dumps(asdict(finding))
        assert finding.sentence
        assert not finding.sentence.endswith(".")
        assert finding.action or finding.severity in ("ok", "info")
        part, _, _ = finding.field.replace("[", ".").partition(".")
        assert hasattr(readings, part)


def test_the_healthy_machine_has_nothing_to_look_at():
    assert {finding.severity for finding in checks(recorded("healthy"))} == {"ok", "info"}


def test_every_recording_is_described():
    text = (FOLDER / "README.md").read_text()
    assert [name for name in NAMES if f"| {name} |" not in text] == []


def test_findings_of_a_topic_stand_together_and_cards_come_first():
    topics = [finding.topic for finding in checks(recorded("server-in-trouble"))]
    once = list(dict.fromkeys(topics))
    assert topics == sorted(topics, key=once.index)
    assert once[:4] == ["GPU 0", "GPU 1", "GPU 2", "GPU 3"]
