"""`raykv chaos`: real engines under load while parts of the cluster are killed and frozen."""

from raykv.lab.chaos.run import run_chaos

__all__ = ["run_chaos"]
