"""The number of processes that a machine starts."""

from __future__ import annotations

import pytest
import torch

from tightfit.backends.pytorch.launch import process_count
from tightfit.devices import Device
from tightfit.errors import Refused
from tightfit.system import cores
from tightfit.techniques.parallel import Ddp


@pytest.mark.parametrize(("kind", "most", "said"), [
    ("cpu", 4 * cores(), "parallel.processes: 1,000 are more than this machine can run, for it has"),
    ("cuda", 2, "it has 2 GPUs; write parallel.processes=2 or less"),
])  # fmt: skip
def test_more_processes_than_a_machine_can_run_are_not_started(monkeypatch, kind, most, said):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    device = Device(kind=kind, name="made up", memory_bytes=1 << 30)
    assert process_count(Ddp(processes=most), device) == most
    for many in (most + 1, 1000):
        with pytest.raises(Refused, match="more than this machine can run"):
            process_count(Ddp(processes=many), device)
    with pytest.raises(Refused, match=said):
        process_count(Ddp(processes=1000), device)
