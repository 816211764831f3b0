"""Which schedule each replica of a plan runs.

choose     schedules that a replica could run
in_turn    the chunks of interleaved schedules
ruled_out  schedules that a job's flags rule out
best       the best of them at the end of planning
"""
