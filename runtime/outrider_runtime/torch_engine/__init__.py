"""A small engine of our own, in torch: it serves where there is no vLLM. About 3,900 lines; the core has 1,300: engine,
planner, scheduler, commit, verification, tree, kv_pool, kv, runner, decoder.

    architecture, weights, linear, decoder, runner     the model: what is served, its tensors, its arithmetic
    kv_pool, kv                        who may hold how much of the memory; the tensors themselves
    requests, tree, commit, scheduler  requests, how an answer goes on, who runs next (none of them knows torch)
    sampling, noise, rejection         from logits to tokens; which of a chain that was drawn are kept
    drafting, drafts/                  the end of a step; one drafter a file
    verification                       the target's pass: what it runs over, and what it draws behind each place
    planner                            what the loop is asked and told
    engine                             a step: plan_verify -> schedule -> run -> plan_draft -> propose -> observe
    thread                             the one thread that owns all of this
    text, protocol, parameters, answers, app   tokens and text; what a request may ask, and means; the OpenAI API
    environment, options, hosting, launch     from a service's configuration to an engine that runs

The loop, its decisions, the state and the metrics are those of every engine. Prompts share no cached prefix.
"""
