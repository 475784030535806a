"""What the scheduler actor knows, from what nodes report and operators order; pure."""
