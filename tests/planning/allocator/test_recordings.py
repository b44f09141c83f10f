"""Recordings of the allocator against the simulated one.

They are written by hand from the source of torch's allocator: addresses, segments and the order of events are what its
rules give. They are no record of a real run.
"""

from __future__ import annotations

import copy
import gzip
import json
import pickle
from pathlib import Path

import pytest

from allocator_recordings import compare, read_recording, recording_of, write_recording
from tightfit.devices import MIB
from tightfit.errors import DataError

SMALL, LARGE, OWN = 0x7F0000000000, 0x7F0000200000, 0x7EFF00000000

BY_HAND = [  # with cudaMalloc's segments
    ("segment_alloc", SMALL, 2 * MIB), ("alloc", SMALL, 1000),
    ("alloc", SMALL + 1024, 600),
    ("segment_alloc", LARGE, 20 * MIB), ("alloc", LARGE, 3 * MIB),
    ("alloc", LARGE + 3 * MIB, 12 * MIB),                        # split off the 17 MiB left
    ("segment_alloc", OWN, 32 * MIB), ("alloc", OWN, 30 * MIB + 1),  # 2 MiB less 512 bytes are split off
    ("free_requested", LARGE, 3 * MIB), ("free_completed", LARGE, 3 * MIB),
    ("alloc", LARGE, 2 * MIB),                                   # 3 MiB are the best fit; 1 MiB is not split off
    ("free_requested", OWN, 30 * MIB + 1), ("free_completed", OWN, 30 * MIB + 1),  # whole again
    ("alloc", OWN, 5 * MIB + 3),                                 # 5 MiB at the end of LARGE are too small by 512 bytes
    ("free_requested", OWN, 5 * MIB + 3), ("free_completed", OWN, 5 * MIB + 3),
    ("segment_free", OWN, 32 * MIB),                             # torch.cuda.empty_cache()
    ("alloc", LARGE + 15 * MIB, 4 * MIB),
    ("snapshot", 0, 0),
]
BY_HAND_EXPANDABLE = [  # pages of 20 MiB, and 2 MiB for small sizes
    ("segment_map", SMALL, 2 * MIB), ("alloc", SMALL, 1000),
    ("segment_map", OWN, 20 * MIB), ("alloc", OWN, 15 * MIB),
    ("segment_map", OWN + 20 * MIB, 40 * MIB), ("alloc", OWN + 15 * MIB, 26 * MIB),  # 5 MiB and 21 of two pages
    ("free_requested", OWN, 15 * MIB), ("free_completed", OWN, 15 * MIB),
    ("alloc", OWN, 14 * MIB),                                     # 15 MiB inside before 19 at the end
    ("free_requested", OWN + 15 * MIB, 26 * MIB), ("free_completed", OWN + 15 * MIB, 26 * MIB),
    ("segment_unmap", OWN + 20 * MIB, 40 * MIB),                  # emptied: from 14 MiB on all is free
    ("segment_map", OWN + 20 * MIB, 20 * MIB), ("alloc", OWN + 14 * MIB, 8 * MIB),
]


def snapshot_of(events: list[tuple[str, int, int]], stream: int = 0, **settings) -> dict:
    """What torch.cuda.memory._snapshot() returns, less stack traces."""
    segments: dict[int, int] = {}
    for action, address, size in events:
        if action in ("segment_alloc", "segment_map"):
            segments[address] = segments.get(address, 0) + size
        elif action in ("segment_free", "segment_unmap"):
            segments[address] -= size
    common = {"stream": stream, "time_us": 0, "compile_context": "N/A", "user_metadata": "", "pool_id": (0, 0)}
    return {
        "segments": [{"device": 0, "address": a, "total_size": s, "stream": stream, "segment_type": "large",
                      "segment_pool_id": (0, 0), "blocks": []} for a, s in segments.items() if s],
        "device_traces": [[{"action": action, "device_free" if action == "oom" else "addr": address, "size": size,
                            **common} for action, address, size in events]],
        "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": "", "max_split_size": -1, "expandable_segments": False,
                               "garbage_collection_threshold": 0.0,
                               "roundup_power2_divisions": {str(1 << n): 0 for n in range(16)}, **settings},
        "external_annotations": [],
    }


SNAPSHOT = snapshot_of(BY_HAND)
SNAPSHOT_EXPANDABLE = snapshot_of(BY_HAND_EXPANDABLE, expandable_segments=True)


@pytest.mark.parametrize(("snapshot", "peak", "end"), [(SNAPSHOT, 54, 22), (SNAPSHOT_EXPANDABLE, 62, 42)],
                         ids=["segments", "expandable"])
def test_a_recording_is_reproduced_address_by_address(snapshot: dict, peak: int, end: int):
    comparison = compare(recording_of(snapshot))
    assert comparison.first_difference is None
    assert (comparison.moved, comparison.off) == (0, 0)
    assert comparison.peak_reserved == (peak * MIB, peak * MIB)
    assert comparison.reserved == (end * MIB, end * MIB)
    assert comparison.exact


def test_a_rule_that_differs_is_found_where_it_first_shows():
    """As if 1 MiB had been split off, which the rules do not."""
    events = list(BY_HAND)
    events.insert(11, ("alloc", LARGE + 2 * MIB, MIB + 1 - 512))
    comparison = compare(recording_of(snapshot_of(events)))
    assert not comparison.exact
    assert comparison.moved == 1
    assert comparison.first_difference is not None
    assert comparison.first_difference.startswith(f"event 11, alloc of {MIB - 511} bytes")


def test_reserved_bytes_that_differ_are_found():
    events = [("segment_alloc", LARGE, 22 * MIB), ("alloc", LARGE, 3 * MIB)]
    comparison = compare(recording_of(snapshot_of(events)))
    assert (comparison.moved, comparison.off) == (0, 1)
    assert comparison.reserved == (22 * MIB, 20 * MIB)
    assert not comparison.exact


def test_statistics_are_compared():
    names = {"allocated_bytes.all.peak": 46 * MIB + 2560, "reserved_bytes.all.peak": 54 * MIB,
             "requested_bytes.all.peak": 45 * MIB + 1601, "num_alloc_retries": 0, "num_ooms": 0}
    comparison = compare(recording_of(SNAPSHOT, statistics=names))
    # At the most: 1024 + 1024 bytes, 3 MiB, 12 MiB, 30 MiB and 512 bytes; 2 MiB count as 3 later on.
    assert comparison.statistics["peak_allocated"] == (46 * MIB + 2560, 45 * MIB + 2560)
    assert comparison.statistics["peak_requested"] == (45 * MIB + 1601, 45 * MIB + 1601)
    assert comparison.first_difference is None
    assert not comparison.exact


RETRIED = [
    ("segment_alloc", OWN, 40 * MIB), ("alloc", OWN, 40 * MIB),
    ("free_requested", OWN, 40 * MIB), ("free_completed", OWN, 40 * MIB),
    ("segment_free", OWN, 40 * MIB), ("segment_alloc", LARGE, 50 * MIB), ("alloc", LARGE, 50 * MIB),
    ("oom", 9 * MIB, 30 * MIB),
]


def test_with_its_limit_a_recording_shows_whether_retries_are_foreseen():
    recording = recording_of(snapshot_of(RETRIED), limit=60 * MIB, statistics={
        "allocated_bytes.all.peak": 50 * MIB, "reserved_bytes.all.peak": 50 * MIB, "requested_bytes.all.peak": 50 * MIB,
        "num_alloc_retries": 2})
    comparison = compare(recording)
    assert comparison.exact
    assert comparison.statistics["retries"] == (2, 2)  # that of the failure counts


@pytest.mark.parametrize(("limit", "said"), [
    (90, f"event 6, alloc of {50 * MIB} bytes: {90 * MIB} bytes are reserved instead of {50 * MIB}"),
    (80, f"event 7, oom of {30 * MIB} bytes: it fits, and really ran out of memory"),
    (45, f"event 6, alloc of {50 * MIB} bytes: it would need {50 * MIB} bytes reserved of the {45 * MIB} allowed"),
])
def test_another_limit_gives_other_outcomes(limit: int, said: str):
    comparison = compare(recording_of(snapshot_of(RETRIED), limit=limit * MIB))
    assert comparison.first_difference is not None
    assert comparison.first_difference.startswith(said)
    assert not comparison.exact


def test_settings_come_with_the_snapshot():
    assert recording_of(snapshot_of(BY_HAND_EXPANDABLE, expandable_segments=True)).expandable
    with pytest.raises(DataError, match="max_split_size, garbage_collection_threshold was set"):
        recording_of(snapshot_of(BY_HAND, max_split_size=200 * MIB, garbage_collection_threshold=0.8))


@pytest.mark.parametrize("name", ["recording.json.gz", "snapshot.pickle"])
def test_recordings_are_read_again(name: str, tmp_path: Path):
    path = tmp_path / name
    recording = recording_of(SNAPSHOT, limit=None)
    if name.endswith("pickle"):
        path.write_bytes(pickle.dumps(SNAPSHOT))
    else:
        recording = recording_of(SNAPSHOT, limit=99, origin={"torch": "2.13"}, statistics={
            "allocated_bytes.all.peak": 1, "reserved_bytes.all.peak": 2, "requested_bytes.all.peak": 3,
            "num_alloc_retries": 4})
        write_recording(path, recording)
    assert read_recording(path) == recording


def test_plain_json_is_read_too(tmp_path: Path):
    write_recording(tmp_path / "a.json.gz", recording_of(SNAPSHOT))
    (tmp_path / "a.json").write_bytes(gzip.decompress((tmp_path / "a.json.gz").read_bytes()))
    assert read_recording(tmp_path / "a.json") == recording_of(SNAPSHOT)


class Harmful:
    """Unpickling it would call a function."""

    def __reduce__(self):
        return (print, ("called",))


def test_a_pickle_that_would_run_code_is_refused(tmp_path: Path, capsys):
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps({**SNAPSHOT, "more": Harmful()}))
    with pytest.raises(DataError, match=r"builtins\.print"):
        read_recording(path)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("content", [b"", b"nothing", pickle.dumps([1]), pickle.dumps({"segments": []}), b"{}"])
def test_other_files_are_refused(content: bytes, tmp_path: Path):
    for name in ("a.pickle", "a.json", "a.json.gz"):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError):
            read_recording(tmp_path / name)


def test_a_history_that_begins_late_is_refused():
    late = copy.deepcopy(SNAPSHOT)
    del late["device_traces"][0][:2]
    with pytest.raises(DataError, match="called before the first allocation"):
        recording_of(late)


def test_a_release_of_something_unknown_is_refused():
    lost = copy.deepcopy(SNAPSHOT)
    del lost["device_traces"][0][1]
    lost["device_traces"][0].append({**lost["device_traces"][0][0], "action": "free_requested", "addr": SMALL})
    with pytest.raises(DataError, match="never allocated"):
        compare(recording_of(lost))


def test_private_pools_are_refused():
    pooled = copy.deepcopy(SNAPSHOT)
    pooled["device_traces"][0][0]["pool_id"] = (0, 1)
    with pytest.raises(DataError, match="private pools"):
        recording_of(pooled)


def test_streams_are_kept_apart():
    recording = recording_of(snapshot_of(BY_HAND, stream=7))
    assert compare(recording).exact
    other = recording_of(snapshot_of([
        ("segment_alloc", LARGE, 20 * MIB), ("alloc", LARGE, 20 * MIB), ("free_requested", LARGE, 1),
        ("free_completed", LARGE, 1), ("alloc", LARGE, 20 * MIB)]))
    events = (*other.events[:-1], (*other.events[-1][:3], 1))  # on another stream, which may not have it
    assert not compare(type(other)(expandable=other.expandable, events=events, reserved=other.reserved)).exact


def test_the_written_form_is_compact(tmp_path: Path):
    path = tmp_path / "recording.json.gz"
    write_recording(path, recording_of(SNAPSHOT))
    values = json.loads(gzip.decompress(path.read_bytes()))
    assert values["actions"][:2] == [3, 0]
    assert len(values["actions"]) == len(values["sizes"]) == len(BY_HAND) - 1  # all but the snapshot itself
