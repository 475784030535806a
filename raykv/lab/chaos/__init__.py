"""`raykv chaos`: real engines under load while parts of the cluster are killed and frozen."""
