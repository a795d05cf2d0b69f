"""Training runs: what `extensor train` and the commands around it do."""

# cli, flags, settings, config, toml, recipe_text, runs, choices: words to a checked `RunConfig`
# train, loop, step, batch, evaluation, metrics, optimizers, signals: one run, down to one step
# ranks, parallel, micro_batches: the same on several ranks
# rundir, checkpoints, records, result: what a run leaves in its folder
# probes, histograms, operand_noise, memory, memory_limit: what is measured of a run's model
# tasks, data, text, callbacks: what is learned from what, and what watches
# compare, comparison, compare_report, observe, plan: many runs; runs on machines that are not there
# page, side_by_side, tables, svg: how a finished run, or several, are shown
# ptq, ptq_report, finetune, language_model, advise, reallocate: what is made of it
