"""A draft canary: two pools of drafters in one engine, each decided and priced as if the whole batch were its own."""
