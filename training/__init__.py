"""Training runs: what `extensor train` and the commands around it do."""

# cli, flags, settings, config, toml, runs  from a command's words to a checked `RunConfig`
# train, loop, step, evaluation             one run, from its epochs down to one step
# ranks, parallel, micro_batches            the same on several ranks
# rundir, checkpoints, records, result      what a run leaves in its folder
# tasks, data, text, callbacks              what is learned from what, and what watches
# compare, observe, plan                    many runs; runs that are not there yet
# page, ptq, finetune, advise, reallocate   what is done with a finished run
