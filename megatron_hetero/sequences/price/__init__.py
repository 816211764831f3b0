"""What sequences cost on a group of ranks.

group_price    what any price answers
token_rates    what one GPU takes for tokens
shares         parts of a sequence for unlike members
exchange       what travels between members
modelled       the price on a group of a described cluster
replica_rates  what the replicas of a plan take, and their price as a group
"""
