"""Figures for Prometheus: requests as they end, and the models' own counters when asked."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ...lm.stats import Stats
from .models import ModelRegistry

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class ServerMetrics:
    """One server's metrics, in a registry of their own: several servers may share a process.

    Labels are few: routes by their template, models by their names.
    """

    def __init__(self, models: ModelRegistry) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "weft_http_requests", "Requests by route template.", ("method", "route", "status"),
            registry=self.registry,
        )  # fmt: skip
        self.seconds = Histogram(
            "weft_http_request_seconds", "Seconds from a request's head to its answer's end.",
            ("route",), buckets=_SECONDS, registry=self.registry,
        )  # fmt: skip
        self.first_token = Histogram(
            "weft_time_to_first_token_seconds",
            "Seconds from the start of a job, or of a call that is streamed, to its first token.",
            ("model",), buckets=_SECONDS, registry=self.registry,
        )  # fmt: skip
        self.jobs = Counter(
            "weft_jobs", "Jobs by kind and how they ended.", ("kind", "status"),
            registry=self.registry,
        )  # fmt: skip
        self.running = Gauge(
            "weft_jobs_running", "Jobs that run or wait now.", registry=self.registry
        )
        self.registry.register(OfModels(models))

    def observe(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count a request that has ended."""
        known = method if method in _METHODS else "other"
        self.requests.labels(known, route, str(status)).inc()
        self.seconds.labels(route).observe(seconds)

    def observe_first(self, model: str | None, seconds: float | None) -> None:
        """Note how long a first token took; None where there was none, or nobody looked."""
        if model is not None and seconds is not None:
            self.first_token.labels(model).observe(seconds)

    def page(self) -> bytes:
        """Return all figures in Prometheus' text form."""
        return generate_latest(self.registry)


_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
_COUNTERS = {
    "prefilled": "Tokens run that were given, not drawn.",
    "reused": "Tokens whose KV was there when work began.",
    "decoded": "Tokens drawn.",
    "recomputed": "Tokens run again: their KV was evicted, or their logits were not kept.",
    "steps": "ServedModel calls.",
    "evicted": "Nodes of the token tree whose KV was evicted.",
    "parked": "Runs that were taken out of memory for a while.",
}
_GAUGES = {
    "kv_bytes": "KV of the tokens held.",
    "kv_bytes_unshared": "What a cache of its own for every branch would take.",
    "kv_budget_bytes": "What KV may take.",
    "offloaded_bytes": "KV that the host keeps.",
    "pinned_tokens": "Tokens whose KV may not be evicted.",
}


class OfModels(Collector):
    """Reads the models' counters when the metrics are asked for."""

    def __init__(self, models: ModelRegistry) -> None:
        self.models = models

    def describe(self) -> Iterator[Metric]:
        """Nothing is known before there are models."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Yield the figures of all models."""
        read: list[tuple[str, Stats]] = []
        says = "Pieces of work that wait to be admitted."
        waiting = GaugeMetricFamily("weft_queue", says, labels=["model"])
        for model in self.models:
            if model.lm is not None and not model.lm.closed:
                read.append((model.name, model.lm.stats()))
                waiting.add_metric([model.name], model.lm.scheduler.n_queued)
        for name, says in _COUNTERS.items():
            counter = CounterMetricFamily(f"weft_{name}", says, labels=["model"])
            for model_name, stats in read:
                counter.add_metric([model_name], getattr(stats, name))
            yield counter
        for name, says in _GAUGES.items():
            gauge = GaugeMetricFamily(f"weft_{name}", says, labels=["model"])
            for model_name, stats in read:
                if (value := getattr(stats, name)) is not None:
                    gauge.add_metric([model_name], value)
            yield gauge
        yield waiting
