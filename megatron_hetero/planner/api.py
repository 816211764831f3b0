"""From a cluster and a workload to a plan: run the strategies, keep the best, write it down."""

from __future__ import annotations

from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.collector import no_collector
from megatron_hetero.cost.model import CostModel, MakeCosts
from megatron_hetero.cost.work.profile import Profile
from megatron_hetero.model.spec import Workload
from megatron_hetero.plan.plan import Plan
from megatron_hetero.planner.advise.explain import Explanation
from megatron_hetero.planner.answer.explained import explained
from megatron_hetero.planner.answer.planned import planned
from megatron_hetero.planner.answer.searched import searched
from megatron_hetero.planner.evaluate.scoreboard import Progress
from megatron_hetero.planner.objective import THROUGHPUT, Objective
from megatron_hetero.planner.problem import make_problem
from megatron_hetero.planner.request import USUAL, Schedules, checked
from megatron_hetero.planner.restrictions.one_library import for_each_library


@no_collector()
@for_each_library
def plan_cluster(
    cluster: Cluster,
    workload: Workload,
    *,
    profile: Profile | None = None,
    progress: Progress | None = None,
    make_costs: MakeCosts = CostModel,
    strategy: str = "auto",
    objective: Objective = THROUGHPUT,
    schedules: Schedules = "counts",
    prove: bool = False,
    simplest_within: float | None = None,
    bounded: bool = True,
) -> Plan:
    """Return the best plan found for training `workload` on `cluster`; it fits and is validated.

    Equal inputs give equal plans, whatever the order of nodes in the file.

    Args:
        progress: called with each better plan; see `scoreboard.Progress`.
        make_costs: prices that take the place of the project's own cost model.
        strategy: a name of `portfolio.STRATEGIES`, or "stock": `objective.stock_only`, with a
            search of minutes where there are many GPUs.  The plan may have another micro-batch size
            and recompute than the job.
        objective: what the plan is the best by, its limits of time and money, and whether it must
            be one that stock Megatron runs.
        schedules: "counts" for 1F1B with launch counts, "best" for other orders of computations
            where they make the step shorter (`schedule.choice.best`).
        prove: the lower bound as far as up to a minute more takes it, in clusters of any size.
            Interrupted there, the plan comes with what is proved so far.
        simplest_within: not the best plan, but the one nearest to stock Megatron that is at most
            this part behind it (`advise.simplest`).
        bounded: False leaves the lower bound at that by work alone, which is known at once.
    Raises:
        InfeasiblePlanError: nothing fits; names the shortage and a relaxation that was tried.  Or
            what fits is too slow or too dear; names the nearest.
        UnsupportedError, UsageError: the job itself cannot be planned.
        LibraryError: on none of the GPUs anything trains.
        KeyboardInterrupt: interrupted before any plan was found.
    """
    problem = checked(
        make_problem(cluster, workload, profile, make_costs, objective),
        schedules, strategy, prove, simplest_within,
    )  # fmt: skip
    if problem.objective.stock_only or simplest_within is not None:
        return explained(problem, progress, strategy, schedules, prove, simplest_within)[0]
    found = searched(problem, progress, strategy, simplest_within)
    return planned(problem, *found, progress, schedules, prove, bounded=bounded)


@no_collector()
@for_each_library
def plan_and_explain(
    cluster: Cluster,
    workload: Workload,
    *,
    profile: Profile | None = None,
    progress: Progress | None = None,
    make_costs: MakeCosts = CostModel,
    strategy: str = "auto",
    objective: Objective = THROUGHPUT,
    schedules: Schedules = "counts",
    prove: bool = False,
    simplest_within: float | None = None,
    plugin_gain: float | None = None,
) -> tuple[Plan, Explanation]:
    """Return `plan_cluster`, with why the plan is good from the same search.

    With `plugin_gain`, a plan that gains no more than this part over the best of all that stock
    Megatron's flags can say gives way to that one, and so does a slower one.  Interrupted (Ctrl-C)
    once a plan is found, it returns the best so far and says so in both.
    """
    problem = checked(
        make_problem(cluster, workload, profile, make_costs, objective),
        schedules, strategy, prove, simplest_within,
    )  # fmt: skip
    # Only the usual search may give way to flags: what was asked for by name stays.
    is_usual = strategy in USUAL and schedules == "counts" and simplest_within is None
    gain = plugin_gain if is_usual else None
    return explained(problem, progress, strategy, schedules, prove, simplest_within, gain)
