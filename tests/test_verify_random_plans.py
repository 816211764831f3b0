"""Random jobs are the same for a seed and have all features; the page is what its results say."""

from __future__ import annotations

import json
import sys
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

import verify_random_plans

from tests.runtime.job_generator import FEATURES, MOST_RANKS, jobs


def test_every_feature_comes_in_turn() -> None:
    drawn = list(islice(jobs(3), len(FEATURES)))
    assert {job.feature for job in drawn} == set(FEATURES)
    assert all(job.plan.layout.num_devices <= MOST_RANKS for job in drawn)
    for job in drawn:
        values = FEATURES[job.feature].values
        assert values.items() <= job.case.values.items(), job.feature
    assert any(job.options.resumes_after for job in drawn)


def test_a_seed_gives_the_same_jobs() -> None:
    first, again, other = (list(islice(jobs(seed), 5)) for seed in (3, 3, 4))
    assert first == again != other


def test_the_page_is_printed_from_the_results() -> None:
    results = json.loads(verify_random_plans.RESULTS.read_text(encoding="utf-8"))
    page = verify_random_plans.PAGE.read_text(encoding="utf-8")
    assert page == verify_random_plans.page(results)
    assert {plan["outcome"] for plan in results["plans"].values()} <= {"equal", "refused"}
