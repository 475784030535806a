"""The scheduler actor: who has which chunk, events, what operators order, who is told what."""
