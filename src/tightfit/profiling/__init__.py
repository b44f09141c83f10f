"""Profiles: a training step, measured and predicted; and the names of a profile's files in a run's folder."""

from __future__ import annotations

from pathlib import Path

FOLDER = "profile"
REPORT, CHROME_TRACE, MEMORY_RECORD = "report.html", "trace.json.gz", "memory.pickle"
XPLANE = Path("plugins/profile/step/local.xplane.pb")
"""Where xprof and TensorBoard look for JAX's profile, in the profile's folder."""
AGAINST = "report-against-"
"""How the names of reports that compare two runs begin."""


def is_profile_file(name: str) -> bool:
    """Whether a file or folder of that name, in a run's folder, belongs to a profile."""
    return name in (FOLDER, REPORT, CHROME_TRACE, MEMORY_RECORD) or name.startswith(AGAINST)
