"""Samples on disk: thinned with age, bounded, and never the reason of trouble."""

import json
import logging
import resource

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.services import series
from server.services.series import MAX_BYTES, TIERS, Recorder, Series, Tier, read_series, thin

START = 1_800_000_000.0


def test_fine_for_an_hour_coarse_for_a_day_and_a_minute_after(tmp_path):
    recorder = Recorder(tmp_path)
    for second in range(0, 9 * 21_600, 5):  # a look every 5 s keeps the test short
        recorder.add(START + second, {"gpu.0.memory_used": float(second % 60), "host.load_1": 1.0})
    recorder.close()
    found = read_series(tmp_path, 0)
    times = list(found["host.load_1"].times)
    assert times == sorted(set(times))
    end = START + 9 * 21_600
    gaps = {0.4: 60, 0.9: 60, 1.5: 10, 2.1: 10, 2.24: 5}
    for day, gap in gaps.items():
        place = next(i for i, time in enumerate(times) if time >= START + day * 86_400)
        assert times[place + 1] - times[place] == gap, day
    assert times[-1] == end - 5
    minute = times.index(START + 600)
    assert found["gpu.0.memory_used"].values[minute] == pytest.approx(27.5)  # mean of 0, 5 ... 55
    assert found["gpu.0.memory_used_max"].values[minute] == 55
    assert "host.load_1_max" not in found
    assert read_series(tmp_path, end - 60)["host.load_1"].times[0] == end - 55


def test_the_bound_in_bytes_holds(tmp_path, monkeypatch):
    """With the parts a thousandth of their size; the rows are those of eight GPUs."""
    small = tuple(Tier(tier.seconds, tier.span_s, tier.part_bytes // 256) for tier in TIERS)
    monkeypatch.setattr(series, "TIERS", small)
    recorder = Recorder(tmp_path)
    names = [f"gpu.{card}.{name}" for card in range(8) for name in ("memory_used", "power_w", "temperature_c", "x")]
    most = 0
    for minute in range(2000):
        recorder.add(START + 60 * minute, dict.fromkeys(names, 12345.678 + minute))
        most = max(most, sum(path.stat().st_size for path in tmp_path.iterdir()))
    assert most > 0.7 * MAX_BYTES / 256 * 16 / 28  # the coarsest file has been full
    assert most <= MAX_BYTES / 256
    assert MAX_BYTES == 56 << 20
    assert recorder.dropped == 0


@pytest.mark.parametrize("torn", [b"[1800000000,", b"{", b'"x"\n', b"17\n", b"[]\n", b"[null]\n", b'{"names":[1]}\n[2'])
def test_a_killed_daemon_leaves_a_line_unfinished(tmp_path, torn):
    Recorder(tmp_path).add(START, {"a": 1.0})
    with (tmp_path / "1s.jsonl").open("ab") as file:
        file.write(torn)
    Recorder(tmp_path).add(START + 1, {"a": 2.0, "b": None})
    Recorder(tmp_path).add(START + 2, {"a": float("nan"), "b": 3.0})
    found = read_series(tmp_path, 0)
    assert list(found["a"].values) == [1.0, 2.0]
    assert list(found["b"].values) == [3.0]
    for line in (tmp_path / "1s.jsonl").read_bytes().splitlines()[-2:]:
        json.loads(line)


def test_a_full_disk_drops_samples_and_says_so_once(tmp_path, caplog):
    """A limit on the size of files stands for the disk: it, too, takes a part of what is written."""
    recorder = Recorder(tmp_path)
    recorder.add(START, {"a": 1.0})
    size = (tmp_path / "1s.jsonl").stat().st_size
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 5, hard))
    try:
        with caplog.at_level(logging.WARNING):
            for second in range(1, 4):
                recorder.add(START + second, {"a": 2.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert (recorder.dropped, len(caplog.records)) == (3, 1)
    assert (tmp_path / "1s.jsonl").stat().st_size == size
    recorder.add(START + 4, {"a": 4.0})
    assert list(read_series(tmp_path, 0)["a"].values) == [1.0, 4.0]
    gone = Recorder(tmp_path / "no" / "such")
    gone.add(START, {"a": 1.0})
    assert gone.dropped == 1


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=400), st.integers(2, 50))
def test_thinning_keeps_the_extremes_in_order(values, most):
    one = Series()
    for place, value in enumerate(values):
        one.add(float(place), value)
    kept = thin(one, most)
    assert 0 < len(kept) <= most
    assert kept == sorted(kept)
    assert {value for _, value in kept} >= {min(values), max(values)}
    if most >= 4:
        assert [kept[0][0], kept[-1][0]] == [0, len(values) - 1]
    assert all(values[int(time)] == value for time, value in kept)
