"""All readings of this machine, in one go."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from tightfit.doctor.cards import read_cards
from tightfit.doctor.host import read_disk, read_host
from tightfit.doctor.readings import Readings
from tightfit.doctor.software import read_software


def gather(folder: Path, disk: bool = True) -> Readings:
    """Read the machine: seconds. A missing binding, driver or card is a reading, not an error.

    folder: where runs would be written, whose disk is measured.
    disk: whether to measure its speed; its size and free space are read in any case.
    """
    driver, gpus, links = read_cards()  # before PyTorch, whose own use of the cards would be read otherwise
    host = read_host()
    software, seen = read_software()
    return Readings(
        date=datetime.now(UTC).isoformat(timespec="seconds"), driver=driver, host=host, software=software,
        disk=read_disk(folder, disk), gpus=gpus or seen, links=links,
    )  # fmt: skip
