"""Orders of a pipeline's computations: 1F1B and the others.

one_f_one_b    1F1B
interleaved    interleaved 1F1B
zero_bubble    zero bubble
list_schedule  greedy list scheduling
synthesise     a schedule computed for one pipeline
chunk_times    seconds of model chunks and of parts of backward passes
delivery       what a stage can know of its messages in advance
early_gradients  stages that exchange gradients within their passes
"""
