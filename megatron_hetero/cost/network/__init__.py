"""Seconds of communication on the links of a cluster.

seconds         point-to-point times, and the link that a group waits for
collectives     all-reduces, all-gathers and reduce-scatters of a group
link_terms      GenModel's terms beside latency and bandwidth
ring            the ring over the holders of a gradient buffer
holder_flow     load of an exchange on the paths it takes
group_flow      load of an exchange by groups of machines
experts         exchanges of tokens between experts
lines           lines that paths share, as arrays
nics            network cards that transfers of a machine take
"""
