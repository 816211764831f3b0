"""Megatron's answers to several questions of `preflight.start`: its imports take longest."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from megatron_hetero.preflight.job import Job
from megatron_hetero.preflight.start import StartAnswer, answer_of, question_of


def answers(jobs: Sequence[Job]) -> list[StartAnswer]:
    """The answers about all jobs, from one other process."""
    with tempfile.TemporaryDirectory() as folder:
        questions = []
        for number, job in enumerate(jobs):
            (Path(folder) / str(number)).mkdir()
            questions.append(question_of(job, Path(folder) / str(number)))
        done = subprocess.run(
            [sys.executable, "-m", "tests.preflight.asked"],
            input=json.dumps(questions), capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert not done.returncode, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    return [answer_of(job, one) for job, one in zip(jobs, said, strict=True)]


if __name__ == "__main__":
    from megatron_hetero.lab.doctor.start import answer

    print(json.dumps([answer(question) for question in json.load(sys.stdin)]))
