"""Prometheus metrics: request counts and times, and the counters of the models."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ...lm.stats import Stats
from .models import ModelRegistry

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class ServerMetrics:
    """One server's metrics, in their own registry, because several servers may share a process.

    Labels have few values: route templates and model names.
    """

    def __init__(self, models: ModelRegistry) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "weft_http_requests", "Requests by route template.", ("method", "route", "status"),
            registry=self.registry,
        )  # fmt: skip
        self.seconds = Histogram(
            "weft_http_request_seconds", "Seconds from a request's headers to its response's end.",
            ("route",), buckets=_SECONDS, registry=self.registry,
        )  # fmt: skip
        self.first_token = Histogram(
            "weft_time_to_first_token_seconds",
            "Seconds from the start of a job or a streamed call to its first token.",
            ("model",), buckets=_SECONDS, registry=self.registry,
        )  # fmt: skip
        self.jobs = Counter(
            "weft_jobs", "Jobs by kind and final status.", ("kind", "status"),
            registry=self.registry,
        )  # fmt: skip
        self.running = Gauge(
            "weft_jobs_running", "Jobs that are running or queued.", registry=self.registry
        )
        self.registry.register(ModelCollector(models))

    def observe(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count a finished request. route: the route's template, such as "/looms/{loom}".

        seconds: its duration.
        """
        label = method if method in _METHODS else "other"
        self.requests.labels(label, route, str(status)).inc()
        self.seconds.labels(route).observe(seconds)

    def observe_first(self, model: str | None, seconds: float | None) -> None:
        """Record the time to the first token. seconds: None records nothing."""
        if model is not None and seconds is not None:
            self.first_token.labels(model).observe(seconds)

    def page(self) -> bytes:
        """Return all metrics in Prometheus' text format, for GET /metrics."""
        return generate_latest(self.registry)


_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
_COUNTERS = {
    "prefilled": "Prompt tokens computed.",
    "reused": "Prompt tokens whose KV was already computed.",
    "decoded": "Tokens generated.",
    "recomputed": "Tokens computed again, because their KV or logits were evicted.",
    "drafted": "Draft tokens that steps verified.",
    "draft_accepted": "Draft tokens that were drawn.",
    "steps": "Forward passes of the model.",
    "evicted": "Nodes of the token tree whose KV was evicted.",
    "parked": "Runs that were preempted to free memory.",
}
_GAUGES = {
    "kv_bytes": "Size of the KV in memory.",
    "kv_bytes_unshared": "Size of the KV if every branch had a cache of its own.",
    "kv_budget_bytes": "Limit of the KV's size.",
    "offloaded_bytes": "Size of the KV in host memory.",
    "pinned_tokens": "Tokens whose KV may not be evicted.",
}


class ModelCollector(Collector):
    """Collector for Prometheus: reads the models' counters when the metrics are requested."""

    def __init__(self, models: ModelRegistry) -> None:
        self.models = models

    def describe(self) -> Iterator[Metric]:
        """Return nothing: the models are not known yet."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Yield the counters and gauges of all models."""
        read: list[tuple[str, Stats]] = []
        help_text = "Queued work items."
        waiting = GaugeMetricFamily("weft_queue", help_text, labels=["model"])
        for model in self.models:
            if model.lm is not None and not model.lm.closed:
                read.append((model.name, model.lm.stats()))
                waiting.add_metric([model.name], model.lm.scheduler.n_queued)
        for name, help_text in _COUNTERS.items():
            counter = CounterMetricFamily(f"weft_{name}", help_text, labels=["model"])
            for model_name, stats in read:
                counter.add_metric([model_name], getattr(stats, name))
            yield counter
        for name, help_text in _GAUGES.items():
            gauge = GaugeMetricFamily(f"weft_{name}", help_text, labels=["model"])
            for model_name, stats in read:
                if (value := getattr(stats, name)) is not None:
                    gauge.add_metric([model_name], value)
            yield gauge
        yield waiting
