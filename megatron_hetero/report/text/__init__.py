"""What people read in a terminal.

terminal      a plan
stage_tables  its tables of stages, like rows folded
differences   what differs between two plans
explanation   why a plan is as fast as it is
simulation    a simulated step
verification  what `verify` found
rehearsal     what a rehearsal showed
preflight     what `doctor` found
kit           what `doctor --train` found
communicators  how many a GPU is in, and their buffers
replan        what a new plan would gain at measured speeds
replanning    ways to go on with a plan on a changed cluster
additions     what to add to a cluster first
outcome       what a plan means for a whole run
faster_flags  flags that would shorten the step
refusals      flags that the runtime would refuse
ranks         which process is which part
words         pieces of text that tables share
"""
