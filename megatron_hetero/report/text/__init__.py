"""Plans in a terminal; beside it `changes` (plans beside others) and `trials` (plans tried out).

terminal      a plan
stage_tables  its tables of stages; rows that are alike are folded
explanation   the causes of a plan's step time
comparison    the plan beside others
outcome       days and money of a whole run
ranks         the process of each place of the plan
communicators  how many a GPU is in, and their buffers
faster_flags  flags that would shorten the step
refusals      flags that the runtime would refuse
serving       a plan of replicas that serve
words         pieces of text that tables share
"""
