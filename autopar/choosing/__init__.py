"""From a captured graph to a plan: what everything may do and costs, the search, and the way back.

`poser` and `pose` make the problem of one mesh and one number of microbatches (`wiring`, `op_states`, `inside`);
`solve` searches over all of them (`bounds`), `finalists` and `at_work` judge what comes out, `readback` makes it a
plan, `prove` says what is proved; `plan_training` is what compile calls.
"""
