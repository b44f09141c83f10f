"""Profiles: a training step, measured and predicted; and the names of a profile's files in a run's folder."""

from __future__ import annotations

from pathlib import Path

FOLDER = "profile"
REPORT, CHROME_TRACE, MEMORY_RECORD = "report.html", "trace.json.gz", "memory.pickle"
XPLANE = Path("plugins/profile/step/local.xplane.pb")
"""Folder of a profile in which xprof and TensorBoard look for JAX's."""
AGAINST = "report-against-"
"""Prefix of the names of reports that compare two runs."""
UNFINISHED = "unfinished-profile"
"""Name of the folder of a profile that is being made; where its process was killed, it stays until the next one."""


def is_profile_file(name: str) -> bool:
    """Whether a file or folder of that name, in a run's folder, belongs to a profile."""
    return name in (FOLDER, REPORT, CHROME_TRACE, MEMORY_RECORD) or name.startswith((AGAINST, f".{UNFINISHED}"))
