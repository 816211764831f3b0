"""Plans of other systems as our layouts, and layouts as plans of such systems where possible.

hexiscale            HexiScale's (FlashFlex's) command line
flagscale            FlagScale's meshes and layer splits
flagscale_job        a FlagScale experiment as a job of Megatron's
flagscale_recompute  FlagScale's recompute by stage
hydra                Hydra's experiment files
list_literal         Python lists on a command line, read without running them
given                flags of another system, each with its place
as_plan              the plan of a conversion
ours_alone  parts of a plan that no other system has
"""
