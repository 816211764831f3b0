"""One self-contained HTML page about a plan: figures as inline SVG, no network, light and dark.

document     the page
frame        what all pages share: the document, headings, wide figures
serving      the page of a serving plan
heading      title and tiles
figure       shapes that all figures are made of
folding      rows that look alike, drawn as one
cluster_map  machines, and the stage on each GPU
pipelines    replicas as rows of stages
timeline     what every stage does when
lanes        timelines from files of runs
bars         memory, time by cause, comparisons
exchange_tree  gradients between sites and machines
dealt_step   sequences of a step, on their groups
"""
