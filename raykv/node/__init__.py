"""The NodeActor, which alone touches a node's pool: slots, copies, fetches, reads."""
