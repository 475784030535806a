"""The scheduler actor: who has which chunk, events, what operators order, what each node hears."""
