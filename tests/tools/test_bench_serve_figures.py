"""The load client's workload by its seed, and the figures of its records."""

from __future__ import annotations

from typing import Any

import pytest

from jaxinfer.tools.load_client import plot, record, workload

Lengths, PromptMaker = workload.Lengths, workload.PromptMaker
LoadResult, Record, Slo = record.LoadResult, record.Record, record.Slo


def records(*specs: tuple[float, list[float], float, str | None]) -> list[Any]:
    return [
        Record(i, sent, sent, times, end, 3, len(times), "200", error)
        for i, (sent, times, end, error) in enumerate(specs)
    ]


def test_percentiles_are_interpolated():
    assert record.percentile([4, 1, 3, 2], 50) == 2.5
    assert record.percentile([0, 10], 90) == 9
    assert record.percentile([], 99) == 0


def test_summary_follows_the_recorded_times():
    # Sent at 0, 1 and 2; first tokens after 0.1, 0.2 and 0.3 s; gaps of 10, 20 and 30 ms.
    good = [(0.0, [0.1, 0.11, 0.12], 0.13, None), (1.0, [1.2, 1.22, 1.24], 1.25, None)]
    bad = [(2.0, [2.3, 2.33, 2.36], 2.4, None), (3.0, [], 4.0, "HTTP 429")]
    result = LoadResult(records(*good, *bad), [0.001], [0.1])
    figures = record.summary(result, Slo(0.25, 0.05))
    assert figures["requests"] == 4 and figures["answered"] == 3
    assert figures["ttft_ms"]["p50"] == pytest.approx(200)
    assert figures["itl_ms"]["p50"] == pytest.approx(20) and figures["itl_ms"]["count"] == 6
    assert figures["itl_ms"]["max"] == pytest.approx(30)
    assert figures["e2e_ms"]["max"] == pytest.approx(400)
    assert figures["seconds"] == pytest.approx(4)
    assert figures["output_tokens_per_s"] == pytest.approx(9 / 4)
    assert figures["errors"] == {"HTTP 429": 1}
    # The third began too late and the fourth failed.
    assert figures["goodput"]["share"] == 0.5
    assert figures["goodput"]["requests_per_s"] == pytest.approx(2 / 4)


def test_goodput_requires_both_limits():
    [slow_start, slow_tokens, fine] = records(
        (0.0, [1.0, 1.01], 1.1, None), (0.0, [0.1, 0.9], 1.0, None), (0.0, [0.1, 0.2], 0.3, None)
    )
    slo = Slo(0.5, 0.2)
    assert [r.meets(slo) for r in (slow_start, slow_tokens, fine)] == [False, False, True]


def test_late_client_is_reported():
    late = Record(0, 1.0, 1.5, [1.6], 1.7, 3, 1, "200")
    assert "500 ms late" in LoadResult([late], [], []).warnings()[0]
    fine = Record(0, 1.0, 1.001, [1.6], 1.7, 3, 1, "200")
    assert not LoadResult([fine], [0.001], [0.1]).warnings()
    assert "300 ms late" in LoadResult([], [0.3], [0.1]).warnings()[0]
    assert "95%" in LoadResult([], [], [0.95]).warnings()[0]


@pytest.mark.parametrize("text", ["fixed:12", "uniform:3:9", "lognormal:20:1.0:4:64"])
def test_lengths_follow_the_seed_and_stay_within_bounds(text):
    maker, lengths = PromptMaker(1), Lengths.parse(text)
    times = workload.poisson_times(5.0, 200, 7)
    jobs = workload.make_jobs(maker, lengths, lengths, times, 7)
    again = workload.make_jobs(maker, lengths, lengths, times, 7)
    assert jobs == again and times == workload.poisson_times(5.0, 200, 7)
    assert jobs != workload.make_jobs(PromptMaker(2), lengths, lengths, times, 7)
    least, most = {"fixed": (12, 12), "uniform": (3, 9)}.get(lengths.kind, (4, 64))
    for job in jobs:
        assert least <= job.max_tokens <= most and least <= len(str(job.prompt).split()) <= most
    if least < most:
        assert jobs != workload.make_jobs(maker, lengths, lengths, times, 8)
        assert len({job.max_tokens for job in jobs}) > 3
    assert times == sorted(times) and times[-1] / 200 == pytest.approx(1 / 5.0, rel=0.3)


def test_id_prompts_have_the_length_and_no_special_token():
    prompts: Any = [PromptMaker(0, 500).make(i, 64) for i in range(2)]
    first, second = prompts
    assert len(first) == 64 and first != second
    assert all(100 <= i < 500 for i in first + second)


@pytest.mark.parametrize(
    "text", ["", "fixed", "fixed:0", "uniform:9:3", "uniform:a:b", "lognormal:1:1:1", "zipf:2"]
)
def test_invalid_distribution_is_refused(text):
    with pytest.raises(workload.WorkloadError, match="no distribution of lengths"):
        Lengths.parse(text)


def test_trace_errors_name_every_wrong_line(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"at": 0, "prompt": "x", "max_tokens": 1}\n'
        '{"at": -1, "prompt": "x", "max_tokens": 1}\n'
        '{"at": 0, "max_tokens": 1}\n'
        '{"at": 0, "prompt_tokens": 0, "max_tokens": 1}\n'
        '{"at": 0, "prompt": "x", "max_tokens": true}\n'
        "no json\n"
    )
    with pytest.raises(workload.WorkloadError) as caught:
        workload.read_trace(path, PromptMaker(0))
    assert [f"{path}:{n}: " in str(caught.value) for n in range(1, 7)] == [False] + [True] * 5


def test_empty_load_is_plotted(tmp_path):
    for number, result in enumerate((LoadResult([], [], []), LoadResult(records(), [], []))):
        path = tmp_path / f"{number}.png"
        plot.write_plot(path, result, Slo(1.0, 0.1), "nothing")
        assert path.read_bytes().startswith(b"\x89PNG")
