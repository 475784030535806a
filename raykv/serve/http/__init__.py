"""Requests and answers between the ingress and the replicas."""

from raykv.serve.http.exchange import NestingLimit

__all__ = ["NestingLimit"]
