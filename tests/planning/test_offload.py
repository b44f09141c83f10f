"""The offload tree's branches and their bytes."""

from __future__ import annotations

from tightfit.planning.offload import offload_branch

GIB = 1 << 30
BILLION = 10**9


def branch(**changes):
    given = {"fits": False, "parameters": 7 * BILLION, "largest_block": BILLION // 5, "other_bytes": 2 * GIB,
             "device_bytes": 24 * GIB, "host_bytes": 256 * GIB}
    return offload_branch(**{**given, **changes})


def test_what_fits_moves_nothing():
    advice = branch(fits=True)
    assert (advice.branch, advice.host_bytes, advice.nvme_bytes) == ("none", 0, 0)


def test_states_move_to_the_host():
    """16 bytes a parameter and half as much for buffers, as DeepSpeed's estimate for ZeRO-2 with offload has it."""
    advice = branch()
    assert (advice.branch, advice.parameters_too) == ("cpu", False)
    assert advice.host_bytes == 7 * BILLION * 16 * 1.5
    assert advice.device_bytes == 7 * BILLION * 2 + 2 * GIB
    assert "ZeRO-2" in advice.sentences[0]
    assert "16 bytes" in advice.sentences[0]


def test_weights_move_too_where_they_leave_no_room():
    """18 bytes a parameter, as DeepSpeed's estimate for ZeRO-3 with offloaded parameters has it."""
    advice = branch(device_bytes=12 * GIB)
    assert (advice.branch, advice.parameters_too) == ("cpu", True)
    assert advice.host_bytes == 7 * BILLION * 18 * 1.5
    assert advice.device_bytes == 4 * BILLION // 5 + 2 * GIB
    assert "ZeRO-3" in advice.sentences[0]


def test_nvme_holds_what_the_host_cannot():
    advice = branch(host_bytes=64 * GIB)
    assert advice.branch == "nvme"
    assert advice.nvme_bytes == 7 * BILLION * 16
    assert advice.host_bytes < 64 * GIB
    assert "ZeRO-3" in advice.sentences[0]
    assert "NVMe" in advice.sentences[0]


def test_says_where_even_that_is_too_much():
    advice = branch(device_bytes=GIB)
    assert "misses" in advice.sentences[-1]
