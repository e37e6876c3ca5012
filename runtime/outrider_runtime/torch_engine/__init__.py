"""A small engine of our own, in torch: it serves where there is no vLLM, and it is read in an afternoon.

    architecture, weights, decoder    the model: what is served, its tensors, its arithmetic
    kv_pool, kv                       who may hold how much of the memory; the tensors themselves
    requests, commit, scheduler       requests, how an answer goes on, who runs next (none of them knows torch)
    sampling, rejection               from logits to tokens; which of a chain that was drawn are kept
    drafts/                           one drafter a file
    engine                            a step: plan_verify -> schedule -> run -> plan_draft -> propose -> observe
    thread                            the one thread that owns all of this
    text, protocol, answers, app      tokens and text; what a request may ask; the OpenAI API
    environment, launch               from a service's configuration to an engine that runs

The loop, its decisions, the state and the metrics are those of every engine. Prompts share no cached prefix.
"""
