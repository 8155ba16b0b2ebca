"""Starting and stopping the endpoint on the Ray cluster that this process is connected to."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from gemma_ray.errors import ResourceError, StageError
from gemma_ray.serving.checks import check_cpus, check_memory, check_models, check_port
from gemma_ray.serving.config import ServeConfig
from gemma_ray.serving.deployment import ServedModel, build_application
from gemma_ray.serving.readiness import application_status, wait_until_ready

APPLICATION = "gemma-ray"
"""Name of the Serve application; a cluster has one."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Endpoint:
    """A running endpoint: `url` without `/v1`, and the models it serves. A context manager that stops it."""

    url: str
    models: tuple[str, ...]

    def stop(self) -> None:
        """Take the application down, and Serve with it when nothing else runs there."""
        stop_application()

    def __enter__(self) -> Endpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()


def serve_models(models: Sequence[ServedModel], config: ServeConfig) -> Endpoint:
    """Serve all models as one application on the connected Ray cluster, and return when each has answered.

    Raises ModelError for a folder that lacks a file, ResourceError for a taken port or too little memory or CPU, RecipeError for an engine
    argument that vLLM does not know, StageError (one line, with vLLM's own cause and the log's path) when a replica fails or
    `ready_timeout_s` has passed. Whatever was started is taken down again.
    """
    import ray
    from ray import serve

    logging.getLogger("ray.serve").setLevel(logging.WARNING)  # this process's, not the replicas': each step of a start is a line at INFO
    if not ray.is_initialized():
        raise StageError("serve_models needs a Ray cluster: call ray.init() first")
    check_models(models)
    if config.accelerator == "cpu":
        check_cpus(len(models) * config.min_replicas, config)
        check_memory(models, config)
    running = serve.status()
    if APPLICATION in running.applications:
        raise ResourceError(f"this cluster already serves the application '{APPLICATION}'; stop it first")
    if not running.proxies:
        check_port(config.host, config.port)
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(config.host, config.host)
    endpoint = Endpoint(f"http://{host}:{config.port}", tuple(model.id for model in models))
    try:
        _deploy(models, config)
        wait_until_ready(APPLICATION, endpoint.url, endpoint.models, config.ready_timeout_s)
    except BaseException:
        stop_application()
        raise
    log.info("serving %s at %s", ", ".join(endpoint.models), endpoint.url)
    return endpoint


def stop_application() -> None:
    """Delete the application from the connected cluster, and shut Serve down when it was the last one. Does nothing when it does not
    run.
    """
    from ray import serve

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    if application_status(APPLICATION) is not None:
        serve.delete(APPLICATION)
    status = serve.status()
    if status.proxies and not status.applications:
        serve.shutdown()


def _deploy(models: Sequence[ServedModel], config: ServeConfig) -> None:
    import ray
    from ray import serve
    from ray.serve.schema import LoggingConfig

    quiet = LoggingConfig(enable_access_log=False, log_level="WARNING")
    job_environment: dict[str, str] = dict(ray.get_runtime_context().runtime_env.get("env_vars") or {})
    with ThreadPoolExecutor(1) as pool:
        # Building the application imports vLLM, 8 s of CPU: meanwhile other processes bring up Serve's controller and proxy.
        imported = pool.submit(importlib.import_module, "gemma_ray.serving.server")
        # One proxy, on the head node: on an emulated slice all nodes share this machine's ports.
        http: dict[str, Any] = {"host": config.host, "port": config.port}
        serve.start(proxy_location="HeadOnly", http_options=http, logging_config=quiet)
        imported.result()
    target = serve.RunTarget(build_application(models, config, job_environment), name=APPLICATION, route_prefix="/", logging_config=quiet)
    serve.run_many([target], wait_for_applications_running=False)
