"""A trace on two unlike replicas behind the router: `tools/serve_trace.py`, scaled down."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("aiohttp")
pytest.importorskip("openai", reason="the openai client is not installed: pip install openai")

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
def test_the_openai_client_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import serve_trace

    told = serve_trace.run(tmp_path, 20.0, 1.0, seed=1)
    assert told["whole"] == told["requests"] > 10
    assert told["errors"] == told["lost_silently"] == told["killed"]["lost_silently"] == 0
    assert told["killed"]["whole"] + told["killed"]["errors"] == told["killed"]["requests"]
    assert 0 < told["attainment"]["simulated"] <= 1
