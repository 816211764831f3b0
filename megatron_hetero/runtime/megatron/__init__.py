"""Replacements of Megatron symbols at run time, a file for each, guarded by hashes.

guarded              symbols by the hash of their source
guards               all of them, checked before the ranks meet
replace              the one method of replacing
parallel_state       the globals of `parallel_state`
forward_backward     each replica's own number of micro-batches
optimizer            an optimizer over the pieces that a rank owns
optimizer_load       stock's divided optimizer, loaded into torch's Adam
linear_backward      a backward pass in two parts
straggler_port       the detector's switch, on loopback alone
training_log         raw losses and norms for observers
checkpoint_metadata  one key for each layer
checkpoint_queue     a queue without a server, or with one that ends
vocabulary_range     vocabulary rows by shares
context_batch        tokens of a sequence by shares
skipped_steps        the data of steps that are left out
value_channels       value heads of another width
token_dropping       capacities of experts over a whole micro-batch
sinkhorn_routing     experts shared out evenly over a whole micro-batch
balance_choices      choices that a balancing loss counts, for an observer
jit_warm_up          a warm-up at a size that no rank has
mtp_spec             parts of the layers that predict more tokens
mtp_losses           their losses, of the whole job
tensor_overlap       buffers of tensors exchanged under products, for each group
state_dumps          dumps of gradients and activations, by one copy of the model
attention_logits     the largest attention logits of the whole job
weight_hashes        equal weights on all holders
compile_helpers      the wheel has no Makefile
flag_texts           help texts of flags, read once for all ranks of a machine
"""
