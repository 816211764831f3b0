"""All checks that need no machine, behind a single call."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.work.profile import Profile
from megatron_hetero.plan.plan import Plan
from megatron_hetero.preflight import flag_checks, gpu_checks, network_checks, plan_checks
from megatron_hetero.preflight.finding import Finding
from megatron_hetero.preflight.job import Job, make_job


def check_plan_on_cluster(
    plan: Plan,
    cluster: Cluster,
    environment: Sequence[str] = (),
    profile: Profile | None = None,
) -> tuple[Finding, ...]:
    """Check everything that plan and cluster file show; return the findings, errors first.

    Args:
        plan: a plan that is valid by itself.
        cluster: the cluster that it is to run on.
        environment: `NAME=VALUE` or `MACHINE:NAME=VALUE`, beside the variables of the launch lines.
        profile: measurements behind the memory estimate; without one the catalogue answers.
    Raises:
        PlanFormatError: the plan names no devices.
        UsageError: an entry of `environment` is not in that form.
    """
    unfit = check_fit(plan, cluster)
    if unfit:
        return unfit
    job = make_job(plan, cluster, environment)
    findings = check_job(job)
    # Memory is priced at the job's precision, which a GPU without it has no times for.
    if not any(finding.id == "precision-unsupported" for finding in findings):
        findings = (*check_figures(job, profile), *findings)
    return errors_first(findings)


def check_fit(plan: Plan, cluster: Cluster) -> tuple[Finding, ...]:
    """Check that the plan can be started on this cluster; other checks make sense only then."""
    return (
        *plan_checks.plan_is_for_the_cluster(plan, cluster),
        *plan_checks.flags_are_in_order(plan),
        *plan_checks.operations_end(plan),
    )


def check_figures(job: Job, profile: Profile | None) -> tuple[Finding, ...]:
    """Check memory, and that the plan was made for this cluster file."""
    return (
        *plan_checks.figures_are_fresh(job.plan, job.cluster),
        *plan_checks.file_contradicts_itself(job.cluster),
        *plan_checks.memory_suffices(job.plan, job.cluster, profile, job.environment),
    )


def check_job(job: Job) -> tuple[Finding, ...]:
    """Check the GPUs, flags and environment of a job."""
    checks = (*gpu_checks.CHECKS, *flag_checks.CHECKS, *network_checks.CHECKS)
    return tuple(finding for check in checks for finding in check(job))


def errors_first(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Sort errors before warnings, each in the order of the checks."""
    return tuple(sorted(findings, key=lambda f: f.severity != "error"))
