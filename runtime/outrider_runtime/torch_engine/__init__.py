"""A small inference engine in plain torch, for machines without vLLM. About 3,900 lines, of which the core has 1,300:
inference_engine, planner, batch_scheduler, commit, target_pass, tree, kv_pool, kv, model_runner, decoder.

    architecture, weights, linear, decoder, model_runner    the model: supported families, tensors, forward pass
    kv_pool, kv                     the KV cache: how many tokens each request may hold; the tensors themselves
    engine_request, tree, commit    a request, its tree of proposals, and how accepted tokens extend its answer
    batch_scheduler                 which requests run in the next step (these three groups import no torch)
    token_sampling, seeded_noise    from logits to tokens
    rejection                       rejection sampling for chains that were drawn from a drafter's distribution
    drafting, drafts/               the end of a step: drafters propose tokens; one module per drafter
    target_pass                     the target's forward pass over known tokens and proposals
    planner                         the engine's side of the control loop: requests in, plans out, observations back
    inference_engine                one step: plan_verify -> schedule -> run -> plan_draft -> propose -> observe
    thread                          the one thread that owns all of the above
    text                            tokenizer and chat template
    openai_requests, parameters, length, answers, app       the OpenAI API: fields, their meaning, limits, answers
    torch_environment, options, hosting, engine_loading     start-up: from a service's configuration to an engine

The control loop, its decisions, reported state and metrics are shared with every other engine. Requests do not share
cached prefixes.
"""
